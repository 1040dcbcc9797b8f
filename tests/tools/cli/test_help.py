"""The help texts: nothing is cut at 80 columns, and a word means the same in every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dash_attn.tools.bench.suites import SUITES
from dash_attn.tools.cli.main import app, main

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands
# Commands whose answer a script may want to read. A demo is for people, and watch prints what its script prints.
FOR_SCRIPTS = COMMANDS.keys() - {"demo", "watch"}


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def squeezed(text: str) -> str:
    """Without white space: lines may break anywhere."""
    return re.sub(r"\s", "", text)


def options() -> Iterator[tuple[str, Any]]:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            yield name, parameter


def test_the_list_of_commands_is_complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = help_of(capsys, monkeypatch)
    for name, command in COMMANDS.items():
        assert squeezed(f"{name} {command.help.partition(chr(10))[0]}") in squeezed(shown), name
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_text_is_cut(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = help_of(capsys, monkeypatch, name)
    assert squeezed(COMMANDS[name].help) in squeezed(shown)
    for parameter in COMMANDS[name].params:
        assert parameter.help, f"{name}: {parameter.name} has no help text"
        assert squeezed(parameter.help) in squeezed(shown), parameter.name
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_values_have_words_and_no_python_types(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(capsys, monkeypatch, name)
    assert "<" not in shown and "[arguments]" not in shown
    for parameter in COMMANDS[name].params:
        if not getattr(parameter, "is_flag", False) and parameter.name != "help":
            assert parameter.metavar and parameter.metavar in shown, parameter.name


def test_defaults_of_workers_are_those_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert squeezed("one a kv tile") in squeezed(help_of(capsys, monkeypatch, "simulate"))
    shown = squeezed(help_of(capsys, monkeypatch, "explain"))
    assert squeezed("the GPU's SMs, 132 without one, or all CPU threads") in shown and "kvtile" not in shown


def test_the_reference_says_who_has_no_policy() -> None:
    """Every command of the section about problems has every option of its table, but for those that it names."""
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("## A problem")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)
    for name in ("explain", "simulate", "compare", "search", "trace"):
        spelled = {spelling for option in COMMANDS[name].params for spelling in option.opts}
        for option in set(table) - spelled:
            assert f"`{name}` has no `{option}`" in section


def test_a_word_means_the_same_in_every_command() -> None:
    """Commands that take an option of the same name take it from one definition. A command says its own default, how
    to give several, that it takes documents too, and that the exact solver needs whole numbers."""
    shared = {"mask", "window", "seqlen", "batch", "heads", "kv_heads", "head_dim", "dtype", "backend", "policy"}
    shared |= {"workers", "model", "q_tiles", "kv_tiles", "compute", "reduce"}
    more = re.compile(
        r"(; several with commas|; with --exact a whole number|; or, in tokens, documents:.*)?( \[default: .*\])?$"
    )
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for _, option in options():
        if option.name in shared:
            seen.setdefault(option.name, set()).add((tuple(option.opts), more.sub("", option.help)))
    assert seen.keys() == shared
    assert all(len(meanings) == 1 for meanings in seen.values()), seen


def test_commands_for_one_problem_have_the_same_mask_and_policy_by_default() -> None:
    one = [option for _, option in options() if option.name in ("mask", "policy") and "several" not in option.help]
    assert {(option.name, option.default) for option in one} == {("mask", "causal"), ("policy", "auto")}


def test_every_suite_is_named() -> None:
    (suite,) = [option for name, option in options() if (name, option.name) == ("bench", "suite")]
    assert squeezed(", ".join(SUITES)) in squeezed(suite.help)


def test_options_are_spelled_alike() -> None:
    spelled = {spelling for _, option in options() for spelling in option.opts if spelling.startswith("-")}
    assert {"--head-dim", "--kv-heads", "--heads", "--seqlen", "--batch", "--mask", "--window", "--policy"} <= spelled
    others = {"--headdim", "--nheads", "--nheads-kv", "--batch-size", "--causal", "--policies", "--tile", "--width"}
    assert not spelled & others
    assert all(spelling == spelling.lower() and "_" not in spelling for spelling in spelled)


@pytest.mark.parametrize("name", sorted(FOR_SCRIPTS))
def test_scripts_can_ask_for_json(name: str) -> None:
    assert "--json" in {spelling for option in COMMANDS[name].params for spelling in option.opts}
