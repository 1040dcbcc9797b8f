"""The key of a compiled kernel: what changes it, and what does not."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dash_attn.backends.sm90 import cache
from dash_attn.backends.sm90.config import select

FOLDER = Path(cache.__file__).parent


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the backend's sources, of which `toolchain` takes its hash."""
    folder = tmp_path / "sm90"
    shutil.copytree(FOLDER, folder)
    monkeypatch.setattr(cache, "__file__", str(folder / "cache.py"))
    cache.toolchain.cache_clear()
    yield folder
    cache.toolchain.cache_clear()


def edited(path: Path, old: str, new: str) -> str:
    source = path.read_text(encoding="utf-8")
    assert old in source
    path.write_text(source.replace(old, new), encoding="utf-8")
    cache.toolchain.cache_clear()
    return cache.toolchain()


def test_a_comment_in_a_kernel_keeps_the_key(copied: Path) -> None:
    before = cache.toolchain()
    assert edited(copied / "device/prepare.py", "THREADS = 256", "THREADS = 256  # eight warps") == before


NUMBERS = [("device/prepare.py", "THREADS = 256", "THREADS = 128"), ("cta.py", "RING = 16", "RING = 32")]


@pytest.mark.parametrize(("file", "old", "new"), NUMBERS)
def test_a_number_in_a_kernel_or_its_constants_changes_the_key(copied: Path, file: str, old: str, new: str) -> None:
    before = cache.toolchain()
    assert edited(copied / file, old, new) != before


def test_host_code_keeps_the_key(copied: Path) -> None:
    before = cache.toolchain()
    host = {path.name for path in copied.glob("*.py")} - {path.name for path in cache.kernel_sources()}
    assert {"launch.py", "backend.py", "cache.py"} <= host
    for name in host:
        source = (copied / name).read_text(encoding="utf-8")
        assert edited(copied / name, source, f"{source}\nLIMIT = 1\n") == before, name


def test_every_file_that_kernels_import_is_in_the_key() -> None:
    """`from ..name import` in device/, and what those files import from this folder."""
    hashed, seen = {path.name for path in cache.kernel_sources()}, set()
    todo = list(FOLDER.glob("device/*.py"))
    while todo:
        path = todo.pop()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            source = path.parents[node.level - 1] / f"{node.module}.py"
            if source.name not in seen:
                seen.add(source.name)
                todo.append(source)
    assert seen <= hashed and seen >= {"config.py", "cta.py", "barriers.py", "smem_plan.py", "tasks.py"}


def test_configs_and_kinds_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path))
    plain = select(128, "bf16", "full")
    configs = (plain, dataclasses.replace(plain, peek=True))
    paths = {cache.path_of(kind, cfg) for kind in ("main", "finish") for cfg in configs}
    assert len(paths) == 4 and all(path.parent == tmp_path for path in paths)


def test_side_kernels_are_shared_between_masks_orders_and_builds() -> None:
    configs = [select(80, "fp16", mask, ordered) for mask in ("full", "causal") for ordered in (True, False)]
    assert len({cache.shared(cfg) for cfg in configs}) == 1
    assert cache.shared(select(80, "fp16", "full")) != cache.shared(select(88, "fp16", "full"))
