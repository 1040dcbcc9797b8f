"""The first tensor in which two records differ, and the operation that made it. Needs numpy alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dash_attn.watching.files import Record, Row, Step, number_of

EQUAL, DIFFERS, MISSING = 0, 1, 2
State = npt.NDArray[np.int8]
Settings = dict[str, tuple[str, int]]  # by name: the value in words and in bits. That of a tensor is not in the record
SETTLED = ("update", "earlier")  # topics of what an update has computed, here or in a step that is not recorded
PASSES = ("data", "script", "forward", "recompute")  # phases whose rows are inputs and outputs of modules


@dataclass(frozen=True)
class Difference:
    """The first row that differs, and its number in the step.

    `topic` sorts the causes. `inputs` are the recorded inputs, equal in both runs as far as they were read.
    `generators` are random states that differ, with the step in which they first do. `settings` are those of optimizers
    that differ in the step of an update that does. `first_common` is the first step that both records have. If `share`
    is not 1, this step has read only this share of some tensors before the difference, and an earlier operation may be
    the one that differs.
    """

    rank: int
    step: int
    index: int
    row: Row
    form: str  # dtype and shape
    other_form: str  # in the other run; empty if that run has no such tensor
    topic: str
    operation: str
    inputs: tuple[str, ...]
    steps_equal: int
    generators: tuple[tuple[str, int], ...] = ()
    settings: tuple[str, ...] = ()
    first_common: int = 0
    share: str = "1"

    @property
    def is_sure(self) -> bool:
        """Was everything before the difference read whole?"""
        return self.share == "1"

    @property
    def to_be_sure(self) -> range:
        """The steps to record once more, with whole tensors."""
        return range(max(0, self.step - 1), self.step + 1)

    @property
    def direction(self) -> str:
        return "backward, or what follows it" if self.topic == "gradient" else DIRECTIONS[self.row.phase]

    @property
    def tensor(self) -> str:
        return described(self.row)


DIRECTIONS = {
    "start": "before the forward",
    "data": "before the forward",
    "script": "forward",
    "forward": "forward",
    "buffer": "forward",
    "recompute": "forward, computed again in the backward",
    "backward": "backward",
    "reduce": "between backward and update",
    "update": "update",
}


def first_difference(a: Sequence[Record], b: Sequence[Record]) -> Difference | None:
    """The earliest difference over all processes of a run."""
    if len(a) != len(b):
        raise ValueError(f"the runs have {len(a)} and {len(b)} processes")
    depths = {record.environment.get("depth") or "all" for record in (*a, *b)}
    if len(depths) > 1:
        several = " and ".join(sorted(map(str, depths)))
        raise ValueError(f"modules are recorded to different depths ({several}): record both runs with one depth")
    shares = {record.share for record in (*a, *b)}
    if len(shares) > 1:
        several = " and ".join(sorted(shares, reverse=True))
        raise ValueError(f"different shares of large tensors are read ({several}): record both runs with one share")
    partings = [each for pair in zip(a, b, strict=True) if (each := _first(*pair)) is not None]
    return min(partings, key=lambda each: (each.step, each.index), default=None)


def common_steps(a: Record, b: Record) -> list[int]:
    return sorted(a.steps.keys() & b.steps.keys())


def states(a: Step, b: Step, before: Step | None = None) -> State:
    """For each row of `a`: is it equal in `b`, does it differ, or is it missing? A random state counts as equal: one
    that nothing draws from may differ, and one that something draws from shows in what was drawn. So does a setting of
    an optimizer, which shows in the update. `before` is the step
    before `b`: weights that `b` does not have at its start are those after this step."""
    state = _states(a, b)
    state[[row.phase in ("random", "setting") for row in a.rows]] = EQUAL
    missing = [index for index in np.flatnonzero(state == MISSING) if a.rows[index].phase == "start"]
    if before is not None and missing:
        left = {row[1:3]: before.values[row.place] for row in before.rows if row.phase in ("buffer", "update")}
        for index in missing:
            row = a.rows[index]
            if row[1:3] in left:
                state[index] = EQUAL if left[row[1:3]] == a.values[row.place] else DIFFERS
    return state


def _states(a: Step, b: Step) -> State:
    if a.rows == b.rows and a.forms == b.forms:
        places = [row.place for row in a.rows]
        return np.asarray(a.values[places] != b.values[places], np.int8)
    others = {key: row for key, row in zip(keys(b), b.rows, strict=True)}
    state = np.full(len(a.rows), MISSING, np.int8)
    for index, (key, row) in enumerate(zip(keys(a), a.rows, strict=True)):
        if (other := others.get(key)) is not None:
            same = a.form(row) == b.form(other) and a.values[row.place] == b.values[other.place]
            state[index] = EQUAL if same else DIFFERS
    return state


def keys(step: Step) -> Iterator[tuple[str, str, str, int]]:
    """The name of each row in its step: a module that runs several times has several rows of one name."""
    times: Counter[tuple[str, str, str]] = Counter()
    for row in step.rows:
        times[row[:3]] += 1
        yield *row[:3], times[row[:3]]


def described(row: Row) -> str:
    """The tensor of a row in words."""
    return f"gradient of {row.tensor}" if row.phase == "backward" else row.tensor


def shown(module: str) -> str:
    return module or "the model"


def _first(a: Record, b: Record) -> Difference | None:
    common = common_steps(a, b)
    for count, number in enumerate(common):
        one, two = a.steps[number], b.steps[number]
        parting = _parting(one, two, (a.steps.get(number - 1), b.steps.get(number - 1)))
        if parting is None or _ends_early(a, b, number) or _ends_early(b, a, number):
            continue
        one, two, index = parting
        difference = _difference(a.rank, one, two, index, count)
        if difference.row.phase == "start" and number > 0:
            difference = _between(difference, recorded=number - 1 in a.steps and number - 1 in b.steps)
        parts = not all(step.is_whole(row) for step in (one, two) for row in step.rows[:index])
        generators = tuple(_generators(a, b, difference))
        settings = (
            tuple(_settings(settings_of(a, number), settings_of(b, number))) if difference.topic in SETTLED else ()
        )
        share = a.share if parts else "1"
        return replace(difference, generators=generators, settings=settings, first_common=common[0], share=share)
    return None


def _parting(one: Step, two: Step, before: tuple[Step | None, Step | None]) -> tuple[Step, Step, int] | None:
    """The first row of a step that the other step does not have, or has with another value: of the first rows of both
    steps, the earlier one. `before` are the steps before them."""
    firsts = list[tuple[tuple[int, bool, Sequence[str | int]], Step, Step, int]]()
    for mine, other, last in ((one, two, before[1]), (two, one, before[0])):
        state = states(mine, other, last)
        if state.any():
            index = int(np.flatnonzero(state)[0])
            place = sum(row.phase != "setting" for row in mine.rows[:index])
            # At one place, a row that is missing in the other step comes before a row that differs.
            firsts.append(((place, state[index] != MISSING, mine.rows[index][:3]), mine, other, index))
    if not firsts:
        return None
    return min(firsts, key=lambda each: each[0])[1:]


def _ends_early(a: Record, b: Record, number: int) -> bool:
    """Has run `b` ended in the middle of this step, with nothing that differs before?"""
    one, two = a.steps[number], b.steps[number]
    # A step has all weights and settings if it is the first of its record, else those that have changed.
    changed = ("start", "setting")
    mine, other = ([key for key in keys(step) if key[0] not in changed] for step in (one, two))
    started = states(one, two, b.steps.get(number - 1))[[row.phase == "start" for row in one.rows]]
    return (
        number == max(b.steps)
        and mine[: len(other)] == other
        and not started.any()
        and not states(two, one, a.steps.get(number - 1)).any()
    )


def _between(difference: Difference, recorded: bool) -> Difference:
    """A difference of weights or buffers at the start of a step. `recorded` says whether the step before is."""
    if not recorded:
        return replace(difference, topic="earlier", operation="an operation of a step before, which is not recorded")
    one_only = "" if difference.other_form else ": only one run writes to it"
    operation = f"what changes {_path(difference.row)} between two steps{one_only}"
    return replace(difference, topic="between", operation=operation)


def _generators(a: Record, b: Record, difference: Difference) -> Iterator[tuple[str, int]]:
    """Random states that differ up to the step of the difference, and that something draws from."""
    steps = [number for number in common_steps(a, b) if number <= difference.step]
    since, values = dict[str, int](), dict[str, set[int]]()
    for number in steps:
        for row, state in zip(a.steps[number].rows, _states(a.steps[number], b.steps[number]), strict=True):
            if row.phase == "random":
                values.setdefault(row.tensor, set()).add(int(a.steps[number].values[row.place]))
                if state:
                    since.setdefault(row.tensor, number)
    for name, number in since.items():
        # torch seeds its generators alike in every process. Others differ unless the script seeds them.
        drawn = len(values[name]) > 1 or (number == steps[-1] and difference.topic in ("data", "weights"))
        if drawn or name.startswith("torch"):
            yield name, number


def _settings(mine: Settings, other: Settings) -> Iterator[str]:
    """Settings of optimizers that differ, with their values."""
    for name in {**mine, **other}:
        a, b = mine.get(name, ("not set", 0)), other.get(name, ("not set", 0))
        if a != b:
            yield f"{name}: {'not equal' if a[0] == b[0] else f'{a[0]} and {b[0]}'}"


def settings_of(record: Record, number: int) -> Settings:
    """Settings of the optimizers in a step. The record has those that were not the same in its step before."""
    settings, rows = Settings(), dict[int, list[Row]]()  # rows by layout, which many steps share
    for each in sorted(record.steps):
        if each <= number:
            step = record.steps[each]
            if id(step.rows) not in rows:
                rows[id(step.rows)] = [row for row in step.rows if row.phase == "setting"]
            for row in rows[id(step.rows)]:
                bits = int(step.values[row.place])
                text = "a tensor" if step.form(row) else repr(number_of(bits)).removesuffix(".0")
                settings[row.tensor] = text, bits
    return settings


def _difference(rank: int, one: Step, two: Step, index: int, steps_equal: int) -> Difference:
    row = one.rows[index]
    key = list(keys(one))[index]
    other = next((other for name, other in zip(keys(two), two.rows, strict=True) if name == key), None)
    if other is None:
        topic, operation = "structure", "the runs do not call the same modules: only one of them has this tensor"
        return Difference(rank, one.number, index, row, one.form(row), "", topic, operation, (), steps_equal)
    topic, operation = _operation(one, index)
    inputs = tuple(dict.fromkeys(_inputs(one, index)))
    forms = one.form(row), two.form(other)
    return Difference(rank, one.number, index, row, *forms, topic, operation, inputs, steps_equal)


def _operation(step: Step, index: int) -> tuple[str, str]:
    """The topic and the operation that computes row `index`."""
    row = step.rows[index]
    if row.phase == "start":
        return "weights", "none: the weights differ before the first step"
    if row.phase == "data":
        return "data", "none: the data differ"
    if row.phase == "script":
        return "forward", f"the script, between modules{_after(step, index)}"
    if row.phase == "buffer":
        return "forward", f"the forward of {shown(row.module)}, which writes to {row.tensor}"
    if row.phase == "reduce" and _had_backward(step, index):
        return "reduce", f"what changes the {_path(row)} between backward and update"
    if row.phase == "reduce":
        return "gradient", f"the backward of {shown(row.module)}, or what changes the {_path(row)} after it"
    if row.phase == "update":
        return "update", f"the optimizer's update of {_path(row)}"
    if row.phase == "backward":
        return "backward", _backward(step, index)
    verb = "the forward" if row.phase == "forward" else "the recomputation"
    if row.tensor.startswith("output") and not _has_parts(step, row.module):
        return row.phase, f"{verb} of {shown(row.module)}"
    inside = row.module if row.tensor.startswith("output") else _parent(row.module)
    return row.phase, f"{verb} of {shown(inside)}, in its own code{_after(step, index)}"


def _had_backward(step: Step, index: int) -> bool:
    """Is the gradient of row `index`, as the optimizer gets it, also recorded as the backward gave it?"""
    _, module, tensor, *_ = step.rows[index]
    return any(row[:3] == ("backward", module, tensor.rpartition(" of ")[2]) for row in step.rows[:index])


def _backward(step: Step, index: int) -> str:
    row = step.rows[index]
    if not row.tensor.startswith(("input", "output")):
        return f"the backward of {' or '.join(map(shown, _owners(step, row)))}"
    readers, outermost = _readers(step, row)
    if readers:
        return f"the backward of {' or '.join(readers)}"
    if outermost:
        return "the loss, or what else the script computes from the output of the model"
    inside = _parent(row.module)
    return f"the backward of {shown(inside)}, in its own code that reads {_path(row)}{_after(step, index)}"


def _owners(step: Step, row: Row) -> list[str]:
    """The modules of a parameter, by its gradient: several if weights are tied."""
    same = [other.module for other in step.rows if other.phase == "backward" and other.place == row.place]
    return list(dict.fromkeys(same))


def _readers(step: Step, row: Row) -> tuple[list[str], bool]:
    """The modules without parts that read the tensor of a gradient, and whether it is an output of the whole model."""
    passed = [other for other in step.rows if other.phase in PASSES]
    places = {other.place for other in passed if (other.module, other.tensor) == (row.module, row.tensor)}
    same = [other for other in passed if other.place in places]
    readers = [o.module for o in same if o.tensor.startswith("input") and not _has_parts(step, o.module)]
    given = ("data", "script")
    outer = {other.module for other in step.rows if other.phase in given and other.tensor.startswith("input")}
    whole = any(other.tensor.startswith("output") and other.module in outer for other in same)
    return list(dict.fromkeys(readers)), whole


def _inputs(step: Step, index: int) -> Iterator[str]:
    """Names of recorded tensors that the operation of row `index` reads. All of them stand before it, and are equal."""
    row, before = step.rows[index], step.rows[:index]
    own = row.tensor.rpartition(" of ")[2]
    phases: tuple[str, ...] = ("backward",)
    if row.phase in ("forward", "recompute"):
        modules, phases, start = [row.module] if row.tensor.startswith("output") else [], PASSES, "input"
    elif row.phase == "buffer":
        modules, phases, start = [row.module], PASSES, "input"
    elif row.phase == "script":
        modules, phases, start = [], PASSES, "output"
    elif row.phase == "backward":
        parameter = not row.tensor.startswith(("input", "output"))
        modules, start = _owners(step, row) if parameter else _readers(step, row)[0], "output"
    elif row.phase == "reduce":
        modules, start = [row.module], own if _had_backward(step, index) else "output"
    elif row.phase == "update":
        modules, phases, start = [row.module], ("reduce",), f"gradient of {own}"
    else:
        return
    inputs = [o for o in before if o.phase in phases and o.module in modules and o.tensor.startswith(start)]
    for other in inputs or [o for o in before if o.phase in phases][-1:]:
        yield f"{described(other)} of {shown(other.module)}"


def _after(step: Step, index: int) -> str:
    """What of the same phase is recorded just before."""
    phases = ("backward",) if step.rows[index].phase == "backward" else PASSES
    before = next((row for row in reversed(step.rows[:index]) if row.phase in phases), None)
    return "" if before is None else f", after the {described(before)} of {shown(before.module)}"


def _path(row: Row) -> str:
    return f"{row.tensor} of {shown(row.module)}"


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _has_parts(step: Step, module: str) -> bool:
    return any(row.module.startswith(f"{module}." if module else "") and row.module != module for row in step.rows)
