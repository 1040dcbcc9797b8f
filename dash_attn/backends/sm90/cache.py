"""Compiled kernels, kept in memory and on disk.

The name of a file is a hash of everything that its machine code depends on: the config, the kernel's sources and the
compiler's version. A file is written under another name and then renamed, so processes can share a folder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from dash_attn.backends.sources import source_hash
from dash_attn.program import Chain, Run

from .config import KernelConfig

log = logging.getLogger(__name__)
ENTRY = "dash_attn_kernel"  # the function's name in a compiled file
CONSTANTS = ("barriers.py", "config.py", "cta.py", "smem_plan.py")  # what device/*.py imports from this folder

Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """The launches of one backward, in order."""

    prepare: Kernel
    main: Kernel
    finish: Kernel | None  # None if the last contributor finishes dQ


def folder() -> Path:
    root = os.environ.get("DASH_ATTN_CACHE_DIR")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dash_attn"


def kernel_sources() -> list[Path]:
    """The files that fix the machine code: the kernels, and the constants and tables that they read."""
    here = Path(__file__).parent
    return [*here.glob("device/*.py"), *(here / name for name in CONSTANTS)]


@functools.cache
def toolchain() -> str:
    """Hash of the kernel's sources, of the columns that it reads, and of the compiler's version."""
    columns = [(column.name, column.value) for table in (Chain, Run) for column in table]
    parts = [source_hash(kernel_sources()), str(columns)]
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} unknown")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def path_of(kind: str, cfg: KernelConfig) -> Path:
    key = hashlib.sha256(f"{toolchain()} {kind} {cfg!r}".encode()).hexdigest()[:32]
    return folder() / f"sm90-{kind}-{key}.o"


def load(path: Path) -> Kernel:
    import cutlass.cute as cute

    kernel: Kernel = getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)
    return kernel


def save(compiled: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
    os.close(handle)
    compiled.export_to_c(object_file_path=temporary, function_name=ENTRY)
    os.replace(temporary, path)


def build(kind: str, cfg: KernelConfig) -> Kernel:
    path = path_of(kind, cfg)
    if path.exists():
        try:
            return load(path)
        except Exception as error:  # a damaged file must not stop a run that can compile
            log.warning("cannot load %s (%s); compiling again", path, error)
    from .device.compile import COMPILERS

    kernel: Kernel = COMPILERS[kind](cfg)
    try:
        save(kernel, path)
    except OSError as error:
        log.warning("cannot keep %s (%s)", path, error)
    return kernel


def shared(cfg: KernelConfig) -> KernelConfig:
    """The config of the kernels before and after the main one. They depend on the tiles only."""
    return KernelConfig(cfg.columns, cfg.dtype)


@functools.cache
def side_kernel(kind: str, cfg: KernelConfig) -> Kernel:
    return build(kind, cfg)


@functools.cache
def kernels(cfg: KernelConfig) -> Kernels:
    """The kernels of a config. A process compiles them at most once, and not at all if the folder has them."""
    finish = None if cfg.last_finishes else side_kernel("finish", shared(cfg))
    return Kernels(side_kernel("prepare", shared(cfg)), build("main", cfg), finish)
