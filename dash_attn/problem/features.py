"""Features: what changes the softmax of a problem, beside its mask."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST, LARGEST = 2.0**-100, 2.0**100  # of softcap: its products with other factors stay in the range of float32


@dataclass(frozen=True)
class Features:
    """The defaults are plain softmax attention.

    softcap  scores s become softcap * tanh(s / softcap); 0 leaves them as they are
    sinks    each query head has one more score, its sink. It takes part in the softmax and has no value
    dropout  the probability that a weight of a value becomes 0; the others are divided by 1 - dropout
    dim_v    head dim of v and out, where it is not that of q and k
    """

    softcap: float = 0.0
    sinks: bool = False
    dropout: float = 0.0
    dim_v: int | None = None

    def __post_init__(self) -> None:
        if self.softcap and not SMALLEST <= self.softcap <= LARGEST:
            raise ValueError(
                f"softcap must be a finite number above 0, from 2**-100 to 2**100, or 0 for none; got {self.softcap}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.dim_v is not None and self.dim_v < 1:
            raise ValueError(f"dim_v must be at least 1, got {self.dim_v}")

    def __str__(self) -> str:
        parts = {
            f"softcap {self.softcap}": self.softcap,
            "sinks": self.sinks,
            f"dropout {self.dropout}": self.dropout,
            f"head dim {self.dim_v} of v": self.dim_v,
        }
        return ", ".join(text for text, is_there in parts.items() if is_there) or "none"


PLAIN = Features()
