"""Small graphs: the tasks of a program, and the parallel chains of Lemma 1, each with its longest path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import rustworkx as rx
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dash_attn.simulate import Paper, Simulation
from dash_attn.timeline import COMPUTE
from dash_attn.tools.dag import ChainGraph, Phase, dag
from dash_attn.tools.dag.lemma import Node
from dash_attn.tools.viz import palette
from dash_attn.tools.viz.palette import swatches

Point = tuple[float, float]
FAINT = "#aab2c0"
WIDE, HIGH = 0.33, 0.17  # half the size of a box


@dataclass(frozen=True)
class Stroke:
    """How an arrow looks. It stops `shrink` points short of both ends."""

    colour: str
    width: float
    dashed: bool = False
    shrink: float = 10


def task_graph(axes: Axes, simulation: Simulation) -> None:
    """Compute and reduce of each task as boxes, a row for each worker; the critical path is drawn bold."""
    assert isinstance(simulation.model, Paper)
    graph, line = dag(simulation.program, simulation.placement, simulation.model), simulation.timeline
    names, critical = line.names, {str(phase) for phase in graph.critical_path()} | {"start"}
    order = np.lexsort((line.begin, line.worker))
    order = order[line.role[order] == COMPUTE]
    place = np.empty((len(order), 2))  # of each task: its step along its worker, and the worker
    place[line.task[order], 0] = np.arange(len(order)) - np.searchsorted(line.worker[order], line.worker[order])
    place[line.task[order], 1] = line.worker[order]

    def at(phase: Phase) -> Point:
        if phase.task < 0:
            return 0.1, (line.workers - 1) / 2
        step, worker = place[phase.task]
        return 1 + 2 * step + (phase.kind == "R"), float(worker)

    for tail, head, why in graph.graph.weighted_edge_list():
        (x, y), (u, v) = at(graph.graph[tail]), at(graph.graph[head])
        bold = {str(graph.graph[tail]), str(graph.graph[head])} <= critical
        colour = palette.STALL if why == "turn" else palette.INK if bold else FAINT
        # From rim to rim: along a row between the sides of the boxes, across rows between top and bottom.
        across = HIGH * np.sign(v - y) if why == "turn" else 0.0
        along = 0.0 if why == "turn" else WIDE
        stroke = Stroke(colour, 2.4 if bold else 1.2, shrink=1)
        edge(axes, (x + along * (x > 1 - WIDE), y + across), (u - along, v - across), stroke)
    fill = swatches(int(names.q_tile.max()) + 1, "q")
    for phase in graph.graph.nodes():
        x, y = at(phase)
        if phase.task < 0:
            dot(axes, (x, y), "s")
            continue
        ground = fill[names.q_tile[phase.task]] * (palette.REDUCE_SHADE if phase.kind == "R" else 1.0)
        rim = palette.INK if str(phase) in critical else ground
        shape = "round,pad=0,rounding_size=0.06"
        box = FancyBboxPatch(
            (x - WIDE, y - HIGH), 2 * WIDE, 2 * HIGH, boxstyle=shape, fc=ground, ec=rim, lw=2.2, zorder=3
        )
        axes.add_patch(box)
        ink = palette.INK if palette.is_light(ground) else palette.PAPER
        text = f"{phase.kind}({names.kv_tile[phase.task]},{names.q_tile[phase.task]})"
        axes.text(x, y, text, ha="center", va="center", size=9, color=ink, zorder=4)
    axes.set(xlim=(-0.15, 2.5 + 2 * place[:, 0].max()), ylim=(line.workers - 0.55, -0.45))
    axes.axis("off")
    title(axes, "its graph", f"bold: critical path {graph.length():.5g}     red: order of a dQ tile")


def chain_graph(axes: Axes, edges: tuple[tuple[Node, Node], ...], text: str) -> None:
    """Three chains of two tasks with added zero-weight edges; the critical path is drawn bold."""
    chains = ChainGraph(3, (1.0, 0.35, 1.0, 0.35))
    graph = chains.build(edges)
    last = len(chains.weights)
    path = list(rx.dag_weighted_longest_path(graph, lambda u, v, weight: weight))
    bold = set(pairwise(path))

    def at(node: int) -> Point:
        name = graph[node]
        if isinstance(name, str):
            return (0.0, 1.0) if name == "s" else (float(last), 1.0)
        return float(name[1]), float(name[0])

    for tail, head, weight in graph.weighted_edge_list():
        added, heavy = weight == 0, (tail, head) in bold
        colour = palette.STALL if added else palette.INK if heavy else FAINT
        edge(axes, at(tail), at(head), Stroke(colour, 2.6 if heavy else 1.4, dashed=added))
        if not added:
            (x, y), (u, v) = at(tail), at(head)
            middle, lift = (x + u) / 2 + 0.13 * (v - y), 0.1 if y == v else 0.15
            axes.text(middle, (y + v) / 2 - lift, f"{weight:g}", ha="center", va="center", size=8, color=palette.MUTED)
    for node in graph.node_indices():
        name = graph[node]
        dot(axes, at(node), name if isinstance(name, str) else str(name[1]))
    axes.set(xlim=(-0.3, last + 0.3), ylim=(2.45, -0.45))
    axes.axis("off")
    before, after = chains.critical_path(), chains.critical_path(edges)
    change = f"critical path {before:g}" + (", as before" if after == before else f" becomes {after:g}")
    title(axes, text, change)


def title(axes: Axes, left: str, right: str) -> None:
    axes.set_title(left, loc="left", size=10.5, weight="bold", color=palette.INK, pad=5)
    axes.set_title(right, loc="right", size=8.5, color=palette.MUTED, pad=5)


def dot(axes: Axes, at: Point, text: str) -> None:
    axes.plot(*at, "o", ms=17, mfc=palette.PAPER, mec=palette.INK, mew=1.4, zorder=3)
    axes.text(*at, text, ha="center", va="center_baseline", size=9, color=palette.INK, zorder=4)


def edge(axes: Axes, tail: Point, head: Point, stroke: Stroke) -> None:
    """An arrow."""
    axes.add_patch(
        FancyArrowPatch(
            tail,
            head,
            arrowstyle="-|>",
            mutation_scale=6 + 3 * stroke.width,
            lw=stroke.width,
            ls=(0, (4, 2)) if stroke.dashed else "-",
            color=stroke.colour,
            shrinkA=stroke.shrink,
            shrinkB=stroke.shrink,
            zorder=2 if stroke.shrink else 5,
        )
    )
