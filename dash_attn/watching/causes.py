"""What usually makes an operation differ, held against the environments of two records.

The reasons are those of docs/why_does_my_run_differ.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dash_attn.watching.difference import Difference
from dash_attn.watching.files import Environment

ARITHMETIC = ("forward", "recompute", "backward", "gradient", "update")
# The library and the operation that each of these settings is for.
FLOAT32 = {
    f"float32 precision of {library} {operation}": (library, operation)
    for library in ("cuda", "mkldnn")
    for operation in ("matmul", "conv", "rnn")
}


@dataclass(frozen=True)
class Cause:
    """A usual reason. `seen` if the records show that the runs differ in it, else it is only possible."""

    name: str
    evidence: str
    advice: str
    seen: bool = False


@dataclass(frozen=True)
class Question:
    """A difference and the environments of both runs."""

    difference: Difference
    a: Environment
    b: Environment

    def both(self, name: str) -> tuple[Any, Any]:
        """A fact or a variable of both runs."""
        return self._fact(self.a, name), self._fact(self.b, name)

    def is_on_gpu(self) -> bool:
        return self.a.get("CUDA") is not None and self.a.get("cuDNN") is not None

    def may_be_attention(self) -> bool:
        """Is the operation in the own code of a module, or in a module called after attention?"""
        return "own code" in self.difference.operation or "att" in self.difference.row.module.lower()

    @staticmethod
    def _fact(env: Environment, name: str) -> Any:
        return env[name] if name in env else env.get("variables", {}).get(name)


def causes(difference: Difference, a: Environment, b: Environment) -> list[Cause]:
    """Reasons that fit the difference, those that the records show first."""
    question = Question(difference, a, b)
    fitting = [cause for ask in QUESTIONS for cause in ask(question)]
    return sorted(fitting, key=lambda cause: not cause.seen)


def beginning(question: Question) -> Iterator[Cause]:
    for name, step in question.difference.generators:
        # Python and numpy seed themselves by chance: only a script that draws from them has to seed them.
        own = name.startswith("torch")
        if step == 0:
            yield Cause("a seed", f"the random state of {name} differs from the start", "seed it alike", seen=own)
        elif step == question.difference.first_common:
            evidence = f"that of {name} differs in step {step}, the first one of both records"
            advice = "load it from the checkpoint; if neither run was resumed, seed it alike and record earlier steps"
            yield Cause("a random state that was not loaded", evidence, advice, seen=own)
        else:
            advice = "look for code that draws in one run and not in the other, or another number of times"
            yield Cause("random draws", f"the random state of {name} differs from step {step} on", advice, seen=True)
    if question.difference.topic == "weights":
        yield Cause("initial weights", "they differ before any step", "torch.manual_seed before the model is made")
        yield Cause("a checkpoint", "weights may come from one", "load the same file in both runs")
    if question.difference.topic == "between":
        advice = "look for clipping, averaging or loading of weights after the step, and give watch every optimizer"
        yield Cause("the script", "weights or buffers are written between two steps", advice)
    if question.difference.topic == "earlier":
        yield Cause("an earlier step", "the records begin after it", "record earlier steps in both runs")


def data(question: Question) -> Iterator[Cause]:
    if question.difference.topic != "data":
        return
    form, other = question.difference.form, question.difference.other_form
    if form != other:
        advice = "pad and pack alike: another shape may give other bits in every operation"
        yield Cause("padding or packing", f"{form} in one run, {other} in the other", advice, seen=True)
    advice = "give the sampler its own seeded generator; after a restart continue where it stopped"
    yield Cause("the order of samples", "the batches differ, and nothing before them does", advice)
    advice = "give the DataLoader generator= and worker_init_fn=, and the same number of workers"
    yield Cause("workers of a DataLoader", "augmentation uses their random states", advice)


def structure(question: Question) -> Iterator[Cause]:
    if question.difference.topic == "structure":
        advice = "compare the models and their inputs: a branch, an expert or a layer was left out"
        yield Cause("another path through the model", "one run calls what the other does not", advice)


def settings(question: Question) -> Iterator[Cause]:
    """Facts that must be the same in both runs."""
    if question.difference.topic not in (*ARITHMETIC, "reduce"):
        return
    for name, advice in SAME.items():
        first, second = question.both(name)
        if first != second:
            yield Cause(name, f"{_text(first)} in one run, {_text(second)} in the other", advice, seen=True)


def hyperparameters(question: Question) -> Iterator[Cause]:
    """Inputs of the update that differ."""
    if given := question.difference.settings:
        evidence = f"{len(given)} setting{' differs' if len(given) == 1 else 's differ'}"
        advice = "give the optimizer and its schedule the same arguments in both runs"
        yield Cause("another learning rate, betas or schedule", evidence, advice, seen=True)


def resumed(question: Question) -> Iterator[Cause]:
    """What a run that goes on from a checkpoint may not have loaded. For random states see `beginning`."""
    difference = question.difference
    if not 0 < difference.step == difference.first_common:
        return
    if difference.topic == "update":  # after which alone the state of an optimizer is recorded
        advice = "load it from the checkpoint, or record the step before in both runs"
        yield Cause("the state of the optimizer", "before the first common step it is not compared", advice)
    if difference.topic == "earlier":
        evidence = f"they differ before step {difference.step}, the first one of both records"
        advice = "if a run was resumed: load all of them, from the checkpoint of the other run, and do not change them"
        yield Cause("weights or buffers that were not loaded", evidence, advice)


def operations(question: Question) -> Iterator[Cause]:
    """What changes from run to run with equal settings."""
    if question.difference.topic not in ARITHMETIC:
        return
    strict, warn = question.both("deterministic algorithms")[0], question.both("warn_only")[0]
    if not strict or warn:
        state = "only warn" if warn else "are not asked for"
        advice = "torch.use_deterministic_algorithms(True) raises at such an operation and names it"
        yield Cause("atomic additions", f"deterministic algorithms {state} (index_add, scatter_add, ...)", advice)
    if question.both("FLASH_ATTENTION_DETERMINISTIC")[0] == "0":
        yield Cause("attention in any order", "FLASH_ATTENTION_DETERMINISTIC=0", "unset it")
    elif question.difference.topic == "backward" and question.may_be_attention():
        advice = "deterministic=True, or dash_attn.attention, which keeps the order by default"
        yield Cause("attention in any order", "most libraries add dQ as it comes, by default", advice)
    if question.is_on_gpu() and question.both("CUBLAS_WORKSPACE_CONFIG")[0] not in (":4096:8", ":16:8"):
        advice = "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, before the first product"
        yield Cause("cuBLAS", "CUBLAS_WORKSPACE_CONFIG is not set", advice)
    if question.both("cudnn.benchmark")[0]:
        yield Cause("cuDNN times its algorithms", "cudnn.benchmark is on", "torch.backends.cudnn.benchmark = False")
    tuned = question.both("max_autotune")[0] or question.both("TORCHINDUCTOR_MAX_AUTOTUNE")[0] == "1"
    if tuned and question.both("TORCHINDUCTOR_DETERMINISTIC")[0] != "1":
        yield Cause("autotuning", "max-autotune is on", "pin the configuration, or keep the tuned cache")
    if question.both("compiled")[0]:
        advice = "compare compiled runs with compiled runs, with the same cache"
        yield Cause("torch.compile", "inductor adds gradients of equal tokens with atomics", advice)
    if question.difference.topic == "recompute":
        advice = "preserve_rng_state=True, and no atomics in what is computed again"
        yield Cause("gradient checkpointing", "the forward was equal, its repetition is not", advice)
    advice = "look for torch.empty, custom kernels, and code that reads before it writes"
    yield Cause("uninitialised memory or a race", "possible in every kernel outside torch", advice)


def reductions(question: Question) -> Iterator[Cause]:
    if question.difference.topic not in ("reduce", "gradient"):
        return
    if (question.both("world size")[0] or 1) > 1:
        given = question.both("NCCL_ALGO")[0]
        if question.both("backend of torch.distributed")[0] != "gloo" and given is None:
            advice = "NCCL_ALGO=Ring NCCL_PROTO=Simple: else NCCL chooses by size and topology"
            yield Cause("NCCL's algorithm", "NCCL_ALGO is not set", advice)
        advice = "the gradients of each process are equal, their sum is not: fix buckets and the number of processes"
        yield Cause("the reduction over processes", "it stands between backward and update", advice)
    advice = "clip_grad_norm_ and GradScaler change all gradients if one differs: look at other processes first"
    yield Cause("clipping or scaling", "it stands between backward and update", advice)


QUESTIONS: tuple[Callable[[Question], Iterator[Cause]], ...] = (
    resumed,
    beginning,
    data,
    structure,
    hyperparameters,
    settings,
    reductions,
    operations,
)

SAME = {
    "torch": "another version has other kernels",
    "CUDA": "another version has other kernels",
    "cuDNN": "another version has other kernels",
    "device": "another model has other kernels",
    "world size": "gradients are summed in other groups",
    "backend of torch.distributed": "use the same",
    "threads": "torch's sums on a CPU depend on it: OMP_NUM_THREADS the same in both runs",
    "deterministic algorithms": "set it alike",
    "warn_only": "set it alike",
    "cudnn.benchmark": "set it alike",
    **dict.fromkeys(FLOAT32, "TF32 has other bits: set it alike"),
    "compiled": "compiled code rounds differently: compare compiled runs with compiled runs",
    "max_autotune": "set it alike",
    "CUBLAS_WORKSPACE_CONFIG": "set it alike",
    "DASH_ATTN_FORWARD": "set it alike",
    "FLASH_ATTENTION_DETERMINISTIC": "set it alike",
    "NCCL_ALGO": "set it alike",
    "NCCL_NVLS_ENABLE": "set it alike",
    "NCCL_PROTO": "set it alike",
    "NVIDIA_TF32_OVERRIDE": "set it alike",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "set it alike",
    "OMP_NUM_THREADS": "set it alike",
    "TORCHINDUCTOR_DETERMINISTIC": "set it alike",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "set it alike",
}


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)
