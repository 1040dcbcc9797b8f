"""The hash of source files follows what they compute, not how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_attn.backends.sources import source_hash

SOURCE = '''
"""A module."""

LIMIT = 3  # of something


class Thing:
    """A thing."""


def double(x):
    """Twice x."""
    return 2 * x
'''


def hashed(folder: Path, source: str) -> str:
    path = folder / "code.py"
    path.write_text(source, encoding="utf-8")
    return source_hash([path])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# of something", "# of something else"),
        ("A module.", "Another text."),
        ("A thing.", "Another text."),
        ("Twice x.", "Another text."),
        ("LIMIT = 3", "\n\nLIMIT   =   (3)"),
    ],
)
def test_comments_docstrings_and_layout_keep_it(tmp_path: Path, old: str, new: str) -> None:
    assert hashed(tmp_path, SOURCE.replace(old, new)) == hashed(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("LIMIT = 3", "LIMIT = 4"), ("2 * x", "x * 2"), ("double", "twice"), ("return 2 * x", 'return """Twice x."""')],
)
def test_a_changed_value_or_name_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert hashed(tmp_path, SOURCE.replace(old, new)) != hashed(tmp_path, SOURCE)


def test_file_names_enter_it_and_their_order_does_not(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a.py", "b.py", "c.py"))
    for path, source in ((first, "x = 1"), (second, "y = 1"), (third, "y = 1")):
        path.write_text(source, encoding="utf-8")
    assert source_hash([first, second]) == source_hash([second, first])
    assert source_hash([first, second]) != source_hash([first, third])
