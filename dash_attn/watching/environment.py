"""What a record keeps of its surroundings: versions, settings and variables that can change bits, and random states."""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist

from dash_attn.watching.causes import FLOAT32
from dash_attn.watching.files import Environment

# Variables of the environment that can change bits. No other variable is kept.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "DASH_ATTN_FORWARD",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
)


def rank() -> int:
    return dist.get_rank() if distributed() else int(os.environ.get("RANK") or 0)


def world_size() -> int | None:
    """The number of processes of this run. None if it is not known."""
    if distributed():
        return dist.get_world_size()
    given = os.environ.get("WORLD_SIZE")
    return int(given) if given else None if os.environ.get("RANK") else 1


def environment() -> Environment:
    """Facts of this process, as JSON values."""
    inductor = sys.modules.get("torch._inductor.config")
    return {
        "world size": dist.get_world_size() if distributed() else 1,
        "backend of torch.distributed": dist.get_backend() if distributed() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        **float32_precisions(),
        "max_autotune": bool(getattr(inductor, "max_autotune", False)),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def float32_precisions() -> dict[str, str]:
    """How float32 is computed: ieee, tf32 or bf16. torch.get_float32_matmul_precision() raises if a script has used the
    newer settings, and torch.backends.cudnn.rnn has none of them in torch 2.9."""
    return {name: _precision(*setting) for name, setting in FLOAT32.items()}


def _precision(library: str, operation: str) -> str:
    try:
        given: str = torch._C._get_fp32_precision_getter(library, operation)
    except (AttributeError, RuntimeError):  # torch without this setting
        return "not known"
    return "ieee" if given == "none" else given


def random_states(device: torch.device) -> Iterator[tuple[str, int]]:
    """Digests of the states of the generators that scripts share. Reading them does not wait for a GPU."""
    yield "torch on the CPU", _digest(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        yield "torch on the GPU", _digest(torch.cuda.get_rng_state(device).numpy().tobytes())
    _, words, gauss = random.getstate()
    yield "Python's random", _digest(f"{hash(words)} {gauss}".encode())
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    if "key" in inner:  # numpy's own choice, whose state is long
        yield "numpy.random", _digest(inner["key"].tobytes() + f"{inner['pos']} {state['gauss']}".encode())
    else:
        yield "numpy.random", _digest(repr(state).encode())


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def compiled_frames() -> int:
    """How many frames torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"].get("ok", 0)) if dynamo else 0
