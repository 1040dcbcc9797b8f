"""Environment variables that every call reads."""

from __future__ import annotations

import os

import pytest

from dash_attn.backends.variables import variable

NAME = "DASH_ATTN_TEST_VARIABLE"


def test_every_way_to_change_a_variable_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    value = variable(NAME)
    assert value() is None
    monkeypatch.setenv(NAME, "größe")
    assert value() == "größe"
    os.environ.update({NAME: ""})
    assert value() == ""
    os.environ.pop(NAME)
    assert value() is None


def test_another_mapping_in_the_place_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    value = variable(NAME)
    monkeypatch.setattr(os, "environ", {NAME: "1"})
    assert value() == "1"
