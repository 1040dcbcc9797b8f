"""Programs: an order and its launch queue as tables of numbers."""

from dash_attn.program.board import Board, board_of
from dash_attn.program.codec import Limits, load, save
from dash_attn.program.program import (
    CHAIN,
    FORMAT,
    RUN,
    RUN_WIDTH,
    TABLES,
    TILE,
    Chain,
    Geometry,
    PlaceRule,
    Program,
    Queue,
    Run,
    Sequences,
    Task,
    TaskArrays,
    Tile,
)
from dash_attn.program.replay import Costs, Replay, play
from dash_attn.program.tables import build

__all__ = [
    "CHAIN",
    "FORMAT",
    "RUN",
    "RUN_WIDTH",
    "TABLES",
    "TILE",
    "Board",
    "Chain",
    "Costs",
    "Geometry",
    "Limits",
    "PlaceRule",
    "Program",
    "Queue",
    "Replay",
    "Run",
    "Sequences",
    "Task",
    "TaskArrays",
    "Tile",
    "board_of",
    "build",
    "load",
    "play",
    "save",
]
