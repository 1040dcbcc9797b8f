"""The order: which tile a chain visits when, and in which turn it adds. The order fixes the bits."""

from dash_attn.order.policies import AUTO_WIDTH, POLICIES, Policy, applicable, arrange, choose, cuts, parse, resolve
from dash_attn.order.types import Choice, Order, Rounds, Template

__all__ = [
    "AUTO_WIDTH",
    "POLICIES",
    "Choice",
    "Order",
    "Policy",
    "Rounds",
    "Template",
    "applicable",
    "arrange",
    "choose",
    "cuts",
    "parse",
    "resolve",
]
