"""dash-attn doctor: what it says of a machine, and that it fails when bits do not repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_attn.tools.cli import doctor, reasons
from dash_attn.tools.cli.main import main
from dash_attn.tools.cli.reasons import Finding


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    return stop.value.code, capsys.readouterr().out


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the self-test."""
    monkeypatch.setattr(doctor, "CALLS", {"causal": doctor.CALLS["causal"]})


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)


@pytest.mark.parametrize(("major", "status"), [(12, "info"), (13, "ok")])
def test_the_assembler_is_named(major: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "assembler", lambda: (major, 1))
    said = doctor.compiler()
    assert said.status == status and said.found == f"CUDA {major}.1" and ("cu13" in said.advice) is (status == "info")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "--seconds", "0.1", "--json")
    said = json.loads(out)
    assert status == 0 and said["ok"] is True
    assert list(said) == ["ok", "environment", "what runs", "self-test", "why a run may still differ"]
    rows = {row["name"]: row for topic in list(said)[1:] for row in said[topic]}
    assert rows["torch"]["found"].startswith(torch.__version__)
    assert rows["backend"]["found"] in ("cpu", "sm90") and len(rows["identity"]["found"]) == 16
    assert [row["status"] for row in said["self-test"][:-1]] == ["ok"] * len(doctor.CALLS)
    assert {row["status"] for row in rows.values()} <= {"ok", "info", "warn"}
    assert all(row["advice"] for row in rows.values() if row["status"] == "warn")


@pytest.mark.usefixtures("short")
def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package", lambda name, *_: Finding(name, "info", "not installed", "dash-attn[cuda]"))
    threads = torch.get_num_threads()
    status, out = run(capsys, "--seconds", "0.1")
    assert status == 0 and torch.get_num_threads() == threads
    assert all(word in out for word in ("what runs", "same bits", "NCCL", "dash-attn[cuda]")), out
    assert "self-test failed" not in out


@pytest.mark.usefixtures("short")
def test_bits_that_do_not_repeat_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = doctor.results, []

    def drifting(*args: Any) -> tuple[torch.Tensor, ...]:
        results = real(*args)
        calls.append(0)
        if len(calls) == 3:
            results[2][0, 7, 1, 3] += 1
        return results

    monkeypatch.setattr(doctor, "results", drifting)
    status, out = run(capsys, "--seconds", "0.1", "--json")
    said = json.loads(out)
    assert status == 1 and said["ok"] is False
    assert said["self-test"][0]["status"] == "fail"
    assert "run 2 of dk differs, first at [0, 7, 1, 3], by up to 1.0e+00" in said["self-test"][0]["found"]
    calls.clear()
    status, out = run(capsys, "--seconds", "0.1")
    assert status == 1 and "self-test failed" in out


def test_the_self_test_changes_what_must_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, prepare = [], doctor.prepare
    monkeypatch.setattr(doctor, "prepare", lambda *given: asked.append(dict(given[2].kernel)) or prepare(*given))
    device = torch.device("cpu")
    run = doctor.changing(doctor.problem_on(device, 64, doctor.FULL), device)
    for number in range(3):
        run(number)
    assert asked[0]["threads"] == torch.get_num_threads() and len({how["threads"] for how in asked}) == 3
    assert any(how["jitter"] for how in asked)


@pytest.mark.usefixtures("short")
def test_an_error_in_the_self_test_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **others: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(doctor, "results", broken)
    status, out = run(capsys, "--seconds", "0.1", "--json")
    assert status == 1 and "no kernel image" in json.loads(out)["self-test"][0]["found"]


def test_the_control_says_when_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
        for _ in range(3):
            yield (torch.zeros(2),)

    monkeypatch.setattr(doctor, "unordered", equal)
    said = doctor.control(torch.device("cpu"), 1.0)
    assert said.status == "info" and "3 runs agreed" in said.found


def test_a_gpu_that_the_kernel_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="an older GPU", major=8, minor=0, multi_processor_count=108, total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    said = doctor.gpu(0)
    assert said.status == "warn" and "108 SMs, 64 GiB" in said.found and "Hopper" in said.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.usable_device() == torch.device("cpu")


def test_a_cache_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor and the kernels ask the same questions of the folder."""
    place = tmp_path / "there" / "not yet"
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(place))
    said = list(doctor.what_runs(torch.device("cpu")))[-1]
    assert said.status == "ok" and said.found.startswith(str(place))
    place.chmod(0o777)
    said = list(doctor.what_runs(torch.device("cpu")))[-1]
    assert said.status == "warn" and "others can rename" in said.found and "DASH_ATTN_CACHE_DIR" in said.advice
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", "/proc/dash_attn")
    assert list(doctor.what_runs(torch.device("cpu")))[-1].status == "warn"


# ---- the usual reasons -------------------------------------------------------------------------------------

# Function, environment, status, words of what it found.
CASES = [
    (reasons.cublas, {}, "info", "not set"),
    (reasons.cublas, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "ok", ":4096:8"),
    (reasons.cublas, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "info", ":0:0"),
    (reasons.nccl, {}, "info", "not set"),
    (reasons.nccl, {"WORLD_SIZE": "8"}, "warn", "not set"),
    (reasons.nccl, {"WORLD_SIZE": "8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, "ok", "NCCL_PROTO=Simple"),
    (reasons.autotuning, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, "warn", "on"),
    (reasons.autotuning, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}, "ok", "determin"),
    (reasons.autotuning, {}, "info", "off"),
    (reasons.precision, {}, "info", "float32"),
    (reasons.precision, {"NVIDIA_TF32_OVERRIDE": "1"}, "warn", "NVIDIA_TF32_OVERRIDE=1"),
    (reasons.hashing, {}, "info", "not set"),
    (reasons.hashing, {"PYTHONHASHSEED": "random"}, "info", "not set"),
    (reasons.hashing, {"PYTHONHASHSEED": "0"}, "ok", "PYTHONHASHSEED=0"),
    (reasons.threads, {"OMP_NUM_THREADS": "4"}, "ok", "OMP_NUM_THREADS=4"),
    (reasons.forward, {}, "info", "else flex_attention"),
    (reasons.forward, {"DASH_ATTN_FORWARD": "torch"}, "ok", "torch"),
]
# Those that look at the process, and not at its environment.
OF_PROCESS = [
    (reasons.order, "ok", "kept"),
    (reasons.data, "info", "cannot be seen"),
    (reasons.cudnn, "ok", "off"),
    (reasons.other_operations, "info", "not asked"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="statuses of a machine without a GPU")
@pytest.mark.parametrize(
    ("reason", "status", "found"),
    [*((partial(reason, environment), *said) for reason, environment, *said in CASES), *OF_PROCESS],
    ids=lambda value: None,
)
def test_reasons(reason: Any, status: str, found: str) -> None:
    said = reason()
    assert said.status == status and found in said.found
    assert said.advice or status == "ok"


def test_reasons_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert [said.status for said in (reasons.cublas({}), reasons.nccl({}), reasons.machines())] == ["warn"] * 3


def test_reasons_see_what_a_script_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    said = {finding.name: finding for finding in reasons.reasons()}
    known = [each for each in vars(reasons).values() if getattr(each, "__annotations__", {}).get("return") == "Finding"]
    assert len(said) == len(known) == 13
    assert said["order of the attention backward"].status == said["cuDNN's choice of algorithms"].status == "warn"
    try:
        torch.use_deterministic_algorithms(True)
        assert reasons.other_operations().status == "ok"
        assert reasons.order().status == "ok"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "warn_only" in reasons.other_operations().advice
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    said = json.loads(out)
    rows = {row["name"]: row for row in said["what runs"]}
    assert said["ok"] and rows["backend"]["found"] == "sm90"
