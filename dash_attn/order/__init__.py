"""Who visits what, when."""

from dash_attn.order.policies import AUTO_WIDTH, POLICIES, Policy, applicable, choose, parse, schedule
from dash_attn.order.types import Choice, Schedule, Template

__all__ = [
    "AUTO_WIDTH",
    "POLICIES",
    "Choice",
    "Policy",
    "Schedule",
    "Template",
    "applicable",
    "choose",
    "parse",
    "schedule",
]
