"""What the GPU really did: stamps of a tracing kernel as a Timeline, and the machine model fitted to measurements.

`run`, `record` and `measured` work on a GPU machine that has torch and the kernel compiler alone; what is not `run`
needs no GPU.
"""
