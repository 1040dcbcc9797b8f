"""The order of every policy stays as it is: a fingerprint that changes means that gradients change in their bits.

A change on purpose needs a new version of the package. Write the file anew with

    python -m tests.order.test_fingerprints
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dash_attn.launch import compose
from dash_attn.order import POLICIES, applicable
from dash_attn.problem import Mask, Problem
from dash_attn.tiling import TileShape, Tiling, tile

FILE = Path(__file__).with_name("fingerprints.json")
ROWS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


def tiling_of(row: dict[str, Any]) -> Tiling:
    heads = (row["batch"], row["heads_q"], row["heads_kv"])
    problem = Problem(*heads, row["tokens"], row["tokens"], row["dim"], mask=Mask(**row["mask"]))
    return tile(problem, TileShape(*row["tile"]))


def named(row: dict[str, Any]) -> str:
    tiling = tiling_of(row)
    p = tiling.problem
    return f"{p.mask} {p.batch}x{p.len_q} {p.heads_q}/{p.heads_kv} d{p.dim} {tiling.shape}"


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_orders_stay_as_they_are(row: dict[str, Any]) -> None:
    tiling = tiling_of(row)
    assert {policy: compose(tiling, policy).fingerprint for policy in row["fingerprints"]} == row["fingerprints"]


def test_every_policy_is_in_the_file() -> None:
    named_policies = {policy for row in ROWS for policy in row["fingerprints"]}
    assert named_policies == {"auto", *POLICIES}
    for row in ROWS:
        if len(row["fingerprints"]) > 1:
            assert set(row["fingerprints"]) == {"auto", *applicable(tiling_of(row))}


def rewrite() -> None:
    for row in ROWS:
        tiling = tiling_of(row)
        row["fingerprints"] = {policy: compose(tiling, policy).fingerprint for policy in row["fingerprints"]}
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    rewrite()
