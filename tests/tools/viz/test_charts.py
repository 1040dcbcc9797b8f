"""Charts carry the right numbers, and lanes keep events apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dash_attn.simulate import Machine, Simulation
from dash_attn.tools.viz import chart, palette
from dash_attn.tools.viz.charts import best, lanes


def test_a_simulation_brings_its_numbers(simulated) -> None:
    simulation = simulated("fa3", model=Machine(epilogue=10.0))
    drawn = chart(simulation)
    assert (drawn.makespan, drawn.lower_bound) == (simulation.makespan, simulation.lower_bound)
    assert drawn.makespan > simulation.timeline.makespan  # the last epilogue is no event
    assert dict(drawn.facts())["makespan"] == f"{simulation.makespan:.5g} us"


def test_a_bare_timeline_counts_its_own(simulated) -> None:
    simulation = simulated("fa3")
    drawn = chart(simulation.timeline)
    assert drawn.lower_bound is None
    assert drawn.makespan == pytest.approx(simulation.makespan)
    assert drawn.stall == pytest.approx(simulation.stall)
    assert drawn.bubble == pytest.approx(simulation.bubble)
    assert [name for name, _ in drawn.facts()] == ["makespan", "stall", "bubble"]


def test_stalls_and_bubbles_are_shares_of_the_workers_time(simulated) -> None:
    simulation = simulated("fa3", n=8)
    whole = 8 * simulation.makespan
    facts = dict(chart(simulation).facts())
    assert facts["stall"] == f"{100 * simulation.stall / whole:.1f}%" != "0.0%"
    assert facts["bubble"] == f"{100 * simulation.bubble / whole:.1f}%" != facts["stall"]


def test_the_shortest_makespans_are_best(simulated) -> None:
    drawn = [chart(simulated(policy, n=8)) for policy in ("fa3", "symmetric_shift", "descending", "level")]
    shortest = min(each.makespan for each in drawn)
    assert best(drawn) == {i for i, each in enumerate(drawn) if each.makespan == pytest.approx(shortest)}
    assert 0 not in best(drawn)
    assert best(drawn[:1]) == set()  # nothing to compare
    assert best([drawn[0], drawn[0]]) == set()  # one policy, measured and simulated
    assert best([*drawn, chart(simulated("fa3").timeline)]) == set()  # a policy is unknown


def test_a_title_can_be_given(simulated) -> None:
    simulation = simulated("fa3")
    assert chart(simulation, "mine").title == chart(chart(simulation), "mine").title == "mine"


def test_one_lane_where_the_worker_itself_adds(simulated) -> None:
    assert not lanes(simulated("fa3").timeline).any()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fa3", "descending", "symmetric_shift"])
def test_events_of_a_lane_never_overlap(simulated, policy: str, depth: int) -> None:
    line = simulated(policy, n=8, heads=3, workers=8, model=Machine(depth=depth, writers=depth)).timeline
    lane = lanes(line)
    assert 1 <= lane.max() <= depth  # a buffer is a lane
    assert ((lane == 0) == (line.role == 0)).all()
    for worker in range(line.workers):
        for each in range(lane.max() + 1):
            chosen = (line.worker == worker) & (lane == each)
            spans = sorted(zip(line.begin[chosen], line.end[chosen], strict=True))
            assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


def test_lanes_of_nothing(simulated) -> None:
    line = simulated("fa3", model=Machine()).timeline
    empty = replace(line, **{name: getattr(line, name)[:0] for name in ("worker", "role", "task", "begin", "end")})
    assert len(lanes(empty)) == 0
    assert chart(empty).facts()


def test_the_ramp_can_be_told_apart_without_hue() -> None:
    grey = palette.swatches(16, "q") @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(grey) > 0.01).all()


def test_every_key_has_a_colour() -> None:
    for by in palette.WORDS:
        for count in (1, 2, 7, 200):
            colours = palette.swatches(count, by)
            assert colours.shape == (count, 3)
            assert ((colours >= 0) & (colours <= 1)).all()


def test_documents_have_colours_and_ends_of_cut_chains_a_key(packed: Simulation) -> None:
    names = packed.timeline.names
    np.testing.assert_array_equal(palette.keys(names, "sequence"), names.batch)
    assert len({tuple(colour) for colour in palette.swatches(3, "sequence")}) == 3
    ends = names.q_tile < 0
    assert ends.sum() == packed.board.num_steps - packed.board.num_tasks > 0
    assert set(palette.keys(names, "q")[ends].tolist()) == {6} and palette.keys(names, "q")[~ends].max() == 5
