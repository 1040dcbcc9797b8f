"""The kernels themselves, in CuTe DSL. Nothing outside this folder imports cutlass when it is loaded."""
