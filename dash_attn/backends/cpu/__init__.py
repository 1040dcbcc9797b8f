"""The CPU backend: torch's forward, and a backward that replays a Program on worker threads."""

from dash_attn.backends.cpu.backward import ORDERS, backward, workspace_bytes
from dash_attn.backends.cpu.forward import PROVIDER, forward
from dash_attn.backends.cpu.shape import tile_shape

__all__ = ["ORDERS", "PROVIDER", "backward", "forward", "tile_shape", "workspace_bytes"]
