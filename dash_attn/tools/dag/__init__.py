"""Programs as task graphs: critical paths, and the paper's lemma."""

from dash_attn.tools.dag.graph import Dag, Phase, dag, depth_monotone
from dash_attn.tools.dag.lemma import ChainGraph

__all__ = ["ChainGraph", "Dag", "Phase", "dag", "depth_monotone"]
