"""audit --all counts what it tries, and notices what breaks a promise."""

from __future__ import annotations

import json
import signal
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_attn.backends.cpu import forks
from dash_attn.backends.sm90 import store
from dash_attn.tools.bench.audit import attempts, everything
from dash_attn.tools.bench.audit.audit import AuditSettings
from dash_attn.tools.bench.audit.everything import PARTS, audit_all, subjects
from dash_attn.tools.bench.audit.watch import Hear, Heard
from dash_attn.tools.bench.audit.whole import Bits
from dash_attn.tools.cli.everything import shown_parts
from dash_attn.tools.cli.main import main as dash_attn_command

HOW = AuditSettings("cpu", ("plain",), repeats=2)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGALRM, signal.SIGPROF)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def outcomes(kind: str, number: int) -> list[str]:
    made = attempts.KINDS[kind](0)
    try:
        return list(islice(made, number))
    finally:
        made.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
@pytest.mark.parametrize(("kind", "number"), [("settings", 8), ("interrupts", 30), ("forks", 4), ("damage", 200)])
def test_promises_hold(kind: str, number: int, handlers: None) -> None:
    seen = outcomes(kind, number)
    assert len(seen) == number and not [outcome for outcome in seen if "WRONG" in outcome]
    if kind == "interrupts":
        assert "interrupted" in seen
    if kind == "damage":
        assert set(seen) == {f"{spoil.__name__}: refused" for spoil in attempts.DAMAGES}


def test_a_damaged_file_that_is_loaded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "require_whole", lambda path: None)
    assert all("WRONG: loaded after" in outcome for outcome in outcomes("damage", 20))


def test_a_file_that_is_refused_for_no_reason_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.require_whole

    def only_the_first(path: Path) -> None:
        monkeypatch.setattr(store, "require_whole", lambda path: whole(path.with_name("none")))

    monkeypatch.setattr(store, "require_whole", only_the_first)
    assert outcomes("damage", 1) == ["WRONG: a whole file is refused"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
@pytest.mark.parametrize("kind", ["settings", "interrupts", "forks"])
def test_other_bits_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch, handlers: None) -> None:
    calls = iter(range(10**9))
    monkeypatch.setattr(attempts, "step", lambda *given: Bits(*[torch.full((1, 1, 1), float(next(calls)))] * 5))
    assert "WRONG" in outcomes(kind, 1)[0]


def test_a_thread_that_is_left_is_noticed(monkeypatch: pytest.MonkeyPatch, handlers: None) -> None:
    over, threads, original = threading.Event(), [], attempts.step

    def step(*given: Any) -> Bits:
        if len(threads) < 10:  # the first calls are not interrupted
            threads.append(threading.Thread(target=over.wait))
            threads[-1].start()
        return original(*given)

    monkeypatch.setattr(attempts, "step", step)
    monkeypatch.setattr(attempts, "ENDING", 0.01)
    try:
        assert outcomes("interrupts", 1) == ["WRONG: 1 threads are left"]
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Torn(deque[int]):
    def __bool__(self) -> bool:
        raise RuntimeError("deque mutated during iteration")


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_an_error_in_a_handler_of_forks_is_noticed(monkeypatch: pytest.MonkeyPatch, handlers: None) -> None:
    monkeypatch.setattr(forks, "_ended", Torn())
    assert outcomes("forks", 1) == ["WRONG: RuntimeError('deque mutated during iteration') in a handler of forks"]


# ---- the parts together ------------------------------------------------------------------------------------


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the child of each part does: its outcomes, or an error, or a verdict of the watchdog."""
    told: dict[str, Any] = {}

    def watched(jobs: list[dict[str, Any]], folder: Path, timeout: float, hear: Hear) -> list[Heard]:
        (job,) = jobs
        said = told.get(job["attempts"], {"fine": 3})
        if isinstance(said, BaseException):
            hear(job, {"outcomes": {"fine": 2}})
            raise said
        if isinstance(said, Heard):
            hear(job, {"outcomes": {"fine": 2}})
            return [said]
        hear(job, {"outcomes": said})
        return [Heard("done")]

    monkeypatch.setattr(everything, "watched", watched)
    return told


KINDS = tuple(attempts.KINDS)


def test_counts(says: dict[str, Any]) -> None:
    says["forks"] = {"fine": 5, "WRONG: hangs": 2}
    kept: list[dict[str, Any]] = []
    report = audit_all(1, KINDS, HOW, kept.append)
    assert [(part["part"], part["count"], part["failed"]) for part in report["parts"]] == [
        (name, 7 if name == "forks" else 3, 2 if name == "forks" else 0) for name in KINDS
    ]
    assert report["complete"] and not report["ok"]
    assert [len(each["parts"]) for each in kept] == list(range(len(KINDS) + 1))
    assert not any(each["ok"] for each in kept)
    assert "forks: WRONG: hangs" in shown_parts(report) and "NOT all promises hold" in shown_parts(report)
    del says["forks"]
    assert audit_all(1, KINDS, HOW, kept.append)["ok"]


def test_a_part_that_tries_nothing_does_not_pass(says: dict[str, Any]) -> None:
    says["forks"] = {}
    report = audit_all(1, KINDS, HOW, lambda _: None)
    assert report["complete"] and not report["ok"] and not any(part["failed"] for part in report["parts"])
    assert "NOT all promises hold" in shown_parts(report) and "forks: nothing was tried" in shown_parts(report)


def test_the_seed_of_the_command_reaches_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def watched(jobs: list[dict[str, Any]], *_: object) -> list[Heard]:
        seeds.extend(job["seed"] for job in jobs)
        return [Heard("done")]

    monkeypatch.setattr(everything, "watched", watched)
    with pytest.raises(SystemExit):
        dash_attn_command(["audit", "--all", "--stress", ",".join(KINDS), "--seed", "7", "--minutes", "1"])
    assert seeds == [7] * len(KINDS)


def test_a_hang_is_a_failure_and_the_next_part_runs(says: dict[str, Any]) -> None:
    says["settings"] = Heard("hang", "silent for 1 s")
    report = audit_all(1, ("settings", "damage"), HOW, lambda _: None)
    first, second = report["parts"]
    assert (first["count"], first["failed"], second["count"]) == (3, 1, 3)
    assert "silent for 1 s" in first["why"][0] and report["complete"] and not report["ok"]


def test_an_interrupt_keeps_the_counts(says: dict[str, Any]) -> None:
    says["interrupts"] = KeyboardInterrupt()
    report = audit_all(1, KINDS, HOW, lambda _: None)
    assert [part["count"] for part in report["parts"]] == [3, 3, 2]
    assert not report["complete"] and not report["ok"] and "NOT complete" in shown_parts(report)


def test_repeats(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "subjects", lambda device: subjects(device)[:1] + subjects(device)[-1:])
    kept: list[dict[str, Any]] = []
    report = audit_all(1e-9, ("repeats",), HOW, kept.append)
    (part,) = report["parts"]
    assert report["ok"] and part["count"] == 2 and part["failed"] == 0
    assert part["stressors"] == {"plain": 2} and "repeats: runs under plain: 2" in shown_parts(report)
    assert len(kept) == 3 and kept[1]["parts"][0]["count"] == 2 and not kept[1]["complete"]


def test_repeats_that_differ(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = everything.audit
    monkeypatch.setattr(everything, "audit", lambda subjects, targets, how: audit(subjects, ["any"], how))
    report = audit_all(1e-9, ("repeats",), AuditSettings("cpu", ("plain",), repeats=4), lambda _: None)
    (part,) = report["parts"]
    assert not report["ok"] and part["failed"] == part["outcomes"]["other bits"] > 0 and "dq" in part["why"][0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_cut_chains_and_packs_are_repeated(device: str) -> None:
    chosen = subjects(device)
    assert len({subject.name for subject in chosen}) == len(chosen)
    assert any(subject.pack for subject in chosen)
    problems = [subject.problem for subject in chosen if subject.problem is not None]
    assert {problem.heads_q > problem.heads_kv for problem in problems} == {True, False}
    assert {str(problem.mask) for problem in problems} == {"full", "causal"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["audit", "--all", "--stress", "damage", "--minutes", "0.01", "--json", "--out", str(out)])
    assert not stop.value.code
    printed, written = json.loads(capsys.readouterr().out), json.loads(out.read_text())
    assert printed["ok"] and printed["parts"] == written["parts"]
    assert printed["parts"][0]["count"] > 50


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["--seqlen", "64"], "--seqlen"),
        (["--invariance"], "--invariance"),
        (["--target", "any"], "--target"),
        (["--stress", "load"], f"choose from {', '.join(PARTS)}"),
    ],
)
def test_what_it_does_not_take(told: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        dash_attn_command(["audit", "--all", *told])
    assert stop.value.code == 2 and message in capsys.readouterr().err
