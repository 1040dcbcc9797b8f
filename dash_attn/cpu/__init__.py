"""The CPU backend: torch's forward, and a backward that replays a Program on worker threads."""

from dash_attn.cpu.backward import ORDERS, backward, workspace_bytes
from dash_attn.cpu.buffers import Gradients, Operands
from dash_attn.cpu.forward import PROVIDER, forward
from dash_attn.cpu.shape import tile_shape

__all__ = ["ORDERS", "PROVIDER", "Gradients", "Operands", "backward", "forward", "tile_shape", "workspace_bytes"]
