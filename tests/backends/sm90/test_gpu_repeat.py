"""A thousand runs give the same bits: make gpu-test"""

from __future__ import annotations

import pytest

from dash_attn.problem import CAUSAL, FULL, Problem, documents, tiles, window
from tests.backends.sm90.cases import Case, prepared

pytestmark = pytest.mark.gpu

RUNS = 1000
PACKED = [0, 100, 100, 471, 480, 1000, 1777]
CAUSAL_PACKED = documents(PACKED, causal=True)
UNEVEN = documents([0, 0, 300, 1777], [0, 400, 500, 900], causal=True)
CHECKERS = tiles([[(i + j) % 3 != 0 for j in range(8)] for i in range(8)], 128, 128)
PROBLEMS = {
    # Many waves: more chains than processors several times over.
    "waves full": Problem(8, 8, 8, 1024, 1024, 128),
    "waves causal": Problem(8, 8, 8, 1024, 1024, 128, mask=CAUSAL),
    "waves full d64": Problem(8, 8, 8, 1024, 1024, 64),
    "waves causal d64": Problem(8, 8, 8, 1024, 1024, 64, mask=CAUSAL),
    "long rows full": Problem(2, 4, 4, 2048, 2048, 128),
    "long rows causal d64": Problem(2, 8, 8, 2048, 2048, 64, mask=CAUSAL),
    "thousands of heads": Problem(64, 32, 32, 128, 128, 128, mask=CAUSAL),
    "thousands of heads d64": Problem(64, 32, 32, 128, 128, 64),
    # Many keys: a pass of its own finishes dQ.
    "longer full": Problem(2, 8, 8, 4096, 4096, 128),
    "longer causal": Problem(3, 8, 8, 4096, 4096, 128, mask=CAUSAL),
    "longer full d64": Problem(2, 9, 9, 4096, 4096, 64),
    "longer causal d64": Problem(3, 8, 8, 4096, 4096, 64, mask=CAUSAL),
    "longer grouped": Problem(1, 28, 4, 4100, 4100, 128, mask=CAUSAL),
    "longer documents d64": Problem(1, 8, 4, 4500, 4500, 64, mask=documents([0, 700, 720, 3000, 4500], causal=True)),
    # Grouped heads.
    "grouped 4": Problem(2, 32, 8, 512, 512, 128, mask=CAUSAL),
    "grouped 7": Problem(1, 28, 4, 1024, 1024, 128, mask=CAUSAL),
    "grouped full d64": Problem(2, 12, 4, 1024, 1024, 64),
    "one kv head": Problem(2, 16, 1, 777, 777, 128),
    "one kv head d64": Problem(2, 16, 1, 777, 777, 64, mask=CAUSAL),
    # Odd and unequal lengths.
    "odd": Problem(3, 5, 5, 1001, 1001, 128, mask=CAUSAL),
    "odd d64": Problem(3, 5, 5, 333, 999, 64),
    "more queries": Problem(2, 4, 2, 1500, 700, 128, mask=CAUSAL),
    "more keys": Problem(2, 4, 2, 300, 1100, 64, mask=CAUSAL),
    "one query": Problem(4, 8, 2, 1, 1500, 128),
    "one key": Problem(4, 8, 2, 1500, 1, 64),
    "many keys": Problem(1, 4, 4, 640, 4500, 128),
    "many keys d64": Problem(1, 4, 2, 640, 4500, 64, mask=CAUSAL),
    # Query rows in ranges, and dK and dV as sums over them.
    "panels": Problem(1, 8, 8, 1500, 1500, 128, mask=CAUSAL, panels=3),
    "panels d64": Problem(1, 8, 2, 2048, 2048, 64, panels=4),
    "panels of documents": Problem(1, 8, 4, 1777, 1777, 128, mask=CAUSAL_PACKED, panels=3),
    # Other masks, other types.
    "documents": Problem(2, 8, 4, 1777, 1777, 128, mask=CAUSAL_PACKED),
    "documents d64": Problem(2, 8, 4, 1777, 1777, 64, mask=documents(PACKED)),
    "uneven documents": Problem(1, 8, 8, 1777, 900, 128, mask=UNEVEN),
    "window": Problem(2, 8, 2, 1500, 1500, 128, mask=window(200, 0)),
    "window d64": Problem(2, 8, 8, 1500, 1500, 64, mask=window(100, 50)),
    "tiles": Problem(2, 8, 8, 1024, 1024, 128, mask=CHECKERS),
    "fp16": Problem(2, 8, 8, 1024, 1024, 128, "float16", mask=CAUSAL),
    "fp16 d64": Problem(2, 8, 8, 1024, 1024, 64, "float16"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_thousand_runs(problem: Problem) -> None:
    assert Case.make(problem).differing(prepared(problem), RUNS) == 0


def test_the_count_sees_a_difference() -> None:
    """The control: without turns the sums come in the order of arrival.

    All chains of a head visit the q tiles in the same order here, so that they meet at each. In a rotation they stay
    apart, and may well arrive in the same order every time.
    """
    problem = Problem(1, 4, 4, 4096, 4096, 64, mask=FULL)
    assert Case.make(problem).differing(prepared(problem, "fa3", ordered=False), 50) > 0
