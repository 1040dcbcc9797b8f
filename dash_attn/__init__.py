"""dash_attn: deterministic attention for training. The order of its sums is data."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

__all__ = [
    "CAUSAL",
    "FULL",
    "Mask",
    "Problem",
    "TileShape",
    "__version__",
    "attention",
    "backward",
    "documents",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "from_block_mask",
    "intervals",
    "intervals_by_row",
    "load",
    "tiles",
    "watch",
    "window",
]

if TYPE_CHECKING:
    from dash_attn.api.autograd import attention
    from dash_attn.api.explain import explain
    from dash_attn.api.flash import flash_attn_func, flash_attn_varlen_func
    from dash_attn.api.gradients import backward
    from dash_attn.integrations.flex import from_block_mask
    from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals, intervals_by_row, tiles, window
    from dash_attn.program import load
    from dash_attn.tiling import TileShape
    from dash_attn.watching.watcher import watch

# Loaded on first use: torch alone takes seconds, and most of the package does without it.
_HOME = {
    **dict.fromkeys(("attention", "backward", "flash_attn_func", "flash_attn_varlen_func"), "dash_attn.api"),
    "explain": "dash_attn.api.explain",
    **dict.fromkeys(("CAUSAL", "FULL", "Mask", "Problem"), "dash_attn.problem"),
    **dict.fromkeys(("documents", "intervals", "intervals_by_row", "tiles", "window"), "dash_attn.problem"),
    "from_block_mask": "dash_attn.integrations.flex",
    "TileShape": "dash_attn.tiling",
    "load": "dash_attn.program",
    "watch": "dash_attn.watching.watcher",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dash_attn' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)  # the next lookup does not come here
    return value


def __dir__() -> list[str]:
    return __all__
