"""A few hundred of the mutants that `dash-attn audit --all` makes by the hundred thousand."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from dash_attn.tools.bench.audit.mutations import mutations

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
    for outcome in ("refused by load", "refused by verify", "refused by matches", "ran, right"):
        assert outcomes[outcome] > 4, outcomes
