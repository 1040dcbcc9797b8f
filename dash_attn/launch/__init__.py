"""Which worker runs which chain, and when. This changes the speed and never a bit."""

from dash_attn.launch.placement import place
from dash_attn.launch.queue import enqueue
from dash_attn.order import Choice, arrange
from dash_attn.program import Program, build
from dash_attn.tiling import Tiling

__all__ = ["compose", "enqueue", "place"]


def compose(tiling: Tiling, policy: str | Choice = "auto") -> Program:
    """The program of a tiling: its order by a policy, and the launch queue of that policy."""
    order = arrange(tiling, policy)
    return build(order, enqueue(order))
