"""One family: built with eager and with dash, and compared."""

from __future__ import annotations

import copy
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dash_attn.integrations.transformers import attention_forward, register
from dash_attn.integrations.transformers.sweep import inputs
from dash_attn.integrations.transformers.sweep.families import architectures, causal_names
from dash_attn.integrations.transformers.sweep.small import small_config

LARGEST = 200_000_000  # parameters
SECONDS = 40
NO_MODEL = "no model class"  # a config that is only a part of others
NO_FORWARD = "no forward: only its parts, or other methods, are called"
TOLERANCE = 2e-3  # of the largest number in a tensor


@dataclass
class Outcome:
    """What came out for one family.

    verdict   right, own (right, by the model's own attention), refused, wrong, crash, or not built
    cases     for each way of calling it: right, own, or why not
    """

    family: str
    verdict: str = "not built"
    architecture: str = ""
    reason: str = ""
    cases: dict[str, str] = field(default_factory=dict)


class TooLong(Exception):
    pass


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooLong(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine(family: str) -> Outcome:
    register()
    outcome = Outcome(family)
    try:
        with limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _examine(outcome)
    except TooLong as error:
        outcome.verdict, outcome.reason = "not built", str(error)
    return outcome


def _examine(outcome: Outcome) -> None:
    reasons = []
    try:
        classes = architectures(outcome.family)
    except ImportError as error:
        outcome.reason = _short(error)
        return
    if classes and classes[0].forward is torch.nn.Module.forward:
        outcome.reason = NO_FORWARD
        return
    for cls in list(dict.fromkeys(classes))[:4]:
        for narrow in (True, False):
            try:
                config, eager, given = _eager(outcome.family, cls, narrow)
            except TooLong:
                raise
            except Exception as error:
                reasons.append(f"{cls.__name__}: {_short(error)}")
                continue
            outcome.architecture = cls.__name__
            _compare(outcome, eager, config, given, "")
            if getattr(config, "is_decoder", True) is False and cls.__name__ in causal_names():
                _, eager, given = _eager(outcome.family, cls, narrow, is_decoder=True)
                _compare(outcome, eager, eager.config, given, "as decoder, ")
            _conclude(outcome)
            return
    outcome.reason = reasons[0] if reasons else NO_MODEL


def _eager(family: str, cls: Any, narrow: bool, **changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """The reference, and inputs that it takes."""
    try:
        return _reference(family, cls, narrow, "eager", changes)
    except KeyError as error:
        if error.args != ("eager",):
            raise
    return _reference(family, cls, narrow, "sdpa", changes)  # a model without an eager attention


def _reference(
    family: str, cls: Any, narrow: bool, attention: str, changes: dict[str, Any]
) -> tuple[Any, Any, dict[str, Tensor]]:
    config = small_config(family, narrow)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        size = sum(
            x.numel() for x in cls._from_config(copy.deepcopy(config), attn_implementation=attention).parameters()
        )
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters when small")
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=attention).float()
    first: Exception | None = None
    for given in inputs.candidates(model):
        try:
            with torch.no_grad():
                if not tensors(model.eval()(**given)):
                    raise ValueError("forward gives no tensor")
        except TooLong:
            raise
        except Exception as error:
            first = first or error
            continue
        _enliven(model, given)
        return config, model, given
    raise first or ValueError("no inputs known for forward's arguments")


def _enliven(model: Any, given: dict[str, Tensor]) -> None:
    """Weights at which scores are of size one, so that a wrong mask or scale shows."""
    before = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.ndim > 1:
                x.copy_(noise * (max(1, x.numel()) / max(1, len(x))) ** -0.5)
            else:
                x.add_(noise * 0.1)
        if not all(bool(x.isfinite().all()) for x in tensors(model(**given)).values()):
            model.load_state_dict(before)


def tensors(output: Any) -> dict[str, Tensor]:
    """Float tensors of an output by their names, without caches and attention weights."""
    if isinstance(output, Tensor):
        return {"": output} if output.is_floating_point() else {}
    if hasattr(output, "items"):
        pairs = [(k, v) for k, v in output.items() if "attentions" not in k and "past_key_values" not in k]
    elif isinstance(output, list | tuple):
        pairs = [(str(i), v) for i, v in enumerate(output)]
    else:
        return {}
    return {f"{k}.{name}": x for k, value in pairs for name, x in tensors(value).items()}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often our attention runs."""
    forward: Any = sys.modules[attention_forward.__module__]
    calls, original = [0], forward.attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    forward.attention = spy
    try:
        yield calls
    finally:
        forward.attention = original


def _compare(outcome: Outcome, eager: Any, config: Any, given: dict[str, Tensor], prefix: str) -> None:
    try:
        dash = type(eager)._from_config(copy.deepcopy(config), attn_implementation="dash").float()
    except TooLong:
        raise
    except Exception as error:
        outcome.cases[f"{prefix}build"] = _judge(error)
        return
    for name, arguments, training in _cases(eager, given):
        outcome.cases[prefix + name] = _case(eager, dash, name, arguments, training)


def _conclude(outcome: Outcome) -> None:
    """The worst case is the verdict; a model that runs dash_attn in one case is not one with its own attention."""
    found = list(outcome.cases.values())
    for verdict in ("wrong", "crash", "refused", "right", "own"):
        first = next((x for x in found if x.startswith(verdict)), None)
        if first is not None:
            outcome.verdict, outcome.reason = verdict, first.partition(": ")[2]
            return
    outcome.reason = found[0].partition(": ")[2]


def _cases(model: Any, given: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    yield "training", given, True
    yield "eval", given, False
    names = inputs.arguments(model)
    if "input_ids" not in given or given["input_ids"].shape[1] <= inputs.FIRST_DOCUMENT:
        return
    batch, length = given["input_ids"].shape
    if "attention_mask" in names:
        for side in ("left", "right"):
            mask = torch.ones(batch, length, dtype=torch.long)
            mask[0, slice(0, 5) if side == "left" else slice(length - 5, length)] = 0
            yield f"{side}-padded", {**given, "attention_mask": mask}, True
        mask = torch.ones(1, length, dtype=torch.long)
        mask[0, :5] = 0
        alone = {name: x[:1] if isinstance(x, Tensor) else x for name, x in given.items()}
        yield "left-padded, batch 1", {**alone, "attention_mask": mask}, True
    if "position_ids" in names:
        cut = inputs.FIRST_DOCUMENT
        where = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None].expand(batch, -1)
        # With a cache Transformers does not look for documents.
        extra = {"use_cache": False} if "use_cache" in names or inputs.has_cache(model) else {}
        yield "packed", {**given, "position_ids": where, **extra}, True
    yield "leak", given, False


def _case(eager: Any, dash: Any, name: str, given: dict[str, Any], training: bool) -> str:
    # Averages of normalizations move with every call, and a case that eager cannot run moves them on one side only.
    dash.load_state_dict(eager.state_dict())
    try:
        expected = _run(eager, given, training)
    except TooLong:
        raise
    except Exception as error:
        return f"not tried: {_short(error)}"
    try:
        with counted() as calls:
            answer = _leak(eager, dash, given) if name.endswith("leak") else None
            computed = _run(dash, given, training)
    except TooLong:
        raise
    except Exception as error:
        return _judge(error)
    if answer:
        return f"wrong: {answer}"
    difference = _difference(computed, expected)
    if difference and name == "packed":
        difference = _difference_alone(eager, computed[0], given)
    if difference and not _same_as_sdpa(eager, given, training, computed):
        if _jumps(eager, given, training, expected):
            return "not tried: rounding alone changes the result of eager attention"
        return f"wrong: {difference}"
    return "right" if calls[0] else "own"


def _difference_alone(eager: Any, computed: dict[str, Tensor], given: dict[str, Any]) -> str | None:
    """Against each document by itself: there are models whose eager attention lets packed documents see each other."""
    by_token = {k for k, x in given.items() if isinstance(x, Tensor) and x.shape == given["input_ids"].shape}
    ends = [0, inputs.FIRST_DOCUMENT, given["input_ids"].shape[1]]
    parts = []
    for begin, end in pairwise(ends):
        cut = {k: x[:, begin:end] if k in by_token else x for k, x in given.items()}
        parts.append(_run(eager, cut, True)[0])
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    same_shape = {name: x for name, x in computed.items() if x.shape == joined[name].shape}
    return _difference((same_shape, {}), ({name: joined[name] for name in same_shape}, {}))


def _jumps(eager: Any, given: dict[str, Any], training: bool, expected: Any) -> bool:
    """Whether weights that differ in their last digits give another result: the model chooses the largest of scores."""
    nearby = copy.deepcopy(eager)
    with torch.no_grad():
        for x in nearby.parameters():
            x.mul_(1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(11)))
    return _difference(_run(nearby, given, training), expected) is not None


def _same_as_sdpa(eager: Any, given: dict[str, Any], training: bool, computed: Any) -> bool:
    """A part of a model called without a mask sees all with eager, and only the past with sdpa."""
    try:
        sdpa = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation="sdpa").float()
        sdpa.load_state_dict(eager.state_dict())
        return _difference(computed, _run(sdpa, given, training)) is None
    except TooLong:
        raise
    except Exception:
        return False


def _run(model: Any, given: dict[str, Any], training: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of real tokens, and gradients of all weights by a loss of them."""
    model.train(training)
    model.zero_grad()
    seed()
    outputs = tensors(model(**given))
    mask = given.get("attention_mask")
    if mask is not None:
        real = mask.bool()
        outputs = {name: x[real] for name, x in outputs.items() if x.shape[:2] == real.shape}
    loss = sum(
        (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(9))).sum()
        for x in outputs.values()
        if x.requires_grad
    )
    grads = {}
    if isinstance(loss, Tensor):
        torch.autograd.backward(loss)
        grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.detach() for name, x in outputs.items()}, grads


def seed() -> None:
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)


def _leak(eager: Any, dash: Any, given: dict[str, Any]) -> str | None:
    """Whether another last token changes what comes before it, where it does not with eager."""
    changed = given["input_ids"].clone()
    # A token from nearby, because the smallest and the largest ids can stand for images.
    changed[:, -1] = torch.where(changed[:, -1] == changed[:, -2], changed[:, -3], changed[:, -2])
    moved = []
    with torch.no_grad():
        for model in (eager.eval(), dash.eval()):
            outputs = []
            for ids in (given["input_ids"], changed):
                seed()
                outputs.append(tensors(model(**{**given, "input_ids": ids})))
            before = [
                float((x - outputs[1][name])[:, : ids.shape[1] - 1].abs().max())
                for name, x in outputs[0].items()
                if x.ndim == 3 and x.shape[1] == ids.shape[1] and "encoder" not in name
            ]
            moved.append(max(before, default=0.0))
    return f"sees the future: earlier outputs move by {moved[1]:.1e}" if moved[0] == 0 and moved[1] > 1e-6 else None


def _difference(ours: tuple[dict[str, Tensor], ...], theirs: tuple[dict[str, Tensor], ...]) -> str | None:
    for kind, a, b in zip(("output", "gradient"), ours, theirs, strict=True):
        if a.keys() != b.keys():
            return f"{kind}s of {sorted(a.keys() ^ b.keys())[:3]} on one side only"
        scale = max((float(x.abs().max()) for x in b.values() if x.numel()), default=0.0) if kind == "gradient" else 0
        for name, x in b.items():
            if a[name].shape != x.shape:
                return f"{kind} {name} has shape {tuple(a[name].shape)}, not {tuple(x.shape)}"
            if not x.numel():
                continue
            largest = max(float(x.abs().max()), scale * 1e-2, 1e-5)
            error = float((a[name] - x).abs().nan_to_num(torch.inf).max()) if x.isfinite().all() else 0.0
            if error > TOLERANCE * largest:
                return f"{kind} {name} is off by {error / largest:.1e} of {largest:.1e}"
    return None


def _judge(error: Exception) -> str:
    """Refused if the error is one of ours and says so; else a crash."""
    frames = traceback.extract_tb(error.__traceback__)
    raised = Path(frames[-1].filename) if frames else Path()
    ours = "dash_attn" in raised.parts and raised.parent != Path(__file__).parent
    clear = isinstance(error, NotImplementedError | ValueError) and (ours or "attn_implementation" in str(error))
    return f"{'refused' if clear else 'crash'}: {_short(error)}"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if isinstance(error, NotImplementedError) and text else f"{type(error).__name__}: {text}"
    return text if len(text) < 300 else text[:297] + "..."
