"""Events on workers, simulated or measured."""

from dash_attn.timeline.timeline import COMPUTE, REDUCE, ROLES, STALL, Event, TaskNames, Timeline, events

__all__ = ["COMPUTE", "REDUCE", "ROLES", "STALL", "Event", "TaskNames", "Timeline", "events"]
