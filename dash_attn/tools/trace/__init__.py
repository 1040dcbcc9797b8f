"""Traces: the time stamps of a tracing kernel as a Timeline, and the machine model fitted to measurements.

`run`, `record` and `measured` need only torch and the kernel compiler. Only `run` needs a GPU.
"""
