"""The kernels, in CuTe DSL. No file outside this folder imports cutlass at import time."""
