"""A program belongs to one problem: `matches` compares the two before the program runs."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from dash_attn.problem import Problem
from dash_attn.program import Geometry, Program
from dash_attn.tiling import TileShape, TileState, tile
from dash_attn.verify.errors import VerifyError
from dash_attn.verify.tables import tile_states

WAY_OUT = "make a program for this problem and the tiles of its backend, or give the name of a policy"


def matches(program: Program, problem: Problem, shape: TileShape) -> None:
    """Raises a VerifyError if the program is not for this problem and tile shape. It names the first difference.

    `verify` takes the tile table of the program as given. This function compares the table and the geometry with the
    problem: sizes, tile shape, and the state of every tile.
    """
    heads, group = problem.heads_kv, problem.group
    share = group if program.geometry.share > 1 else 1  # q heads that are panels of their own
    sizes = (problem.len_q, problem.len_k, shape.m, shape.n)
    expected = Geometry(problem.batch, heads * share, group // share, *sizes, share)
    for name, number in asdict(expected).items():
        given = getattr(program.geometry, name)
        if given != number:
            raise VerifyError(
                f"the program is for another problem: its {name} is {given}, the problem's is {number}; {WAY_OUT}"
            )
    stated, needed = tile_states(program), tile(problem, shape).state
    differing = np.argwhere(stated != needed)
    if len(differing):
        kv, q = differing[0].tolist()
        states = [TileState(int(each[kv, q])).name.lower() for each in (stated, needed)]
        raise VerifyError(
            f"the program is for another mask: q tile {q}, kv tile {kv} is {states[0]}, the problem's is {states[1]}; "
            f"{WAY_OUT}"
        )
