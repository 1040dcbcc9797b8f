"""Compiled kernels, kept in memory and on disk.

A file's key hashes what its machine code depends on: the config, the kernel's sources, and the compiler with its
libraries and settings.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from dash_attn.backends.sources import source_hash
from dash_attn.pack import Doc, Fold, PackedBundle, PackedChain, Part, Round, TileRows
from dash_attn.program import RUN_WIDTH, Chain, Run

from .config import KernelConfig
from .store import Store, Untrusted, discard

log = logging.getLogger(__name__)
ENTRY = "dash_attn_kernel"  # the function's name in a compiled file
OWN = "dash_attn-kernels"  # in the folder that the user names, which may hold other files
CONSTANTS = ("barriers.py", "config.py", "cta.py", "smem_plan.py")  # what device/*.py imports from this folder
COMPILER = ("nvidia-cutlass-dsl", "apache-tvm-ffi")  # how the names of its packages begin
SETTING = "CUTE_DSL_"  # how the compiler's environment variables begin
# Settings that change what the compiler prints, keeps or caches. Every other one may change the code.
HARMLESS = frozenset(
    {
        "CACHE_DIR",
        "DEBUG_LEAVES",
        "DISABLE_FILE_CACHING",
        "DUMP_DIR",
        "ENABLE_OPTIMIZATION_WARNINGS",
        "FILTER_STACKTRACE",
        "JIT_CACHE_MAX_ELEMS",
        "JIT_TIME_PROFILING",
        "KEEP",
        "KEEP_CUBIN",
        "KEEP_IR",
        "KEEP_PTX",
        "KEEP_SASS",
        "LOG_AUTOTUNE",
        "LOG_LEVEL",
        "LOG_TO_CONSOLE",
        "LOG_TO_FILE",
        "NO_CACHE",
        "PRINT_AFTER_PREPROCESSOR",
        "PRINT_IR",
        "SHOW_STACKTRACE",
        "VERIFY_TRACE",
        "WARNINGS_IGNORE",
    }
)

Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """The launches of one backward, in order."""

    prepare: Kernel
    main: Kernel
    finish: Kernel | None  # None if the last contributor finishes dQ
    finish_kv: Kernel | None = None  # None if chains are not cut


# ---- where kernels are kept --------------------------------------------------------------------------------


def folders() -> Iterator[Path]:
    """Where kernels may be kept, best place first. If the user names a folder, it is the only one.

    A Store removes files, so each of these folders has kernels only.
    """
    named, cache = os.environ.get("DASH_ATTN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if named:
        yield Path(named).absolute() / OWN
        return
    if os.path.isabs(cache):
        yield Path(cache) / "dash_attn"
    else:
        with suppress(RuntimeError):  # neither HOME nor an entry for this user
            yield Path.home() / ".cache" / "dash_attn"
    yield Path(tempfile.gettempdir()) / f"dash_attn-{os.geteuid()}"


def folder() -> Path:
    return next(folders())


def store() -> Store | None:
    """The first folder that can be trusted; None, with a warning, if there is none."""
    reasons = []
    for place in folders():
        try:
            usable = Store.at(place)
        except (OSError, Untrusted) as error:
            reasons.append(str(error))
            continue
        if reasons:
            warn_once(f"kernels are kept in {place}: {'; '.join(reasons)}")
        return usable
    warn_once(f"kernels are not kept, each process compiles its own: {'; '.join(reasons)}")
    return None


@functools.cache
def warn_once(message: str) -> None:
    log.warning("%s", message)


# ---- what the machine code depends on ----------------------------------------------------------------------


def kernel_sources() -> list[Path]:
    """The files that fix the machine code: the kernels, and the constants and tables that they read."""
    here = Path(__file__).parent
    return [*here.glob("device/*.py"), *(here / name for name in CONSTANTS)]


def toolchain() -> str:
    """Hash of the kernel's sources, of the columns that it reads, and of the compiler and its settings."""
    return hashlib.sha256("\n".join((sources(), packages(), *settings())).encode()).hexdigest()


@functools.cache
def sources() -> str:
    tables = (Chain, Run, Doc, Round, PackedBundle, PackedChain, TileRows, Fold, Part)
    columns = [(column.name, column.value) for table in tables for column in table]
    return f"{source_hash(kernel_sources())} {columns} {('RUN_WIDTH', RUN_WIDTH)}"


@functools.cache
def packages() -> str:
    """The compiler's packages, its libraries among them, with their versions."""
    return " ".join(sorted({f"{each.name} {each.version}" for each in distributions() if is_compiler(each.name or "")}))


def is_compiler(package: str) -> bool:
    return package.lower().replace("_", "-").startswith(COMPILER)


def settings() -> list[str]:
    """The compiler's settings in the environment that may change the code."""
    names = sorted(name for name in os.environ if name.startswith(SETTING))
    return [f"{name}={os.environ[name]}" for name in names if name.removeprefix(SETTING) not in HARMLESS]


def assembler() -> tuple[int, int]:
    """The version of CUDA whose assembler the kernel compiler has. Another one makes other machine code."""
    import cutlass

    return cutlass.CUDA_VERSION.major, cutlass.CUDA_VERSION.minor


def key_of(kind: str, cfg: KernelConfig) -> str:
    return f"sm90-{kind}-{hashlib.sha256(f'{toolchain()} {kind} {cfg!r}'.encode()).hexdigest()[:32]}"


# ---- kernels -----------------------------------------------------------------------------------------------


def compile_kernel(kind: str, cfg: KernelConfig, options: str = "") -> Kernel:
    from .device.compile import COMPILERS

    with warnings.catch_warnings():
        # A tuple without tensors gives the kernel no argument, and that is meant.
        warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument", UserWarning)
        kernel: Kernel = COMPILERS[kind](cfg, options)
    return kernel


def export(compiled: Any, path: Path) -> None:
    compiled.export_to_c(object_file_path=str(path), function_name=ENTRY)


def load(path: Path) -> Kernel:
    import cutlass.cute as cute

    kernel: Kernel = getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)
    return kernel


def kept(place: Store, key: str) -> Kernel | None:
    path = place.find(key)
    if path is None:
        return None
    try:
        return load(path)
    except Exception as error:  # a file that cannot be loaded must not stop a run that can compile
        log.warning("cannot load %s (%s); compiling again", path, error)
        discard(path)
        return None


def build(kind: str, cfg: KernelConfig) -> Kernel:
    """Load a kernel, or compile and keep it. Processes that want the same kernel at once compile it once."""
    place, key = store(), key_of(kind, cfg)
    if place is None:
        return compile_kernel(kind, cfg)
    kernel = kept(place, key)
    if kernel is not None:
        return kernel
    with place.locked(key):
        kernel = kept(place, key)  # the process that held the lock before may have made it
        if kernel is not None:
            return kernel
        kernel = compile_kernel(kind, cfg)
        try:
            place.keep(key, functools.partial(export, kernel))
        except Exception as error:  # a full disk must not stop a run that has its kernel
            log.warning("cannot keep %s in %s (%s)", key, place.folder, error)
    return kernel


def shared(cfg: KernelConfig) -> KernelConfig:
    """The config of the kernels before and after the main one. They depend on the tiles, and on where these lie."""
    return KernelConfig(cfg.columns, cfg.dtype, cut=cfg.cut, packed=cfg.packed)


@functools.cache
def side_kernel(kind: str, cfg: KernelConfig) -> Kernel:
    return build(kind, cfg)


@functools.cache
def kernels(cfg: KernelConfig, folds: bool = False) -> Kernels:
    """The kernels of a config. A process compiles them at most once, and not at all if the folder has them.

    With `folds` the last kernel sums dK and dV over panels before it rounds them.
    """
    finish = None if cfg.last_finishes else side_kernel("finish", replace(shared(cfg), cut=False))
    finish_kv = side_kernel("fold_kv" if folds else "finish_kv", shared(cfg)) if cfg.cut else None
    return Kernels(side_kernel("prepare", shared(cfg)), build("main", cfg), finish, finish_kv)
