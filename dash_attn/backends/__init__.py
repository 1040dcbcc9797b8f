"""Backends: readers of Programs, one for each kind of device."""

from __future__ import annotations

import torch

from dash_attn.backends.base import (
    Backend,
    Backward,
    Extras,
    Forward,
    Gradients,
    Held,
    KeySums,
    Operands,
    Options,
    Partials,
)
from dash_attn.backends.cpu.forks import apart

__all__ = [
    "Backend",
    "Backward",
    "Extras",
    "Forward",
    "Gradients",
    "Held",
    "KeySums",
    "Operands",
    "Options",
    "Partials",
    "backend_for",
]


def backend_for(device: torch.device) -> Backend:
    """The backend of a device, or an error that names the way out. Nothing falls back silently."""
    if device.type == "cpu":
        with apart:  # a child forked while a module loads inherits a lock that nobody releases
            from dash_attn.backends.cpu.backend import CpuBackend

        return CpuBackend()
    if device.type == "cuda":
        from dash_attn.backends.sm90.backend import Sm90Backend, require  # only machines with a GPU load it

        require(device)
        return Sm90Backend(device)
    raise NotImplementedError(
        f"q is on {device}: dash_attn computes on cpu and cuda (Hopper) tensors. Move q, k and v with .cpu(), or use "
        "torch's scaled_dot_product_attention there"
    )
