"""Compiled kernels, kept in memory and on disk.

A file's name hashes all that its machine code depends on: the config, this package's sources and the compiler's
version. Files appear by renaming, so that processes may share a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .config import KernelConfig

log = logging.getLogger(__name__)
ENTRY = "dash_attn_kernel"


class Kernels(NamedTuple):
    prepare: Any
    main: Any
    finish: Any  # None where the last contributor finishes dQ


def folder() -> Path:
    root = os.environ.get("DASH_ATTN_CACHE_DIR")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dash_attn"


@functools.lru_cache(None)
def toolchain() -> str:
    """Hash of the sources in this folder and of the compiler's versions."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\\0" + path.read_bytes())
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(f"{package} unknown".encode())
    return digest.hexdigest()


def path_of(kind: str, cfg: KernelConfig) -> Path:
    key = hashlib.sha256(f"{toolchain()} {kind} {cfg!r}".encode()).hexdigest()[:32]
    return folder() / f"sm90-{kind}-{key}.o"


def load(path: Path):
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)


def save(fn, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
    os.close(handle)
    fn.export_to_c(object_file_path=temporary, function_name=ENTRY)
    os.replace(temporary, path)


def build(kind: str, cfg: KernelConfig):
    path = path_of(kind, cfg)
    if path.exists():
        try:
            return load(path)
        except Exception as error:  # a damaged file must not stop a run that can compile
            log.warning("cannot load %s (%s); compiling again", path, error)
    from .device.compile import COMPILERS

    fn = COMPILERS[kind](cfg)
    try:
        save(fn, path)
    except OSError as error:
        log.warning("cannot keep %s (%s)", path, error)
    return fn


def shared(cfg: KernelConfig) -> KernelConfig:
    """The part of a config that the side kernels depend on."""
    return KernelConfig(cfg.dim, cfg.tile_m, cfg.tile_n, cfg.dtype, head_dim=cfg.head_dim)


@functools.lru_cache(None)
def side_kernel(kind: str, cfg: KernelConfig):
    return build(kind, cfg)


@functools.lru_cache(None)
def kernels(cfg: KernelConfig) -> Kernels:
    """The launches of one backward, compiled at most once per process and, with a warm folder, not at all."""
    cfg = dataclasses.replace(cfg).validate()
    finish = None if cfg.last_finishes else side_kernel("finish", shared(cfg))
    return Kernels(side_kernel("prepare", shared(cfg)), build("main", cfg), finish)
