"""What is recorded, when, and under which names."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.watching.difference import first_difference
from dash_attn.watching.environment import environment, random_states
from dash_attn.watching.files import Record, Step, load_run
from dash_attn.watching.fingerprint import fingerprint
from dash_attn.watching.slots import SIZE
from tests.watching.small import GPT, batch, difference, loss_of, same, trained


def names(step: Step, phase: str) -> list[str]:
    return [f"{row.module}:{row.tensor}" for row in step.rows if row.phase == phase]


def value(step: Step, phase: str, name: str) -> int:
    (place,) = {row.place for row in step.rows if row.phase == phase and f"{row.module}:{row.tensor}" == name}
    return int(step.values[place])


def test_fingerprints_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    x, first = torch.randn(5, 4), [parameter.detach().clone() for parameter in model.parameters()]
    watcher = dash_attn.watch(model, optimizer=optimizer, to=tmp_path)
    out = model(x)
    out.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    watcher.close()
    step = load_run(tmp_path)[0].steps[0]
    assert value(step, "data", ":input") == value(step, "forward", "0:input") == fingerprint(x)
    assert value(step, "forward", ":output") == value(step, "forward", "2:output") == fingerprint(out)
    assert value(step, "backward", "2:output") == fingerprint(torch.ones(5, 2))
    assert value(step, "start", "0:weight") == fingerprint(first[0])
    assert value(step, "backward", "0:weight") == fingerprint(gradients[0])
    assert value(step, "reduce", "2:gradient of bias") == fingerprint(gradients[3])
    assert value(step, "update", "2:weight") == fingerprint(model[2].weight) != fingerprint(first[2])
    state = optimizer.state[model[0].weight]
    assert value(step, "update", "0:exp_avg of weight") == fingerprint(state["exp_avg"])
    assert value(step, "update", ":step of all parameters") == fingerprint(state["step"].expand(4))
    assert names(step, "forward") == [
        *("0:input", "0:output", "1:input", "1:output", "2:input", "2:output", ":output"),
    ]
    assert set(names(step, "backward")) >= {"0:output", "1:output", "2:output", "0:weight", "2:bias"}
    forms = {step.form(row) for row in step.rows if row.tensor == "output"}
    assert forms == {"float32 [5, 3]", "float32 [5, 2]"}


def test_a_tensor_is_read_once_unless_it_is_written(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    model = nn.Sequential(nn.Linear(3, 3), InPlace(), nn.Identity())
    with dash_attn.watch(model, to=tmp_path):
        model(torch.randn(2, 3)).sum().backward()
    step = load_run(tmp_path)[0].steps[0]
    places = {f"{row.module}:{row.tensor}": row.place for row in step.rows if row.phase == "forward"}
    assert places["0:output"] == places["1:input"] != places["1:output"]
    assert places["1:output"] == places["2:input"] == places["2:output"] == places[":output"]


def test_memory_that_is_used_again_is_read_again(tmp_path: Path) -> None:
    """A new tensor in the memory of an old one is not taken for it."""
    model = nn.Linear(64, 64)
    with dash_attn.watch(model, to=tmp_path), torch.enable_grad():
        for factor in range(20):
            model(torch.full((64, 64), float(factor)))
    step = load_run(tmp_path)[0].steps[0]
    places = [row.place for row in step.rows if row.phase == "data"]
    assert len({int(step.values[place]) for place in places}) == 20


def test_more_tensors_than_a_buffer_holds(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dash_attn.watch(model, to=tmp_path) as watcher:
        values = [torch.tensor([i]) for i in range(2 * SIZE + 7)]
        watcher.see("each", values)
    step = load_run(tmp_path)[0].steps[0]
    assert [int(step.values[row.place]) for row in step.rows] == [fingerprint(x) for x in values]


def test_evaluation_is_left_out(tmp_path: Path) -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for _ in range(2):
            with torch.no_grad():
                model.eval()(batch()[:, :-1])
            loss_of(model.train(), batch()).backward()
            optimizer.step()
    steps = load_run(tmp_path)[0].steps
    assert all(names(steps[number], "data") == [":input"] for number in (0, 1))


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    def run(name: str, third: int) -> Record:
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=tmp_path / name):
            for number in range(4):
                tokens = batch()
                loss_of(model, tokens.flip(0) if number == third else tokens).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return load_run(tmp_path / name)[0]

    a, b = run("a", -1), run("b", 3)
    assert sorted(a.steps) == [0, 1] and len(names(a.steps[0], "data")) == 2
    parting, _ = difference(a, b)
    assert (parting.step, parting.topic) == (1, "data")
    assert same(a, run("c", -1))


def test_without_an_optimizer_a_backward_makes_a_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dash_attn.watch(model, to=tmp_path):
        for _ in range(3):
            model(torch.randn(2, 2)).sum().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
    steps = load_run(tmp_path)[0].steps
    assert sorted(steps) == [0, 1, 2]
    assert len({value(step, "start", ":weight") for step in steps.values()}) == 3


def test_some_steps_only(tmp_path: Path) -> None:
    all_steps = trained(tmp_path / "all", 6)
    some = trained(tmp_path / "some", 6, steps=range(0, 6, 3))
    assert sorted(some.steps) == [0, 3]
    assert value(some.steps[3], "start", "norm:weight") == value(all_steps.steps[2], "update", "norm:weight")
    assert value(some.steps[3], "forward", "head:output") == value(all_steps.steps[3], "forward", "head:output")


def test_modules_of_some_depth_only(tmp_path: Path) -> None:
    whole, coarse = trained(tmp_path / "a", 1), trained(tmp_path / "b", 1, depth=2)
    modules = {row.module for row in coarse.steps[0].rows if row.phase == "forward"}
    assert modules == {"", "token", "blocks.0", "blocks.1", "norm", "head"}
    assert names(coarse.steps[0], "update") == names(whole.steps[0], "update")
    assert "blocks.0.attn.qkv:weight" in names(coarse.steps[0], "backward")
    assert value(coarse.steps[0], "forward", "blocks.1:output") == value(whole.steps[0], "forward", "blocks.1:output")
    with pytest.raises(ValueError, match=r"different depths \(2 and all\)"):
        first_difference([whole], [coarse])


def test_another_length_has_the_same_layout(tmp_path: Path) -> None:
    record = trained(tmp_path, each=lambda step, tokens: tokens[:, : 9 + step])
    first, second = record.steps[1], record.steps[2]
    assert first.rows is second.rows and first.forms != second.forms


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, *values: Any, **named: Any) -> Tensor:
            return torch.ones(2, requires_grad=True) * 2

    model = Takes()
    odd = [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.nested.nested_tensor([torch.ones(2)])]
    with dash_attn.watch(model, to=tmp_path):
        model(*odd, None, 3, "text", {"a": [torch.ones(2), (torch.ones(1),)]}, flag=True, mask=torch.ones(3) > 0)
    step = load_run(tmp_path)[0].steps[0]
    assert names(step, "data") == [":input[6].a[0]", ":input[6].a[1]", ":input.mask"]


def test_two_optimizers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    both = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
    with dash_attn.watch(model, optimizer=both, to=tmp_path):
        for _ in range(2):
            model(torch.randn(3, 2)).sum().backward()
            for optimizer in both:
                optimizer.step()
    steps = load_run(tmp_path)[0].steps
    assert sorted(steps) == [0, 1]
    assert {"0:momentum_buffer of weight", "1:momentum_buffer of weight"} <= set(names(steps[1], "update"))


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no parameter of the model"):
        dash_attn.watch(model, optimizer=other, to=tmp_path)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_the_rank_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    model = nn.Linear(2, 2)
    with dash_attn.watch(model, to=tmp_path):
        model(torch.ones(1, 2)).sum().backward()
        monkeypatch.delenv("RANK")
    assert load_run(tmp_path)[0].rank == 3 and (tmp_path / "rank3.watch").is_file()


def test_files_of_other_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier run with more processes. A process does not know how many there are without WORLD_SIZE."""

    def run(rank: str, world: str | None) -> list[str]:
        for name, given in (("RANK", rank), ("WORLD_SIZE", world)):
            monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
        model = nn.Linear(2, 2)
        with dash_attn.watch(model, to=tmp_path):
            model(torch.ones(1, 2)).sum().backward()
        return sorted(path.name for path in tmp_path.iterdir())

    (tmp_path / "rankless.watch").write_bytes(b"of the user")
    for rank in range(4):
        run(str(rank), "4")
    assert run("1", "2") == ["rank0.watch", "rank1.watch", "rank2.watch", "rank3.watch", "rankless.watch"]
    assert run("0", None) == ["rank0.watch", "rank1.watch", "rank2.watch", "rank3.watch", "rankless.watch"]
    assert run("0", "2") == ["rank0.watch", "rank1.watch", "rankless.watch"]
    assert run("", None) == ["rank0.watch", "rankless.watch"]


def test_two_watchers_with_one_folder(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with dash_attn.watch(first, to=tmp_path):
        with pytest.raises(ValueError, match="another watcher writes to"):
            dash_attn.watch(second, to=tmp_path)
        assert not second._forward_hooks
        first(torch.ones(1, 2)).sum().backward()
    assert sorted(load_run(tmp_path)[0].steps) == [0]


@pytest.mark.parametrize("depth", [0, -1, 2.5])
def test_a_depth_that_is_none(tmp_path: Path, depth: Any) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}: give 1 or more, or None for all modules"):
        dash_attn.watch(nn.Linear(2, 2), to=tmp_path / "none", depth=depth)
    assert not (tmp_path / "none").exists()


def test_arguments_of_wrong_types(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (None, torch.relu, "model"):
        with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got"):
            dash_attn.watch(wrong, to=tmp_path / "none")
    wrong = 5
    with pytest.raises(ValueError, match="steps=5: give a range"):
        dash_attn.watch(nn.Linear(2, 2), to=tmp_path / "none", steps=wrong)
    assert not (tmp_path / "none").exists()


def test_outputs_that_are_dataclasses(tmp_path: Path) -> None:
    @dataclass
    class Pair:
        first: Tensor
        rest: dict[str, Any]
        itself: Any = None

    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Pair:
            out = Pair(super().forward(x), {"a": x * 2})
            out.itself = out
            return out

    class Reads(nn.Module):
        def forward(self, pair: Pair) -> Tensor:
            return pair.first + pair.rest["a"]

    model = nn.Sequential(Gives(2, 2), Reads())
    with dash_attn.watch(model, to=tmp_path):
        model(torch.ones(1, 2)).sum().backward()
    step = load_run(tmp_path)[0].steps[0]
    both = ["first", "rest.a"]
    assert names(step, "forward")[1:5] == [
        *(f"0:output.{each}" for each in both),
        *(f"1:input.{each}" for each in both),
    ]
    assert "0:output.first" in names(step, "backward")


def test_training_is_not_changed_and_hooks_go(tmp_path: Path) -> None:
    def run(to: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watcher = None if to is None else dash_attn.watch(model, optimizer=optimizer, to=to)
        for _ in range(3):
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if watcher is not None:
            watcher.close()
            watcher.close()
            loss_of(model, batch()).backward()  # no hook is left: nothing is written to the closed file
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(tmp_path), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    """What is computed again has rows of its own. All other rows are those of a run without checkpointing."""

    def change(model: GPT) -> nn.Module:
        model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
        return model

    plain, again, once_more = (
        trained(tmp_path / name, **how)
        for name, how in (("a", {}), ("b", {"change": change}), ("c", {"change": change}))
    )
    assert same(again, once_more)
    for number in range(3):
        kept = {
            (row.phase, row.module, row.tensor): int(again.steps[number].values[row.place])
            for row in again.steps[number].rows
        }
        assert set(names(again.steps[number], "recompute")) >= {"blocks.1.attn.qkv:output", "blocks.0.norm1:input"}
        for row in plain.steps[number].rows:
            if reentrant and row.module == "blocks.0" and row.phase == "backward":
                continue  # the gradient of its output belongs to the checkpoint
            key = row.phase, row.module, row.tensor
            if key in kept or row.phase != "backward":
                assert kept[key] == int(plain.steps[number].values[row.place]), row
    missing = set(names(plain.steps[0], "backward")) - set(names(again.steps[0], "backward"))
    assert len(missing) <= 2, missing


def test_a_recomputation_that_differs(tmp_path: Path) -> None:
    """Dropout that draws again: the forward is equal, and the recomputation is named."""

    def change(extra: int) -> Any:
        def changed(model: GPT) -> nn.Module:
            def run_block(block: nn.Module, x: Tensor) -> Tensor:
                return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

            model.run_block = run_block
            model.head.register_full_backward_pre_hook(lambda *_: torch.manual_seed(extra) and None)
            return model

        return changed

    parting, reasons = difference(*(trained(tmp_path / str(seed), change=change(seed)) for seed in (1, 2)))
    assert (parting.step, parting.topic, parting.row.module) == (0, "recompute", "blocks.1.mlp.2")
    assert parting.operation == "the recomputation of blocks.1.mlp.2"
    assert "gradient checkpointing" in [cause.name for cause in reasons]


def test_compiled(tmp_path: Path) -> None:
    """A compiled model has the rows of an eager one: graphs end at every hook."""
    eager = trained(tmp_path / "a", 2)
    compiled, again = (
        trained(tmp_path / name, 2, change=lambda model: torch.compile(model, backend="aot_eager")) for name in "bc"
    )
    assert same(compiled, again)
    keys = [{row[:3] for row in record.steps[1].rows} for record in (eager, compiled)]
    assert keys[0] == keys[1]
    assert compiled.environment["compiled"] and not eager.environment["compiled"]


def test_compiled_before_it_is_watched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 3)
    for _ in range(2):
        compiled(x).sum().backward()
    with dash_attn.watch(compiled, to=tmp_path):
        compiled(x).sum().backward()
    assert torch.equal(compiled(x), model(x))
    step = load_run(tmp_path)[0].steps[0]
    assert names(step, "forward") == ["0:input", "0:output", "1:input", "1:output", ":output"]


def test_random_states() -> None:
    def states() -> dict[str, int]:
        return dict(random_states(torch.device("cpu")))

    def seeded() -> dict[str, int]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        return states()

    first = seeded()
    assert first == seeded() and len(first) == 3
    for draw in (lambda: torch.rand(1), random.random, np.random.rand, lambda: random.gauss(0, 1)):
        before = seeded()
        draw()
        assert sum(before[name] != states()[name] for name in before) == 1


def test_environment_is_json_and_holds_only_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PASSWORD", "secret")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    facts = environment()
    assert facts["variables"]["NCCL_ALGO"] == "Ring" and "secret" not in str(facts)
    assert facts["torch"] == torch.__version__ and facts["world size"] == 1


def test_a_backward_that_fails_is_forgotten(tmp_path: Path) -> None:
    """The gradients of the backward after it are recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = [True, False]

    def hook(gradient: Tensor) -> None:
        if fails.pop(0):
            raise RuntimeError("in the middle")

    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for _ in range(2):
            x = torch.randn(2, 4)
            middle = model[0](x)
            middle.register_hook(hook)
            loss = model[1](middle).sum()
            with suppress(RuntimeError):
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    (step,) = load_run(tmp_path)[0].steps.values()
    assert {"0:weight", "1:weight"} <= set(names(step, "backward"))
