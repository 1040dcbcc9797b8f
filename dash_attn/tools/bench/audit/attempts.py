"""Attempts to break what the package promises on a CPU and in its folder of kernels.

A kind of attempt is a generator. It yields the outcome of every attempt, without end. An outcome with WRONG in it
breaks a promise.
"""

from __future__ import annotations

import _thread
import hashlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from dash_attn.backends import Operands, Options
from dash_attn.backends.sm90 import store
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tools.bench.audit.compare import differences
from dash_attn.tools.bench.audit.mutations import Outcomes, mutations
from dash_attn.tools.bench.audit.whole import Bits
from dash_attn.tools.bench.operands import Drawn, draw

Attempts = Callable[[int], Outcomes]  # with the seed of what is random
CPU = torch.device("cpu")
SMALL = Problem(1, 4, 2, 300, 300, 16, "float32", mask=CAUSAL)
ENDING = 1.0  # seconds after which a thread counts as left behind
IGNORED = 3  # exit status of a forked child with an error in a handler of forks
HANG = 20  # seconds after which a forked child counts as hung


def step(problem: Problem, drawn: Drawn) -> Bits:
    """Forward and backward of a problem on the CPU."""
    prepared = prepare(problem, "auto", Options(), CPU)
    dout, q, k, v = drawn
    out, lse = prepared.forward(q, k, v)
    return Bits(out, lse, *prepared.backward(Operands(dout, q, k, v, out, lse)))


def differing(got: Bits, want: Bits) -> str:
    """The names of the tensors that differ."""
    return ", ".join(differences(got, want, Bits._fields))


# ---- threads and layouts -----------------------------------------------------------------------------------


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_a_pack(x: Tensor) -> Tensor:
    """The middle of a tensor (batch, seqlen, 3, heads, dim)."""
    return torch.stack((x.neg(), x, x.neg()), 2)[:, :, 1]


def one_number_later(x: Tensor) -> Tensor:
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


def dims_first(x: Tensor) -> Tensor:
    return x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)


LAYOUTS = (heads_first, in_a_pack, one_number_later, dims_first)
MASKS = (FULL, CAUSAL, window(100, 20))


def settings(seed: int) -> Outcomes:
    """Random problems with other numbers of torch's threads and other layouts of the operands."""
    before = torch.get_num_threads()
    for number in count():
        rng = random.Random(seed + number)
        length, heads = rng.choice((17, 40, 130, 529)), rng.choice((1, 2))
        mask = rng.choice((*MASKS, documents([0, length // 3, length], causal=True)))
        sizes = (rng.choice((1, 2)) if mask.documents is None else 1, 2 * heads, heads, length, length)
        dtype = rng.choice(("float32", "bfloat16"))
        problem = Problem(*sizes, rng.choice((33, 64)), dtype, mask=mask)
        drawn = draw(problem, CPU, seed + number)
        try:
            torch.set_num_threads(1)
            want = step(problem, drawn)
            torch.set_num_threads(rng.choice((2, 4, 16)))
            layout = rng.choice(LAYOUTS)
            apart = differing(step(problem, Drawn(*(layout(x) for x in drawn))), want)
        finally:
            torch.set_num_threads(before)
        yield f"WRONG: {apart} of {problem}, {layout.__name__}" if apart else "same bits"


# ---- interrupts and forks ----------------------------------------------------------------------------------


def threads_of_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def threads_left(before: int) -> int:
    """How many threads more than before there are. A thread that is over may need a moment to end."""
    deadline = time.monotonic() + ENDING
    while (left := _thread._count() - before) > 0 and time.monotonic() < deadline:
        time.sleep(1e-4)
    return max(left, 0)  # another thread may have ended meanwhile


def interrupts(seed: int) -> Outcomes:
    """Ctrl-C at a random time of a step. It leaves no thread and no setting behind, and the next step is right."""
    drawn, threads = draw(SMALL, CPU), torch.get_num_threads()
    want, seconds = step(SMALL, drawn), _seconds(lambda: step(SMALL, drawn))
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does, and a timer can send this signal
    for number in count():
        apart, outcome, others = "", "interrupted", _thread._count()
        try:
            signal.setitimer(signal.ITIMER_REAL, random.Random(seed + number).uniform(1e-5, 1.1 * seconds))
            try:
                apart, outcome = differing(step(SMALL, drawn), want), "over before the interrupt"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        if left := threads_left(others):
            outcome = f"WRONG: {left} threads are left"
        elif {torch.get_num_threads(), threads_of_a_new_thread()} != {threads}:
            outcome = "WRONG: another number of threads"
        elif not torch.is_grad_enabled():
            outcome = "WRONG: autograd is off"
        elif apart or (apart := differing(step(SMALL, drawn), want)):
            outcome = f"WRONG: {apart} of a run"
        yield outcome


def forks(seed: int) -> Outcomes:
    """Children that are forked while another thread starts workers. Each of them computes the right bits."""
    drawn, over = draw(SMALL, CPU), threading.Event()
    want, seconds = step(SMALL, drawn), _seconds(lambda: step(SMALL, drawn))

    def compute() -> None:
        while not over.is_set():
            step(SMALL, drawn)

    def child() -> int:
        return 1 if differing(step(SMALL, drawn), want) else 0

    other = threading.Thread(target=compute, daemon=True)
    other.start()
    try:
        for number in count():
            time.sleep(random.Random(seed + number).uniform(0, seconds))
            with ignored_errors() as ignored:
                status = _forked(lambda: IGNORED if ignored else child())
            words = {
                0: "computes",
                1: "WRONG: other bits",
                IGNORED: "WRONG: an error in a handler of forks, in the child",
                -signal.SIGALRM: "WRONG: hangs",
            }
            outcome = words.get(status, f"WRONG: exit status {status}")
            yield f"WRONG: {ignored[0]!r} in a handler of forks" if ignored else outcome
    finally:
        over.set()
        other.join()


@contextmanager
def ignored_errors() -> Iterator[list[BaseException | None]]:
    """The errors that Python would print and ignore meanwhile, as it does in handlers of forks."""
    errors, before = list[BaseException | None](), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: errors.append(unraisable.exc_value)
    try:
        yield errors
    finally:
        sys.unraisablehook = before


def _forked(work: Callable[[], int]) -> int:
    """The exit status of a forked child, or minus the number of the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads is what is tried
        child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANG)
            status = work()
        finally:  # the child must not come back to the caller
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of a few runs: what is tried while a run lasts must not come after it."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


# ---- the folder of kernels ---------------------------------------------------------------------------------


def flip_a_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut_off(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def append(file: Path, rng: random.Random) -> None:
    with file.open("ab") as end:
        end.write(rng.randbytes(rng.randrange(1, 100)))


def take_the_place(file: Path, rng: random.Random) -> None:
    """Other code under the name of this one."""
    file.write_bytes(rng.randbytes(file.stat().st_size))


def link_to_it(file: Path, rng: random.Random) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def let_others_write(file: Path, rng: random.Random) -> None:
    file.chmod(0o600 | rng.choice((0o020, 0o002, 0o022)))


DAMAGES = (*[flip_a_bit] * 10, cut_off, append, take_the_place, link_to_it, let_others_write)


def _write(code: bytes, path: Path) -> None:
    path.write_bytes(code)


def damage(seed: int) -> Outcomes:
    """Files of a folder of kernels, damaged or opened to others. None is loaded, and each whole file is."""
    logging.getLogger(store.__name__).setLevel(logging.ERROR)  # a warning for each would be thousands
    with tempfile.TemporaryDirectory(prefix="dash_attn_kernels_") as folder:
        kept, code = store.Store.at(Path(folder) / "kernels"), random.Random(seed).randbytes(20_000)
        kept.keep("key", partial(_write, code))
        whole = kept.find("key")
        assert whole is not None and hashlib.sha256(code).hexdigest() in whole.name
        for number in count():
            rng = random.Random(seed + number)
            spoil = rng.choice(DAMAGES)
            spoil(whole, rng)
            loaded = kept.find("key")
            whole.unlink(missing_ok=True)
            whole.write_bytes(code)
            whole.chmod(0o600)
            if loaded is not None:
                yield f"WRONG: loaded after {spoil.__name__}"
            elif kept.find("key") != whole:
                yield "WRONG: a whole file is refused"
            else:
                yield f"{spoil.__name__}: refused"


KINDS: dict[str, Attempts] = {
    "mutations": mutations,
    "settings": settings,
    "interrupts": interrupts,
    "forks": forks,
    "damage": damage,
}
