"""Hopper (sm_90a) backward kernel: an interpreter of Programs.

`config`, `smem_plan` and `barriers` are pure Python; the other files import the CuTe DSL.
"""

from .config import KernelConfig, select

__all__ = ["KernelConfig", "select"]
