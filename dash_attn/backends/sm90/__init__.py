"""The Hopper (sm_90a) backend. Its backward kernel executes Programs.

`device` holds the kernels and imports the CuTe DSL. `cta`, `config`, `smem_plan` and `barriers` describe them in pure
Python. `launch`, `forwards` and `backend` are the host's side.
"""
