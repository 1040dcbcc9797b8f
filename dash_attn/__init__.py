"""dash_attn: deterministic attention for training. A schedule is data."""

__version__ = "0.1.0"
