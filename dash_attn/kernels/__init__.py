"""GPU kernels, one folder per architecture. Nothing here imports a compiler until a kernel is asked for."""
