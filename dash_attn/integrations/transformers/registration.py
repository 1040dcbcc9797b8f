"""The name "dash" among Transformers' attention implementations."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from dash_attn.integrations.transformers.forward import attention_forward
from dash_attn.integrations.transformers.masks import COMPUTED_BY_THE_MODEL, model_mask

OLDEST = 5
NEEDED = "Transformers 5 or later is needed: pip install 'dash-attn[hf]'"
NAMES: set[str] = set()


def register(name: str = "dash") -> None:
    """Make `attn_implementation=name` mean dash_attn, for models built or loaded from now on. Again does no harm."""
    attentions, masks, model = _interfaces()
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which Transformers takes for its own kernels; got {name!r}")
    # Without the mask function Transformers would leave out the padding mask, and say nothing.
    pairs = ((attentions, attention_forward), (masks, model_mask))
    for interface, ours in pairs:
        if interface.get(name, ours) is not ours:
            raise ValueError(f"{name!r} is already the name of another attention; choose one of your own")
    for interface, ours in pairs:
        interface.register(name, ours)
    NAMES.add(name)
    checked = model.get_correct_attn_implementation
    if not hasattr(checked, "without_dash"):
        model.get_correct_attn_implementation = _with_dash(checked)


def _interfaces() -> tuple[Any, Any, Any]:
    """Transformers' tables of attention functions and of mask functions, and the base class of its models."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(NEEDED) from error
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ImportError(f"{NEEDED}; {transformers.__version__} is installed")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except Exception as error:  # Transformers loads half of the environment here, and any of it may be broken
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ImportError(
            f"Transformers {transformers.__version__} is installed and does not load: {type(reason).__name__}: {reason}"
        ) from error
    return AttentionInterface(), AttentionMaskInterface(), PreTrainedModel


def _with_dash(checked: Callable[..., str]) -> Callable[..., str]:
    """Transformers asks this method of every model that is built. It checks its own names and lets others pass."""

    @functools.wraps(checked)
    def check(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in NAMES:
            _prepare(type(self), requested_attention)
        return checked(self, requested_attention, *args, **kwargs)

    check.without_dash = checked  # type: ignore[attr-defined]
    return check


def _prepare(model: Any, name: str) -> None:
    for table, classes in class_tables(model).items():
        own = sorted(each for each, made in classes.items() if not hasattr(made, "refuses"))
        if name not in own:
            classes[name] = _refusing(model.__name__, table, own)  # anew for each model, because it names the model
    if not model._can_set_attn_implementation():
        COMPUTED_BY_THE_MODEL.add(model.config_class)
        warnings.warn(
            f"{model.__name__} computes attention itself, so attn_implementation={name!r} does not change it; "
            "dash_attn.integrations.transformers.check(model) tells which layers run dash_attn",
            stacklevel=2,
        )


def class_tables(model: Any) -> dict[str, dict[str, Any]]:
    """Tables by which a model chooses a class of its own for the name of an attention."""
    return {
        name: table
        for name, table in vars(sys.modules[model.__module__]).items()
        if isinstance(table, dict)
        and "eager" in table
        and any(isinstance(x, type) and issubclass(x, nn.Module) for x in table.values())
    }


def _refusing(model: str, table: str, names: list[str]) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{model} has classes of its own for the attention ({table}: {', '.join(names)}) and none that dash_attn "
            "can run in: use attn_implementation='eager' for it"
        )

    refuse.refuses = model  # type: ignore[attr-defined]
    return refuse
