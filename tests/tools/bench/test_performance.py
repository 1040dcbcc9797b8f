"""docs/performance.md holds the numbers of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_attn.tools.bench.performance import MARKED, TABLES, filled, read_results

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_document_is_what_the_results_say() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert filled(text, read_results(RESULTS)) == text
    assert {mark[1] for mark in MARKED.finditer(text)} == set(TABLES)


def test_packs_have_their_own_columns() -> None:
    times = {name: {"median": us} for name, us in (("auto", 100.0), ("auto@group", 150.0), ("fa4 det", 200.0))}
    shape = {"mask": "causal & documents(7)"}
    pack = {"cell": "a", "default": "auto", "us": times, "failed": {}, "flops": 1e9, "shape": shape}
    measured = filled("<!-- table: packed -->\n", {"packed": {"rows": [pack]}})
    assert "| a | 7 | - | 5 | 10 | 2.00x | - | 1.50x |" in measured


def test_the_readme_has_the_headline() -> None:
    """The same table: only its first row has a link in its name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("[the paper](#citation)", "the paper")
    header, lines = TABLES["headline"](read_results(RESULTS))
    table = "\n".join(f"| {' | '.join(line)} |".replace("../", "") for line in lines)
    assert f"| {' | '.join(header)} |\n{'|---' * len(header)}|\n{table}\n\n" in readme


def test_a_table_follows_its_results() -> None:
    results = read_results(RESULTS)
    row = results["models"]["rows"][0]
    row["us"]["fa4 det"]["median"] = 3 * row["us"][row["default"]]["median"]
    text = filled("<!-- table: models -->\n| stale |\n\nbehind it\n", results)
    assert f"| {row['cell']} | {row['default']} |" in text and "| 3.00x |" in text
    assert "stale" not in text and text.endswith("|\n\nbehind it\n")


def test_wrong_gradients_do_not_count() -> None:
    """FlashAttention-4 is wrong at head dim 80: its time is shown with a star and is left out of the means."""
    results = read_results(RESULTS)
    _, lines = TABLES["headline"](results)
    sam = next(row for row in results["models"]["rows"] if row["cell"] == "SAM-huge 16x4096")
    sam["us"]["fa4 det"]["median"] *= 100
    assert TABLES["headline"](results)[1] == lines
    shown = next(line for line in TABLES["models"](results)[1] if line[0] == "SAM-huge 16x4096")
    assert shown[3].endswith("*") and not shown[4].endswith("*")
    sam["failed"] = {}
    assert TABLES["headline"](results)[1] != lines


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- table: nothing -->\n", read_results(RESULTS))


def test_the_results_are_few_and_small() -> None:
    """One file a suite and GPU, the latest; earlier runs are in git's history."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 15 and sum(path.stat().st_size for path in files) < 3_000_000
    assert all(path.parent == RESULTS and path.stem.endswith("_h200") for path in files)
