"""Programs in time, without a GPU."""

from dash_attn.simulate.closed_forms import CLOSED_FORMS, ClosedForm
from dash_attn.simulate.dag import Dag, Phase, dag, depth_monotone
from dash_attn.simulate.lemma import ChainGraph
from dash_attn.simulate.models import Machine, Model, Paper
from dash_attn.simulate.simulate import Simulation, lower_bounds, simulate, task_names

__all__ = [
    "CLOSED_FORMS",
    "ChainGraph",
    "ClosedForm",
    "Dag",
    "Machine",
    "Model",
    "Paper",
    "Phase",
    "Simulation",
    "dag",
    "depth_monotone",
    "lower_bounds",
    "simulate",
    "task_names",
]
