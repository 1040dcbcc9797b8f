"""check(model): which layers run dash_attn, on which backend, and what stands in the way. No batch is run."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dash_attn.backends import Backend, backend_for
from dash_attn.integrations.transformers.forward import UNSUPPORTED
from dash_attn.integrations.transformers.registration import NAMES
from dash_attn.problem import Features, Problem

GPU_LARGEST, GPU_STEP = 128, 8  # head dims that the GPU backend takes
MASK_MAKERS = re.compile(r"\bcreate_\w*mask\w*\(")
CALL = re.compile(r"attention_interface\([^()]*(?:\([^()]*\)[^()]*)*\)")
COMPUTES = re.compile(r"softmax\(|scaled_dot_product_attention\(|MultiheadAttention\(")


sources: dict[Any, str] = {}  # by class


@dataclass(frozen=True)
class Layer:
    """One attention module of a model.

    runs        dash, or the name of what runs instead
    obstacles   why dash_attn cannot run it, or will refuse it
    """

    name: str
    kind: str
    runs: str
    backend: str
    obstacles: tuple[str, ...]

    def __str__(self) -> str:
        where = f" on {self.backend}" if self.runs == "dash" else ""
        return "; ".join([f"{self.name} ({self.kind}): {self.runs}{where}", *self.obstacles])


@dataclass(frozen=True)
class Report:
    """What `check` finds. `ok`: every attention layer runs dash_attn, and nothing stands in the way."""

    model: str
    layers: tuple[Layer, ...]

    @property
    def ok(self) -> bool:
        return bool(self.layers) and all(x.runs == "dash" and not x.obstacles for x in self.layers)

    def __str__(self) -> str:
        ours = sum(x.runs == "dash" for x in self.layers)
        return "\n".join(
            [f"{self.model}: {ours} of {len(self.layers)} attention layers run dash_attn", *map(str, self.layers)]
        )


def check(model: nn.Module) -> Report:
    """Looks at the model's modules, its configs and its source. What only a batch shows, such as an unusual mask, is
    refused in the first forward."""
    layers = []
    for name, module in model.named_modules():
        if uses_interface(type(module)):
            layers.append(_layer(name, module, model))
        elif computes_attention(type(module)):
            layers.append(_own(name, module))
    return Report(type(model).__name__, tuple(layers))


def _source(cls: Any) -> str:
    if cls in sources:
        return sources[cls]
    sources[cls] = _read_source(cls)
    return sources[cls]


def _read_source(cls: Any) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def uses_interface(cls: Any) -> bool:
    """Whether the class asks Transformers for the attention function by name."""
    return any("ALL_ATTENTION_FUNCTIONS" in _source(each) for each in _written(cls))


def computes_attention(cls: Any) -> bool:
    return "Attention" in cls.__name__ and any(COMPUTES.search(_source(each)) for each in _written(cls))


def _written(cls: Any) -> list[Any]:
    """The class and those it inherits from, without the base classes of torch and of Transformers."""
    libraries = ("torch.", "transformers.modeling_", "transformers.generation", "transformers.integrations", "builtins")
    return [each for each in cls.__mro__ if not each.__module__.startswith(libraries)]


def _layer(name: str, module: nn.Module, model: nn.Module) -> Layer:
    config = getattr(module, "config", getattr(model, "config", None))
    chosen = str(getattr(config, "_attn_implementation", None))
    runs = "dash" if chosen in NAMES else chosen
    backend, obstacles = "", []
    if runs != "dash":
        obstacles.append("the config names another attention: set attn_implementation='dash'")
    else:
        backend, chosen_by, obstacles = _backend(module)
        obstacles += _refused(module) + _dims(module, backend)
        obstacles += [] if chosen_by is None else _lacking(module, config, chosen_by)
    return Layer(name, type(module).__name__, runs, backend, tuple(obstacles))


def _own(name: str, module: nn.Module) -> Layer:
    obstacle = "it computes attention itself"
    module_of = sys.modules.get(type(module).__module__)
    try:
        if module_of is not None and MASK_MAKERS.search(inspect.getsource(module_of)):
            obstacle += ", and with Transformers' masks: the first forward is refused; use attn_implementation='eager'"
    except (OSError, TypeError):
        pass
    return Layer(name, type(module).__name__, "its own attention", "", (obstacle,))


def _backend(module: nn.Module) -> tuple[str, Backend | None, list[str]]:
    """The name of the backend, the backend if there is one, and what stands in its way."""
    weight = next(module.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    try:
        backend = backend_for(device)
    except NotImplementedError as error:
        return str(device), None, [str(error)]
    if device.type == "cuda" and weight is not None and weight.dtype == torch.float32:
        return backend.name, backend, ["weights are float32: on GPUs use bfloat16 or float16, or autocast"]
    return backend.name, backend, []


def _lacking(module: nn.Module, config: Any, backend: Backend) -> list[str]:
    """Features that the module needs and its backend refuses."""
    fields = config.to_dict() if config is not None else {}
    needs = {
        f"{name}={value}, so training is refused": Features(dropout=value)
        for name, value in fields.items()
        if isinstance(value, float) and 0 < value < 1 and "drop" in name and "att" in name
    }
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap:
        needs[f"attn_logit_softcapping={softcap}"] = Features(softcap=softcap)
    if " s_aux=" in _handed(module):
        needs["it gives its attention sinks, s_aux"] = Features(sinks=True)
    reasons = []
    for said, features in needs.items():
        try:
            backend.tile_shape(Problem(1, 1, 1, 256, 256, 64, "bfloat16", features=features))
        except (NotImplementedError, ValueError) as error:
            reasons.append(f"{said}: {error}")
    return reasons


def _handed(module: nn.Module) -> str:
    """What the source of the module gives to its attention function."""
    return "".join(CALL.findall(_source(type(module))))


def _refused(module: nn.Module) -> list[str]:
    handed = _handed(module)
    return [
        f"it gives its attention {name}: dash_attn does not do {meaning}; use attn_implementation='eager'"
        for name, meaning in UNSUPPORTED.items()
        if name != "output_attentions" and f" {name}=" in handed
    ]


def head_dims(holder: Any) -> tuple[int, int] | None:
    """Of queries and values, from a module or a config."""
    value = getattr(holder, "v_head_dim", None)
    rope, rest = (getattr(holder, f"qk_{part}_head_dim", None) for part in ("rope", "nope"))
    if isinstance(value, int) and isinstance(rope, int) and isinstance(rest, int):
        return rope + rest, value
    for name in ("head_dim", "attention_head_size", "d_kv", "dim_head"):
        dim = getattr(holder, name, None)
        if isinstance(dim, int) and dim > 0:
            return dim, dim
    return None


def gpu_obstacle(dims: tuple[int, int]) -> str | None:
    """Why the GPU backend does not take these head dims of queries and values."""
    query, value = dims
    if query != value:
        return f"head dims of queries ({query}) and values ({value}) differ"
    if query % GPU_STEP or query > GPU_LARGEST:
        return f"head dim {query}: on GPUs dash_attn takes multiples of {GPU_STEP} up to {GPU_LARGEST}"
    return None


def _dims(module: nn.Module, backend: str) -> list[str]:
    dims = head_dims(module)
    if dims is None:
        return []
    if backend == "cpu" and dims[0] == dims[1]:
        return []
    obstacle = gpu_obstacle(dims)
    return [] if obstacle is None else [obstacle]
