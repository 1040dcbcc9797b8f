"""Schedules frozen as data."""

from dash_attn.program.build import build
from dash_attn.program.codec import load, save
from dash_attn.program.place import bundles, place
from dash_attn.program.program import CHAIN, FORMAT, RUN, TILE, Geometry, Program, Task, TaskArrays
from dash_attn.program.replay import Costs, Replay, Sequences, replay

__all__ = [
    "CHAIN",
    "FORMAT",
    "RUN",
    "TILE",
    "Costs",
    "Geometry",
    "Program",
    "Replay",
    "Sequences",
    "Task",
    "TaskArrays",
    "build",
    "bundles",
    "load",
    "place",
    "replay",
    "save",
]
