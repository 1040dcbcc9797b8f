"""A few hundred of the mutants that `python -m tests.program.mutations` makes by the hundred thousand."""

from __future__ import annotations

from pathlib import Path

from tests.program.mutations import run


def test_mutants_are_refused_or_run_right(tmp_path: Path) -> None:
    outcomes = run(400, seed=0, folder=tmp_path)
    assert not [outcome for outcome in outcomes if "WRONG" in outcome], outcomes
    # Each check has something to do, so that none of them stands idle.
    for outcome in ("refused by load", "refused by verify", "refused by matches", "ran, right"):
        assert outcomes[outcome] > 4, outcomes
