"""Policies in one sentence: complete, and their links lead to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dash_attn.order import POLICIES
from dash_attn.tools.viz.about import ABOUT, REPOSITORY, TOUR, about, tour_link


def anchors(markdown: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_policy_has_a_sentence() -> None:
    assert set(ABOUT) == {"auto", *POLICIES}
    for told in ABOUT.values():
        assert told.sentence.endswith(".") and "." not in told.sentence[:-1]


def test_every_link_leads_to_a_heading() -> None:
    there = anchors((REPOSITORY / TOUR).read_text(encoding="utf-8"))
    assert {told.anchor for told in ABOUT.values()} <= there


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        ("shift", ["shift"]),
        ("shift:16", ["shift"]),
        ("spt@head", ["spt"]),
        ("shift:64@head", ["shift"]),
        ("auto@group", ["auto"]),
        ("spt@head, symmetric_shift:64@head", ["spt", "symmetric_shift"]),
        ("symmetric_shift:16, symmetric_shift:64", ["symmetric_shift"]),
        ("fa3, of somebody else", ["fa3"]),
        ("shift@somebody", []),
        ("", []),
    ],
)
def test_every_form_of_a_name_is_known(shown: str, names: list[str]) -> None:
    told = about(shown)
    assert list(told) == names and all(told[name] is ABOUT[name] for name in names)


@pytest.mark.parametrize(
    ("page", "link"), [("report.html", "docs/tour.md#x"), ("out/a/b.html", "../../docs/tour.md#x")]
)
def test_links_are_relative_to_the_page(page: str, link: str) -> None:
    assert tour_link("x", REPOSITORY / page) == link


def test_no_link_from_outside(tmp_path: Path) -> None:
    assert tour_link("x", tmp_path / "report.html") is None
