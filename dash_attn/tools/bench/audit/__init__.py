"""The audit: repeats a backward under stress and compares bits. The work runs in child processes under a watchdog."""
