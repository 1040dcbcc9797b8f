"""Files of results: read, gathered by suite, refused where they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from dash_attn.tools.viz.evidence import evidence
from dash_attn.tools.viz.plots import DRAWN
from dash_attn.tools.viz.results import gathered, plot, read
from tests.tools.viz.results import audit, result, row, us, write

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("suite", DRAWN)
def test_every_suite_has_a_picture(suite: str, dark: bool, tmp_path: Path) -> None:
    (path,) = plot([write(tmp_path / "r.json", result(suite))], tmp_path, dark=dark)
    assert path.name == f"{suite}{'_dark' if dark else ''}.png"
    picture = matplotlib.image.imread(path)
    assert picture.shape[1] == 1760 and picture[..., :3].std() > 0.05
    assert (picture[0, 0, :3].mean() < 0.3) == dark


def test_the_committed_grid_is_one_picture(tmp_path: Path) -> None:
    paths = plot(sorted(RESULTS.glob("grid_h200*.json")), tmp_path, kind="svg")
    assert [path.name for path in paths] == ["grid.svg", "price.svg"]
    assert paths[0].read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a result"),
        ("[]", "not a result"),
        ('{"rows": []}', "not a result"),
        ('{"suite": "grid", "environment": {}, "rows": []}', "no rows"),
        ('{"suite": "grid", "environment": {}, "rows": [{"cell": "a", "us": {}}]}', "need default, flops, shape"),
    ],
)
def test_what_is_no_result_is_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        plot([file], tmp_path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        plot([tmp_path / "nowhere.json"], tmp_path)
    with pytest.raises(ValueError, match="--format"):
        plot([], tmp_path, kind="gif")
    with pytest.raises(ValueError, match="mine"):
        plot([write(tmp_path / "r.json", result("mine"))], tmp_path)


def test_rows_of_several_days_are_named(tmp_path: Path) -> None:
    """Each row has the date of its run: that of its file, or its own where runs were joined."""
    first, second = result("grid", date="2026-01-02"), result("grid", date="2026-01-05")
    first["rows"][0]["date"] = "2026-01-01"
    files = [write(tmp_path / f"{i}.json", each) for i, each in enumerate((first, second))]
    grid = gathered(files)["grid"]
    assert [row["date"][-2:] for row in grid["rows"]] == ["01", *["02"] * 3, *["05"] * 4]
    assert grid["environment"]["date"] == "2026-01-01 and 2026-01-02 and 2026-01-05"
    page = evidence(files[:1], tmp_path / "page.html").read_text()
    assert "Some GPU, 2026-01-01 and 2026-01-02" in page
    assert gathered(files[1:])["grid"]["environment"]["date"] == "2026-01-05"


def test_the_runs_of_a_committed_file_are_told_apart() -> None:
    grid = gathered([RESULTS / "grid_close_h200.json"])["grid_close"]
    assert grid["environment"]["date"] == "2026-11-16 and 2026-11-18"
    assert {(row["shape"]["dim"], row["date"]) for row in grid["rows"]} == {(128, "2026-11-16"), (64, "2026-11-18")}


def test_an_audit_is_a_suite(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", audit())
    made = read(file)
    assert made["suite"] == "audit" and made["rows"] == audit()["entries"]
    assert plot([file], tmp_path) == []


def test_files_of_one_suite_are_put_together(tmp_path: Path) -> None:
    files = []
    for number, (command, note) in enumerate((("first\nsecond", "a part"), ("third", None))):
        environment: dict[str, Any] = {"command": command} | ({"note": note} if note else {})
        made = {"suite": "length", "environment": environment, "rows": [row(512 << number, "causal", "level")]}
        files.append(write(tmp_path / f"{number}.json", made))
    (whole,) = gathered(files).values()
    assert whole["commands"] == ["first", "second", "third"] and whole["notes"] == ["a part"]
    assert [each["shape"]["len_q"] for each in whole["rows"]] == [512, 1024]


def test_files_of_two_gpus_are_not_mixed(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", result("grid", device=name)) for name in ("H100", "H200")]
    with pytest.raises(ValueError, match=r"H200.*H100"):
        gathered(files)


def test_a_grid_stands_for_the_price_where_no_run_of_it_is_given(tmp_path: Path) -> None:
    timed, untimed = row(512, "full", "shift"), row(1024, "full", "shift")
    timed["pairs"] = {"ours": {"shift": us(3.0), "any (shift)": us(2.0)}}
    grid = write(tmp_path / "grid.json", result("grid", command="g") | {"rows": [timed, untimed]})
    price = write(tmp_path / "price.json", result("price", command="p") | {"rows": [untimed]})
    whole = gathered([grid])["price"]
    assert [each["cell"] for each in whole["rows"]] == [timed["cell"]] and whole["commands"] == ["g"]
    assert [each["cell"] for each in gathered([grid, price])["price"]["rows"]] == [untimed["cell"]]
