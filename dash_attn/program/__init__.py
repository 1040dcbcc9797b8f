"""Schedules frozen as data."""

from dash_attn.program.build import build
from dash_attn.program.codec import load, save
from dash_attn.program.place import bundles, place
from dash_attn.program.program import CHAIN, FORMAT, RUN, TILE, Chain, Geometry, Program, Run, Task, TaskArrays, Tile
from dash_attn.program.replay import Costs, Replay, Sequences, replay

__all__ = [
    "CHAIN",
    "FORMAT",
    "RUN",
    "TILE",
    "Chain",
    "Costs",
    "Geometry",
    "Program",
    "Replay",
    "Run",
    "Sequences",
    "Task",
    "TaskArrays",
    "Tile",
    "build",
    "bundles",
    "load",
    "place",
    "replay",
    "save",
]
