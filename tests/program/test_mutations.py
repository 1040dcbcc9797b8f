"""A few hundred of the mutants that `dash-attn audit --all` makes by the hundred thousand."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from dash_attn.backends.cpu.shape import tile_shape
from dash_attn.tools.bench.audit.mutations import PROBLEMS, SHAPE, Base, chance, mutations

SIGNALS = (signal.SIGALRM, signal.SIGPROF)


@pytest.fixture
def as_before() -> Iterator[None]:
    threads, handlers = torch.get_num_threads(), {each: signal.getsignal(each) for each in SIGNALS}
    torch.set_num_threads(1)  # the tensors are small
    yield
    torch.set_num_threads(threads)
    for each, handler in handlers.items():
        signal.signal(each, handler)


def test_mutants_are_refused_or_run_right(as_before: None) -> None:
    outcomes = Counter(islice(mutations(0), 400))
    assert not [outcome for outcome in outcomes if "WRONG" in outcome], outcomes
    # Each check has something to do, so that none of them stands idle.
    for outcome in ("refused by load", "refused by verify", "refused by prepare", "ran, right"):
        assert outcomes[outcome] > 4, outcomes


def test_a_program_that_is_not_compared_with_its_problem_is_noticed(
    as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants run as a user's Programs do. So the audit sees if `prepare` no longer compares."""
    monkeypatch.setattr("dash_attn.plan.matches", lambda *_: None)
    assert any("WRONG" in outcome for outcome in islice(mutations(0), 400))


def test_the_tiles_are_those_of_the_backend() -> None:
    """Otherwise `prepare` would refuse every mutant."""
    assert {tile_shape(problem) for problem, _ in PROBLEMS} == {SHAPE}


def test_another_seed_makes_other_mutants() -> None:
    base = Base(*PROBLEMS[0])
    first, second = ({base.mutant(chance(seed, number)) for number in range(100)} for seed in (0, 1))
    assert len(first & second) < 20  # small changes come up again
    assert chance(3, 4).random() == chance(3, 4).random() != chance(4, 3).random()
