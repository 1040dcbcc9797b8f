"""Programs and timelines as pictures."""

from dash_attn.tools.viz.charts import Chart, Source, chart
from dash_attn.tools.viz.comparison import html, schedules
from dash_attn.tools.viz.gantt_chart import compare, gantt
from dash_attn.tools.viz.page import Section, report
from dash_attn.tools.viz.palette import ColourBy
from dash_attn.tools.viz.paper_figures import FIGURES, figures
from dash_attn.tools.viz.trace_events import perfetto

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
    "schedules",
]
