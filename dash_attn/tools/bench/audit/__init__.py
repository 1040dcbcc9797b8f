"""Does it really repeat, bit for bit, whatever else the machine does? Work runs in child processes under a watchdog."""
