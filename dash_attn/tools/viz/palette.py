"""The colours of all pictures. Tasks are coloured by place. Waiting has a colour that no task has.

Tiles take a ramp of steadily rising lightness, which stays readable without colour vision; heads and sequences take the
hues of Okabe and Ito. A reduction is its task, darker. Stalls are hatched as well as coloured.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from dash_attn.timeline import TaskNames

ColourBy = Literal["q", "kv", "head", "sequence"]
Colours = npt.NDArray[np.float64]  # rows of red, green, blue in 0..1

RAMP = ("#3d4f9f", "#2f7fb8", "#35a7a5", "#86c97c", "#f0df72")
HUES = ("#3b8bc4", "#e8a838", "#2fa384", "#c77fb0", "#8fcdf0", "#8a8f99")
STALL, STALL_PALE = "#d1495b", "#f9e1e3"
BUBBLE, INK, MUTED, PAPER = "#eef0f4", "#1f2430", "#6b7280", "#ffffff"
REDUCE_SHADE = 0.62  # brightness of a reduction against that of its task
REDUCE_TINT = 0.5  # on a dark page: how far from its task to white
WORDS: dict[ColourBy, str] = {"q": "q tile", "kv": "kv tile", "head": "head", "sequence": "sequence"}
HUED = ("head", "sequence")  # coloured by hue, the others along the ramp


def rgb(colour: str) -> Colours:
    """'#rrggbb' as three numbers."""
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def keys(names: TaskNames, by: ColourBy) -> npt.NDArray[np.int64]:
    """What a task is coloured by. The ends of cut chains come after the last q tile."""
    if by == "sequence":
        return names.batch
    if by == "head":
        return names.batch * (1 + int(names.q_head.max(initial=0))) + names.q_head
    if by == "kv":
        return names.kv_tile
    return np.where(names.q_tile < 0, 1 + names.q_tile.max(initial=0), names.q_tile)


def swatches(count: int, by: ColourBy) -> Colours:
    """Colours of keys 0 .. count-1."""
    if by in HUED:
        return np.stack([rgb(HUES[i % len(HUES)]) for i in range(max(count, 1))])
    stops = np.stack([rgb(stop) for stop in RAMP])
    place = np.linspace(0, len(RAMP) - 1, max(count, 2))
    return np.stack([np.interp(place, np.arange(len(RAMP)), channel) for channel in stops.T], axis=1)[: max(count, 1)]


def is_light(colour: Colours) -> bool:
    """Does dark text read better than white on it?"""
    return bool(colour @ np.array([0.299, 0.587, 0.114]) > 0.52)
