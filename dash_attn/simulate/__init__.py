"""Simulation: when every task of a Program runs, in a model of time. It needs no GPU."""

from dash_attn.simulate.closed_forms import CLOSED_FORMS, ClosedForm
from dash_attn.simulate.models import H200_SMS, Machine, Model, Paper
from dash_attn.simulate.simulation import Simulation, Work, board_for, lower_bounds, simulate, task_names
from dash_attn.simulate.tickets import Tickets

__all__ = [
    "CLOSED_FORMS",
    "H200_SMS",
    "ClosedForm",
    "Machine",
    "Model",
    "Paper",
    "Simulation",
    "Tickets",
    "Work",
    "board_for",
    "lower_bounds",
    "simulate",
    "task_names",
]
