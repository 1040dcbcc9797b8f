"""Pages that compare policies: their table, and what is marked in it."""

from __future__ import annotations

import re
from pathlib import Path

from dash_attn.simulate import Machine
from dash_attn.tools.viz import html, schedules


def test_the_table_says_what_the_simulations_say(simulated) -> None:
    pair = [simulated("fa3", n=8), simulated("symmetric_shift", n=8)]
    header, fa3, symmetric = schedules(pair).table
    assert header[1] == "makespan [units]" and header[3:5] == ["bubble", "stall"]
    assert fa3[1] == f"{pair[0].makespan:.5g}" and fa3[-1] == "1.00x"
    assert fa3[4] == f"{pair[0].stall / (8 * pair[0].makespan):.1%}"
    assert symmetric[-1] == f"{pair[0].makespan / pair[1].makespan:.2f}x" != "1.00x"
    assert schedules(pair).best == {1}


def test_in_the_machine_model_only_blocked_workers_lose_time(simulated) -> None:
    simulation = simulated("fa3", n=8, heads=2, workers=8, model=Machine(depth=1, writers=1))
    header, row = schedules([simulation]).table
    assert header[4] == "blocked" and row[4] == f"{simulation.blocked / (8 * simulation.makespan):.1%}"
    assert row[4] != f"{simulation.stall / (8 * simulation.makespan):.1%}"


def test_a_page_of_simulations_has_a_table_and_one_of_timelines_has_none(simulated, tmp_path: Path) -> None:
    several = [simulated("fa3"), simulated("descending")]
    compared = html(several, tmp_path / "a.html").read_text()
    assert len(re.findall("<tr", compared)) == 3
    assert "<table" not in html([each.timeline for each in several], tmp_path / "b.html").read_text()
