"""Problem: everything that fixes the mathematical answer."""

from __future__ import annotations

from dataclasses import dataclass

from dash_attn.problem.mask import FULL, Mask


@dataclass(frozen=True)
class Problem:
    """Attention over `batch` sequences. Query heads h*group .. h*group+group-1 share key/value head h."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    dim: int = 128
    dtype: str = "bfloat16"
    scale: float | None = None
    mask: Mask = FULL

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("len_q", "len_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}")
        if self.mask.tiles is not None and not self.mask.tiles.covers(self.len_q, self.len_k):
            raise ValueError(f"mask {self.mask} does not cover {self.len_q} queries x {self.len_k} keys")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def groups(self) -> int:
        """Key/value heads of all sequences. Each has its own chains and turns."""
        return self.batch * self.heads_kv

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale
