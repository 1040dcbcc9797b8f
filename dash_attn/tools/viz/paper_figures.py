"""The paper's schedule figures, drawn from our own programs, and the picture of the README.

Numbers follow the paper: n kv tiles on n workers, m heads, compute c and reduce r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.program import Chain, Program
from dash_attn.simulate import CLOSED_FORMS, Paper, Simulation, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.timeline import Timeline
from dash_attn.tools.viz import palette
from dash_attn.tools.viz.charts import Chart, chart
from dash_attn.tools.viz.gantt_chart import canvas, draw, legend, panel, save, stack
from dash_attn.tools.viz.graphs import Stroke, chain_graph, edge, task_graph
from dash_attn.tools.viz.palette import ColourBy

COMPUTE, REDUCE = 1.0, 0.35
PHASES = ("#c9d7ee", "#f6dfa4", "#bfe3d0")  # rectangle, left triangle, right triangle


def program(n: int, heads: int, mask: Mask, policy: str) -> Program:
    """n x n tiles in each of `heads` heads, ordered by a policy."""
    return compose(tile(Problem(1, heads, heads, 2 * n, 2 * n, mask=mask), TileShape(2, 2)), policy)


def run(n: int, heads: int, mask: Mask, policy: str) -> Simulation:
    """That program on n workers under the paper's model."""
    return simulate(program(n, heads, mask, policy), n, Paper(COMPUTE, REDUCE))


def steps(order: Program) -> np.ndarray:
    """When each tile (q, kv) of the first head is visited, counted in tasks along its worker; -1: masked."""
    step = np.full((order.geometry.num_q, order.geometry.num_kv), -1)
    tasks, sequences = order.expand(), order.bundles
    for first, last in zip(sequences.first[:-1], sequences.first[1:], strict=True):
        now = 0
        for chain in sequences.chains[first:last].tolist():
            span = slice(int(order.task_first[chain]), int(order.task_first[chain + 1]))
            if not order.chains[chain, : Chain.KV_TILE].any():
                step[tasks.q[span], order.chains[chain, Chain.KV_TILE]] = now + np.arange(len(tasks.q[span]))
            now += len(tasks.q[span])
    return step


def naive() -> Figure:
    """Two kv tiles, two q tiles: one turn that waits, and the graph whose longest path it lies on."""
    simulation = run(2, 1, FULL, "fa3")
    line = simulation.timeline
    figure = canvas(11, 2.75)

    def label(_: Timeline, role: str, task: int) -> str:
        return f"{role[0].upper()}({line.names.kv_tile[task]},{line.names.q_tile[task]})" if role != "stall" else ""

    left = panel(figure, (0.62, 0.42, 4.9, 1.4))
    draw(left, chart(simulation, "naive order, 2 x 2 tiles"), label=label, note=f"makespan {simulation.makespan:.5g}")
    for event in line:
        if event.role == "stall":
            stroke = Stroke(palette.STALL, 2.0, shrink=0)
            edge(left, (event.end, event.worker - 0.3), (event.end, event.worker + 0.3), stroke)
    task_graph(panel(figure, (5.95, 0.42, 4.85, 1.7)), simulation)
    legend(figure, [chart(simulation)], "q")
    return figure


def timeline(title: str, mask: Mask, policy: str, colour: ColourBy = "q") -> Figure:
    """One policy, two heads, four workers."""
    return stack([formula(run(4, 2, mask, policy), title, (4, 2))], colour=colour)


def formula(simulation: Simulation, title: str, size: tuple[int, int]) -> Chart:
    """The chart of a simulation of (n, heads), titled with the closed form of its makespan."""
    known = CLOSED_FORMS[simulation.program.mask, simulation.program.policy]
    return chart(simulation, f"{title}:  {known.text} = {known.makespan(*size, COMPUTE, REDUCE):.5g}")


def lemma() -> Figure:
    """An edge to an equal or greater depth costs nothing; an edge back lengthens the critical path."""
    figure = canvas(11, 3.45)
    chain_graph(panel(figure, (0.2, 0.42, 5.1, 2.6)), (((0, 1), (1, 2)), ((1, 2), (2, 2))), "depth never falls")
    chain_graph(panel(figure, (5.7, 0.42, 5.1, 2.6)), (((0, 3), (1, 2)),), "an edge leads back")
    caption = "circles: depth     bold: critical path     red: added edge of weight 0 (the order of a dQ tile)"
    figure.text(0.5, 0.05, caption, ha="center", size=9, color=palette.MUTED)
    return figure


def shift() -> Figure:
    """When each worker visits which q tile, and the timeline without a gap that comes of it."""
    simulation, step = run(4, 2, FULL, "shift"), steps(program(4, 2, FULL, "shift"))
    figure = canvas(11, 3.15)
    table(panel(figure, (0.72, 0.42, 1.8, 1.8)), step, "step of each visit", step_colours(step))
    draw(panel(figure, (3.3, 0.42, 7.48, 1.8)), formula(simulation, "shift", (4, 2)))
    legend(figure, [chart(simulation)], "q")
    return figure


def symmetric_shift() -> Figure:
    """Phase 1 rotates through the rectangle; phase 2 folds the two triangles into one, rotated from its diagonal."""
    n, half = 8, 4
    simulation, step = run(n, 2, CAUSAL, "symmetric_shift"), steps(program(n, 2, CAUSAL, "symmetric_shift"))
    q, kv = np.indices(step.shape)
    phase = np.where(q < half, 1, np.where(kv < half, 0, 2))
    folded, folded_phase = np.full((half + 1, half), -1), np.zeros((half + 1, half), np.int64)
    for row, column in zip(*np.nonzero((step >= 0) & (phase > 0)), strict=True):
        # The right triangle, turned by half a circle, fills what the mask left empty above the left one.
        place = (n - 1 - row, n - 1 - column) if column >= half else (row + 1, column)
        folded[place], folded_phase[place] = step[row, column], phase[row, column]

    figure = canvas(11, 6.25)
    colours = np.stack([palette.rgb(colour) for colour in PHASES])
    table(panel(figure, (0.72, 0.42, 2.7, 2.7)), step, "step of each visit", colours[phase])
    fold = panel(figure, (4.55, 0.42, 1.35, 1.69))
    table(fold, folded, "phase 2, folded", colours[folded_phase])
    fold.set_yticks([])
    fold.set(xlabel="worker", ylabel="")
    _phase_notes(panel(figure, (6.9, 0.42, 3.7, 2.7)))
    draw(panel(figure, (0.62, 3.82, 10.16, 1.67)), formula(simulation, "symmetric_shift", (n, 2)))
    legend(figure, [chart(simulation)], "q")
    return figure


def _phase_notes(axes: Axes) -> None:
    axes.set(xlim=(0, 3.7), ylim=(2.7, 0))
    axes.axis("off")
    texts = (
        "phase 1: rotate through the rectangle\nthat all long chains share",
        "phase 2: climb the long chain's triangle\nfrom its diagonal",
        "phase 2: come down the short chain,\nthe partner on the same worker",
    )
    for i, (colour, text) in enumerate(zip(PHASES, texts, strict=True)):
        axes.add_patch(Rectangle((0, 0.03 + 0.55 * i), 0.34, 0.34, fc=colour, lw=0))
        axes.text(0.48, 0.2 + 0.55 * i, text, va="center", size=9, color=palette.INK)
    rule = (
        "No number stands twice in a row of the left table:\n"
        "no two workers add to one dQ tile at the same step,\n"
        "so no turn ever waits."
    )
    axes.text(0, 1.8, rule, va="top", size=9, color=palette.MUTED)


def before_after() -> Figure:
    """The paper's baseline above its optimum, for both masks, on one time axis."""
    figure = canvas(10, 4.36)
    pairs = ((CAUSAL, ("fa3", "symmetric_shift")), (FULL, ("fa3", "shift")))
    for column, (mask, policies) in enumerate(pairs):
        before, after = (run(8, 2, mask, policy) for policy in policies)
        gain = f"makespan {after.makespan:.5g}: {before.makespan / after.makespan:.2f}x faster"
        for row, (simulation, note) in enumerate(((before, f"makespan {before.makespan:.5g}"), (after, gain))):
            axes = panel(figure, (0.55 + 4.82 * column, 0.4 + 1.78 * row, 4.5, 1.4))
            draw(axes, chart(simulation, f"{mask}, {policies[row]}"), end=before.makespan, note=note)
            axes.set(xlabel=f"time in the paper's model (compute {COMPUTE:g}, reduce {REDUCE:g})" if row else "")
            axes.set(ylabel="" if column else "worker")
            axes.tick_params(labelbottom=bool(row))
    legend(figure, [chart(before)], "q")
    return figure


def table(axes: Axes, values: np.ndarray, title: str, colours: np.ndarray) -> None:
    """Rows are q tiles, columns kv tiles; masked cells (-1) stay blank."""
    for (row, column), value in np.ndenumerate(values):
        ground = colours[row, column] if value >= 0 else palette.rgb(palette.BUBBLE)
        axes.add_patch(Rectangle((column, row), 1, 1, fc=ground, ec=palette.PAPER, lw=1.5))
        if value >= 0:
            axes.text(
                column + 0.5, row + 0.5, str(value), ha="center", va="center_baseline", size=10, color=palette.INK
            )
    rows, columns = values.shape
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    axes.set_xticks(np.arange(columns) + 0.5, [str(c) for c in range(columns)])
    axes.set_yticks(np.arange(rows) + 0.5, [str(r) for r in range(rows)])
    axes.tick_params(length=0, labelsize=8, colors=palette.MUTED)
    axes.set_xlabel("kv tile", size=9, color=palette.MUTED, labelpad=2)
    axes.set_ylabel("q tile", size=9, color=palette.MUTED)
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=palette.INK, pad=5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def step_colours(values: np.ndarray) -> np.ndarray:
    """Tints by step: too pale to be taken for the colour of a tile."""
    share: np.ndarray = np.linspace(0.1, 0.5, int(values.max()) + 1)[values][..., None]
    return np.asarray(1 - share + share * palette.rgb(palette.RAMP[1]))


FIGURES: dict[str, Callable[[], Figure]] = {
    "fig2_naive_dag": naive,
    "fig3a_fa3_full": lambda: timeline("fa3, full mask", FULL, "fa3"),
    "fig3b_fa3_causal": lambda: timeline("fa3, causal mask", CAUSAL, "fa3"),
    "fig4_descending": lambda: timeline("descending, causal mask", CAUSAL, "descending", "head"),
    "fig5_lemma": lemma,
    "fig6_shift": shift,
    "fig7_symmetric_shift": symmetric_shift,
    "before_after": before_after,
}


def figures(out_dir: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw every figure into a folder, in every format; returns the files."""
    paths = []
    for name, figure in FIGURES.items():
        drawn = figure()
        paths += [save(drawn, Path(out_dir) / f"{name}.{ending}") for ending in formats]
    return paths
