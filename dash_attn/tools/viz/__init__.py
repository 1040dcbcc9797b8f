"""Programs and timelines as pictures."""

from dash_attn.tools.viz.chart import Chart, Source, chart
from dash_attn.tools.viz.figures import FIGURES, figures
from dash_attn.tools.viz.gantt import compare, gantt
from dash_attn.tools.viz.html import Section, html, report
from dash_attn.tools.viz.palette import ColourBy
from dash_attn.tools.viz.perfetto import perfetto

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
