"""What the GPU really did: stamps of a tracing kernel as a Timeline, and the machine model fitted to measurements.

`record` and `run` work on a GPU machine that has torch and the kernel compiler alone; `measured` and `calibrate` need
no GPU.
"""
