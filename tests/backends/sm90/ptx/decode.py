"""Turns the instructions of a kernel into functions that a warp runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.backends.sm90.ptx import bulk, meetings, moves, products
from tests.backends.sm90.ptx.lanes import computing
from tests.backends.sm90.ptx.memory import Bools, Fault
from tests.backends.sm90.ptx.operands import Act, Get, Operands, Then
from tests.backends.sm90.ptx.text import Instruction
from tests.backends.sm90.ptx.warp import Group, Warp

Step = Callable[[Warp], bool]  # False if other warps have their turn

# The machine has no caches, any number of registers, and one order of all accesses to registers and global memory.
NOTHING = (
    "prefetch.tensormap",
    "setmaxnreg.",
    "fence.mbarrier_init",
    "fence.proxy.async.global",
    "wgmma.fence",
    "bar.warp.sync",
)
# The first beginning that fits. Every maker takes the operands of the kernel, the name, and those of the instruction.
MAKERS: dict[str, Callable[..., Act]] = {
    "ld.param": moves.load_param,
    "ld.shared": moves.load_shared,
    "st.shared": moves.store_shared,
    "ld.": moves.load_global,
    "st.global": moves.store_global,
    "red.release.gpu.global.add.s32": lambda at, op, where, by: moves.add_global(at, None, where, by),
    "atom.global.add.u32": lambda at, op, *rest: moves.add_global(at, *rest),
    "shfl.sync": moves.shuffle,
    "elect.sync": moves.elect,
    "vote.sync.ballot": moves.ballot,
    "bar.": meetings.meet,
    "fence.proxy.async.shared": meetings.fence,
    "mbarrier.init": meetings.init,
    "mbarrier.arrive.": meetings.arrive,
    "mbarrier.try_wait.parity": meetings.test,
    "mbarrier.test_wait.parity": meetings.test,
    "wgmma.mma_async": products.product,
    "wgmma.commit_group": products.commit,
    "wgmma.wait_group": products.await_groups,
    "ldmatrix": products.load_matrices,
    "stmatrix": products.store_matrices,
    "cp.async.bulk.commit_group": bulk.commit,
    "cp.async.bulk.wait_group": bulk.await_groups,
    "cp.async.bulk.tensor": bulk.copy_tile,
    "cp.async.bulk.": bulk.copy,
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": bulk.copy,
}


def is_for_all(op: str) -> bool:
    """Whether all lanes of a warp execute the instruction together."""
    return ".sync" in op or op.startswith("bar.")


def step(at: Operands, each: Instruction) -> Step:
    guard = None if each.guard is None else at.get(each.guard.name, np.bool_)
    negated = each.guard is not None and each.guard.negated
    if each.op in ("bra", "bra.uni"):
        return _branch(at.text.labels[each.operands[0]], guard, negated)
    if each.op == "ret":
        assert guard is None
        return _end
    act = _act(at, each)
    if guard is None:

        def plain(warp: Warp) -> bool:
            then = act(warp, warp.lanes)
            warp.at += then is not Then.AGAIN
            return then is Then.GO_ON

        return plain

    together = is_for_all(each.op)

    def guarded(warp: Warp) -> bool:
        lanes = warp.lanes & (guard(warp) ^ negated)
        if together and lanes.any() and not lanes.all():
            raise Fault(f"{each.op} runs in some lanes of a warp")
        then = act(warp, lanes) if lanes.any() else Then.GO_ON
        warp.at += then is not Then.AGAIN
        return then is Then.GO_ON

    return guarded


def _act(at: Operands, each: Instruction) -> Act:
    op, operands = each.op, each.operands
    if op.startswith(NOTHING):
        return _nothing
    if op.startswith("mov.") and any(x.startswith("{") for x in operands):
        return moves.halves(at, op, *operands)
    compute = computing("mov.b64" if op == "cvta.param.u64" else op)
    if compute is not None:
        return moves.computed(at, compute, operands)
    for begin, make in MAKERS.items():
        if op.startswith(begin):
            return make(at, op, *operands)
    raise Fault(f"the machine does not know {op}")


def _nothing(warp: Warp, lanes: Bools) -> Then:
    return Then.GO_ON


def _branch(target: int, guard: Get | None, negated: bool) -> Step:
    def always(warp: Warp) -> bool:
        warp.at = target
        return True

    def branch(warp: Warp) -> bool:
        assert guard is not None
        taken = warp.lanes & (guard(warp) ^ negated)
        if not taken.any():
            warp.at += 1
        elif (taken == warp.lanes).all():
            warp.at = target
        else:
            warp.parked.append(Group(target, taken))
            warp.lanes, warp.at = warp.lanes & ~taken, warp.at + 1
        return True

    return always if guard is None else branch


def _end(warp: Warp) -> bool:
    if warp.parked:
        raise Fault("lanes of a warp end at different places")
    if warp.products or any(held.open for held in warp.copies.values()):
        raise Fault("a warp ends before its products or copies are waited for")
    warp.is_done = True
    warp.world.progress += 1
    return False
