"""Programs and timelines as pictures."""

from dash_attn.viz.chart import Chart, Source, chart
from dash_attn.viz.figures import FIGURES, figures
from dash_attn.viz.gantt import compare, gantt
from dash_attn.viz.html import Section, html, report
from dash_attn.viz.palette import ColourBy
from dash_attn.viz.perfetto import perfetto

__all__ = [
    "FIGURES",
    "Chart",
    "ColourBy",
    "Section",
    "Source",
    "chart",
    "compare",
    "figures",
    "gantt",
    "html",
    "perfetto",
    "report",
]
