"""Compiled kernels on disk: what their key depends on, which files are trusted, and who compiles."""

from __future__ import annotations

import ast
import dataclasses
import multiprocessing
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from dash_attn.backends.sm90 import cache, store
from dash_attn.backends.sm90.config import select

FOLDER = Path(cache.__file__).parent


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the backend's sources, of which `toolchain` takes its hash."""
    folder = tmp_path / "sm90"
    shutil.copytree(FOLDER, folder)
    monkeypatch.setattr(cache, "__file__", str(folder / "cache.py"))
    cache.sources.cache_clear()
    yield folder
    cache.sources.cache_clear()


def edited(path: Path, old: str, new: str) -> str:
    source = path.read_text(encoding="utf-8")
    assert old in source
    path.write_text(source.replace(old, new), encoding="utf-8")
    cache.sources.cache_clear()
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


def test_every_table_that_kernels_import_is_in_the_key() -> None:
    """Kernels read tables of other folders by the numbers of their columns."""
    imported = set()
    for path in (Path(cache.__file__).parent / "device").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("dash_attn."):
                imported |= {(node.module, alias.name) for alias in node.names}
    assert imported
    for module, name in imported:
        table = getattr(import_module(module), name)
        numbers = {name: table} if isinstance(table, int) else {column.name: column.value for column in table}
        assert all(str(number) in cache.sources() for number in numbers.items()), name


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


def test_configs_and_kinds_have_keys_of_their_own() -> None:
    plain = select(128, "bf16", "full")
    configs = (plain, dataclasses.replace(plain, peek=True))
    assert len({cache.key_of(kind, cfg) for kind in ("main", "finish") for cfg in configs}) == 4


class Package(NamedTuple):
    name: str
    version: str


INSTALLED = (
    Package("nvidia-cutlass-dsl", "1"),
    Package("nvidia_cutlass_dsl_libs_base", "1"),
    Package("nvidia-cutlass-dsl-libs-cu13", "1"),
    Package("apache-tvm-ffi", "1"),
    Package("numpy", "1"),
)


def key_with(packages: tuple[Package, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cache, "distributions", lambda: packages)
    cache.packages.cache_clear()
    try:
        return cache.toolchain()
    finally:
        cache.packages.cache_clear()


@pytest.mark.parametrize("changed", INSTALLED, ids=lambda package: package.name)
def test_every_library_of_the_compiler_is_in_the_key(changed: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tuple(each._replace(version="2") if each is changed else each for each in INSTALLED)
    same = key_with(newer, monkeypatch) == key_with(INSTALLED, monkeypatch)
    assert same == (changed.name == "numpy")
    assert key_with(INSTALLED[1:], monkeypatch) != key_with(INSTALLED, monkeypatch)


@pytest.mark.parametrize("name", ["CUTE_DSL_COMPILER_OPT", "CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_NOT_KNOWN_YET"])
def test_settings_that_may_change_code_change_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.toolchain()
    monkeypatch.setenv(name, "1")
    assert cache.toolchain() != before


@pytest.mark.parametrize("name", ["CUTE_DSL_PRINT_IR", "CUTE_DSL_LOG_LEVEL", "CUDA_VISIBLE_DEVICES"])
def test_settings_that_print_keep_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.toolchain()
    monkeypatch.setenv(name, "1")
    assert cache.toolchain() == before


@pytest.mark.skipif(find_spec("cutlass") is None, reason="not installed: nvidia-cutlass-dsl")
def test_the_compiler_says_itself_that_the_harmless_settings_change_no_code() -> None:
    spec = find_spec("cutlass")
    assert spec is not None and spec.origin is not None
    stated = dict[str, bool]()
    for file in ("base_dsl/env_manager.py", "cutlass_dsl/cutlass.py"):
        for node in ast.walk(ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "env_var":
                source, says = node.args[0], {word.arg: word.value for word in node.keywords}.get("affects_compile")
                if isinstance(source, ast.Constant) and isinstance(says, ast.Constant):
                    stated[source.value] = says.value
    assert stated["COMPILER_OPT"] and len(stated) > 20
    assert not [name for name in cache.HARMLESS if stated.get(name)]


# ---- building ----------------------------------------------------------------------------------------------

CONFIG = select(128, "bf16", "full")


class Compiled:
    """What the compiler returns, as far as the cache knows it."""

    def __init__(self, code: bytes) -> None:
        self.code = code

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        assert function_name == cache.ENTRY
        Path(object_file_path).write_bytes(self.code)


@dataclasses.dataclass
class Compiler:
    """A compiler that takes no time, and the loader of its files."""

    log: Path
    seconds: float = 0.0

    def compile(self, kind: str, cfg: object) -> Compiled:
        with self.log.open("a") as file:
            file.write(f"{kind}\n")
        time.sleep(self.seconds)
        return Compiled(f"code of {kind}".encode())

    def load(self, path: Path) -> Compiled:
        return Compiled(path.read_bytes())

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path / "named"))
    cache.warn_once.cache_clear()
    return tmp_path / "named" / cache.OWN


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler(tmp_path / "compiled.txt")
    monkeypatch.setattr(cache, "compile_kernel", fake.compile)
    monkeypatch.setattr(cache, "load", fake.load)
    return fake


def built() -> bytes:
    code: bytes = cache.build("main", CONFIG).code  # type: ignore[attr-defined]
    return code


def test_a_kernel_is_compiled_once_and_then_loaded(place: Path, compiler: Compiler) -> None:
    assert built() == built() == b"code of main"
    assert compiler.count == 1
    (file,) = place.iterdir()  # nothing temporary and no lock is left
    assert file.suffix == ".o" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def link_to_another(file: Path) -> None:
    other = file.parent.parent / "other.o"
    file.rename(other)
    file.symlink_to(other)


def let_others_write(file: Path) -> None:
    file.chmod(0o666)


def truncate(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("spoil", [flip_a_bit, link_to_another, let_others_write, truncate])
def test_what_is_damaged_or_foreign_is_compiled_again_with_a_warning(
    spoil: Callable[[Path], None], place: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    built()
    (file,) = place.iterdir()
    spoil(file)
    assert built() == b"code of main" and compiler.count == 2
    assert len(caplog.records) == 1 and "compiling again" in caplog.text
    assert built() == b"code of main" and compiler.count == 2  # the new file is good
    assert not any(path.is_symlink() for path in place.iterdir())


def test_every_flipped_bit_is_noticed(place: Path, compiler: Compiler) -> None:
    built()
    (file,) = place.iterdir()
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        assert cache.Store.at(place).find(cache.key_of("main", CONFIG)) is None
        file.write_bytes(whole)
        file.chmod(0o600)


def test_files_of_another_user_are_not_loaded(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert built() == built() == b"code of main" and compiler.count == 3
    assert len(caplog.records) == 1 and "another user" in caplog.text


def test_a_file_that_does_not_load_is_compiled_again(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built()
    monkeypatch.setattr(cache, "load", lambda path: 1 / 0)
    assert built() == b"code of main" and compiler.count == 2
    assert "cannot load" in caplog.text


def test_an_export_that_fails_leaves_nothing_and_stops_nobody(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(self: Compiled, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(b"half of")
        raise OSError("no space left")

    monkeypatch.setattr(Compiled, "export_to_c", no_space)
    assert built() == b"code of main"
    assert not list(place.iterdir()) and "no space left" in caplog.text


# ---- where -------------------------------------------------------------------------------------------------


def nobody(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """No HOME, no XDG, no entry for this user: a container with a made-up user number."""
    for name in ("DASH_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def test_without_a_home_kernels_are_kept_in_a_private_temporary_folder(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody(monkeypatch, tmp_path)
    assert built() == built() == b"code of main" and compiler.count == 1
    assert cache.folder().parent == tmp_path and stat.S_IMODE(cache.folder().stat().st_mode) == 0o700


def test_a_temporary_folder_that_is_open_or_a_link_is_not_used(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nobody(monkeypatch, tmp_path)
    cache.warn_once.cache_clear()
    cache.folder().mkdir()
    cache.folder().chmod(0o777)
    assert built() == built() == b"code of main" and compiler.count == 2
    assert len(caplog.records) == 1 and "written by others" in caplog.text and "not kept" in caplog.text
    cache.folder().rename(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o700)
    cache.folder().symlink_to(tmp_path / "moved")
    assert built() == b"code of main" and compiler.count == 3
    assert not list((tmp_path / "moved").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_others_can_rename_is_not_used(
    mode: int, linked: bool, place: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the check of a file and its loading they could put another folder in its place."""
    shared = place.parent
    if linked:
        shared = shared.with_name("shared")
        place.parent.symlink_to(shared)
    shared.mkdir()
    shared.chmod(mode)
    assert built() == built() == b"code of main"
    if mode & stat.S_ISVTX or not mode & stat.S_IWOTH:
        assert compiler.count == 1 and not caplog.records
    else:
        assert compiler.count == 2 and not list(place.iterdir())
        assert len(caplog.records) == 1 and "others can rename" in caplog.text and str(shared) in caplog.text


def test_a_home_that_cannot_hold_a_folder_falls_back_to_the_temporary_one(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nobody(monkeypatch, tmp_path)
    cache.warn_once.cache_clear()
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert built() == built() == b"code of main" and compiler.count == 1
    assert len(caplog.records) == 1 and "kernels are kept in" in caplog.text


@pytest.mark.parametrize(("value", "used"), [("/else/where", True), ("", False), ("not/absolute", False)])
def test_xdg_is_followed_where_it_names_a_folder(value: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASH_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert (cache.folder() == Path("/else/where/dash_attn")) == used


# ---- many processes ----------------------------------------------------------------------------------------

fork = multiprocessing.get_context("fork")


def test_eight_processes_that_start_at_once_compile_once(place: Path, compiler: Compiler) -> None:
    compiler.seconds = 0.3
    start, codes = fork.Barrier(8), fork.SimpleQueue()

    def process() -> None:
        start.wait()
        codes.put(built())

    processes = [fork.Process(target=process) for _ in range(8)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
    assert [each.exitcode for each in processes] == [0] * 8
    assert [codes.get() for _ in processes] == [b"code of main"] * 8
    assert compiler.count == 1
    assert len(list(place.iterdir())) == 1


def test_a_process_that_has_waited_long_compiles_itself(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = cache.Store.at
    monkeypatch.setattr(
        cache.Store, "at", staticmethod(lambda folder: dataclasses.replace(at(folder), wait_seconds=0.2))
    )
    with cache.Store.at(place).locked(cache.key_of("main", CONFIG)):
        assert built() == b"code of main"
    assert compiler.count == 1 and "waited" in caplog.text


def test_the_lock_of_a_killed_process_does_not_hold(place: Path, compiler: Compiler) -> None:
    def dies() -> None:
        with cache.Store.at(place).locked(cache.key_of("main", CONFIG)):
            os._exit(1)

    process = fork.Process(target=dies)
    process.start()
    process.join(60)
    assert list(place.glob("*.lock"))
    begin = time.monotonic()
    assert built() == b"code of main" and time.monotonic() - begin < 5
    assert not list(place.glob("*.lock"))


# ---- size --------------------------------------------------------------------------------------------------


def test_the_folder_is_bounded_by_bytes_and_the_longest_unused_go(place: Path) -> None:
    kept = dataclasses.replace(cache.Store.at(place), most_bytes=3000)
    for i in range(3):
        kept.keep(f"key{i}", lambda path: path.write_bytes(os.urandom(1000)) and None)
        for path in place.glob(f"key{i}-*"):
            os.utime(path, (1000 + i, 1000 + i))
    assert kept.find("key0")  # a use makes it young again
    kept.keep("key3", lambda path: path.write_bytes(os.urandom(1500)) and None)
    assert [bool(kept.find(f"key{i}")) for i in range(4)] == [True, False, False, True]
    kept.keep("large", lambda path: path.write_bytes(os.urandom(5000)) and None)
    assert [path.name[:5] for path in place.iterdir()] == ["large"]  # what is in use stays, however large


def test_what_a_killed_process_left_is_removed_later(place: Path) -> None:
    kept = cache.Store.at(place)
    old, new = place / f"{store.SCRATCH}old", place / f"{store.SCRATCH}new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "kernel.o").write_bytes(b"half of")
    for path in (old / "kernel.o", old):
        os.utime(path, (1000, 1000))
    kept.keep("key", lambda path: path.write_bytes(b"code") and None)
    kept.keep("key", lambda path: path.write_bytes(b"code") and None)
    assert not old.exists() and new.exists()


def test_files_of_others_in_the_named_folder_stay(place: Path, compiler: Compiler) -> None:
    folder = place.parent
    (folder / f"{store.SCRATCH}feature").mkdir(parents=True)
    others = [folder / name for name in ("uv.lock", "module.o", f"{store.SCRATCH}feature/thesis.tex")]
    for path in others:
        path.write_bytes(b"precious")
    for path in (*others, *folder.iterdir()):
        os.utime(path, (1000, 1000))
    built()
    dataclasses.replace(cache.Store.at(cache.folder()), most_bytes=0).keep("key", lambda path: path.touch())
    assert all(path.exists() for path in others)


def test_side_kernels_are_shared_between_masks_orders_and_builds() -> None:
    configs = [select(80, "fp16", mask, ordered) for mask in ("full", "causal") for ordered in (True, False)]
    assert len({cache.shared(cfg) for cfg in configs}) == 1
    assert cache.shared(select(80, "fp16", "full")) != cache.shared(select(88, "fp16", "full"))
