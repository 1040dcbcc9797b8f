"""The usual reasons why a run still differs, and whether they hold in this process.

`reasons()` looks at the process that calls it. From a shell it sees the environment. In a training script it also sees
what the script has set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from dash_attn.api.arguments import wants_determinism
from dash_attn.backends.sm90.forwards import VARIABLE as FORWARD
from dash_attn.watching.environment import float32_precisions

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """ok, info (cannot be seen from here, or a matter of choice), warn, or fail; and what to do about it."""

    name: str
    status: str
    found: str
    advice: str = ""


def reasons() -> list[Finding]:
    """Every reason that applies to this machine."""
    env = os.environ
    return [
        order(),
        other_operations(),
        forward(env),
        cublas(env),
        cudnn(),
        autotuning(env),
        precision(env),
        nccl(env),
        transformer_engine(env),
        machines(),
        threads(env),
        hashing(env),
        data(),
    ]


def order() -> Finding:
    name = "order of the attention backward"
    if wants_determinism(None):
        return Finding(name, "ok", "kept")
    return Finding(name, "warn", "FLASH_ATTENTION_DETERMINISTIC=0", "unset it, or pass deterministic=True")


def other_operations() -> Finding:
    name = "other operations of torch"
    if not torch.are_deterministic_algorithms_enabled():
        advice = "torch.use_deterministic_algorithms(True) in your script makes them deterministic, or errors"
        return Finding(name, "info", "not asked to be deterministic in this process", advice)
    if torch.is_deterministic_algorithms_warn_only_enabled():
        advice = (
            "leave warn_only out: torch's own attention, for one, stays as it is with it; dash_attn keeps order anyway"
        )
        return Finding(name, "warn", "deterministic, with warn_only", advice)
    return Finding(name, "ok", "deterministic")


def cublas(env: Environment) -> Finding:
    name, given = "cuBLAS workspace", env.get("CUBLAS_WORKSPACE_CONFIG")
    if given in (":4096:8", ":16:8"):
        return Finding(name, "ok", f"CUBLAS_WORKSPACE_CONFIG={given}")
    found = "CUBLAS_WORKSPACE_CONFIG is not set" if given is None else f"CUBLAS_WORKSPACE_CONFIG={given}"
    return Finding(name, _if_gpu("warn"), found, "CUBLAS_WORKSPACE_CONFIG=:4096:8, before CUDA starts")


def nccl(env: Environment) -> Finding:
    name, given = "NCCL", {key: env[key] for key in ("NCCL_ALGO", "NCCL_PROTO") if key in env}
    several = int(env.get("WORLD_SIZE") or 1) > 1 or torch.cuda.device_count() > 1
    if "NCCL_ALGO" in given:
        return Finding(name, "ok", " ".join(f"{key}={value}" for key, value in given.items()))
    advice = (
        "with several GPUs: NCCL_ALGO=Ring NCCL_PROTO=Simple, on the same nodes: else it chooses by size and topology"
    )
    return Finding(name, "warn" if several else "info", "NCCL_ALGO is not set", advice)


def cudnn() -> Finding:
    name = "cuDNN's choice of algorithms"
    if torch.backends.cudnn.benchmark:
        return Finding(name, "warn", "torch.backends.cudnn.benchmark is on", "turn it off: it chooses by time")
    return Finding(name, "ok", "torch.backends.cudnn.benchmark is off")


def autotuning(env: Environment) -> Finding:
    name, config = "autotuning of compiled code", sys.modules.get("torch._inductor.config")
    tuned = env.get("TORCHINDUCTOR_MAX_AUTOTUNE") == "1" or getattr(config, "max_autotune", False)
    pinned = env.get("TORCHINDUCTOR_DETERMINISTIC") == "1" or getattr(config, "deterministic", False)
    if tuned and not pinned:
        advice = "leave max-autotune out, or TORCHINDUCTOR_DETERMINISTIC=1: it chooses kernels by time"
        return Finding(name, "warn", "max-autotune is on", advice)
    if pinned:
        return Finding(name, "ok", "inductor is deterministic")
    advice = "with @triton.autotune kernels of your own: fix their config, or keep the tuned cache"
    return Finding(name, "info", "max-autotune is off in this process", advice)


def precision(env: Environment) -> Finding:
    name, given = "TF32", env.get("NVIDIA_TF32_OVERRIDE")
    lower = sorted({each for key, each in float32_precisions().items() if "matmul" in key and each != "ieee"})
    found = f"float32 products in {' and '.join(lower).upper() or 'float32'}"
    if given is not None:
        return Finding(name, "warn", f"{found}, NVIDIA_TF32_OVERRIDE={given}", "set it alike in both runs, or unset it")
    return Finding(name, "info", found, "repeats bit for bit either way, but must be the same in both runs")


def hashing(env: Environment) -> Finding:
    name, given = "hashes of Python", env.get("PYTHONHASHSEED")
    if given not in (None, "random"):
        return Finding(name, "ok", f"PYTHONHASHSEED={given}")
    return Finding(
        name, "info", "PYTHONHASHSEED is not set", "PYTHONHASHSEED=0 if the order of a set reaches your data or names"
    )


def data() -> Finding:
    return Finding(
        "order of the data",
        "info",
        "cannot be seen from here",
        "torch.manual_seed, and a DataLoader with generator= and worker_init_fn=, the same number of workers",
    )


def threads(env: Environment) -> Finding:
    name, given = "threads of torch on the CPU", env.get("OMP_NUM_THREADS")
    found = f"{torch.get_num_threads()}{'' if given is None else f', OMP_NUM_THREADS={given}'}"
    advice = "" if given else "OMP_NUM_THREADS the same in both runs: sums of torch's own may depend on it, ours do not"
    return Finding(name, "ok" if given else "info", found, advice)


def forward(env: Environment) -> Finding:
    name, given = "forward of the attention on GPUs", env.get(FORWARD)
    if given:
        return Finding(name, "ok", f"{FORWARD}={given}")
    advice = f"{FORWARD}=fa4 or flex pins it, whatever gets installed"
    found = "FlashAttention-4 if it is installed and takes the problem, else flex_attention"
    return Finding(name, "info", found, advice)


def transformer_engine(env: Environment) -> Finding:
    name, given = "Transformer Engine", env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if find_spec("transformer_engine") is None:
        return Finding(name, "ok", "not installed")
    if given == "0":
        return Finding(name, "ok", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
    return Finding(
        name, "warn", "installed, its own attention may add in any order", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
    )


def machines() -> Finding:
    found = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    if len(found) > 1:
        advice = "use one model in both runs: other models may compute products and exponentials otherwise"
        return Finding("GPU models", "warn", ", ".join(found), advice)
    return Finding("GPU models", "ok", found[0] if found else "none")


def _if_gpu(status: str) -> str:
    return status if torch.cuda.is_available() else "info"
