"""The order: which q tile each chain visits at each step, and the turn of each visit. The order fixes the bits."""

from dash_attn.order.policies import (
    AUTO_WIDTH,
    POLICIES,
    Policy,
    applicable,
    arrange,
    choose,
    cuts,
    looks_at_batch,
    parse,
    require_alone,
    resolve,
)
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
    "looks_at_batch",
    "parse",
    "require_alone",
    "resolve",
]
