"""The machine itself, with kernels of a few instructions."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.sm90.ptx.kernels import bound
from tests.backends.sm90.ptx.lanes import bits, computing
from tests.backends.sm90.ptx.machine import Chance, Machine
from tests.backends.sm90.ptx.memory import Fault, Global
from tests.backends.sm90.ptx.text import read
from tests.backends.sm90.ptx.warp import World

KERNEL = """
.visible .entry k(
    .param .align 8 .b8 out[16]
)
.reqntid THREADS, 1, 1
{
    .reg .b32 %r<20>;
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.eq.s32 %p1, %r1, 0;
    mov.b32 %r15, __dynamic_shmem__0;
BODY
    ret;
}
"""
LATE, SOON = Chance(0, eagerness=0.0), Chance(0, eagerness=1.0)


def run(body: str, threads: int = 32, chance: Chance = LATE, words: int = 64, ctas: int = 1) -> list[int]:
    """The words that a kernel writes. Before it all of them are 77."""
    text = read(KERNEL.replace("THREADS", str(threads)).replace("BODY", body))
    out, memory = torch.full((words,), 77, dtype=torch.int32), Global()
    memory.add(out)
    Machine(text, dict(bound(text, [out])), World(memory, (), Random(chance.seed)), chance).launch(
        (ctas, 1, 1), ctas, 4096
    )
    return out.tolist()


def test_lanes_store_to_global_memory() -> None:
    assert run("mul.lo.s32 %r2, %r1, 3; st.global.b32 [%rd3], %r2;")[:33] == [*range(0, 96, 3), 77]


def test_lanes_that_part_meet_again() -> None:
    body = """
    and.b32 %r2, %r1, 1;
    setp.ne.b32 %p2, %r2, 0;
    @%p2 bra $ODD;
    mov.b32 %r3, 10;
    bra.uni $BOTH;
$ODD:
    mov.b32 %r3, 20;
$BOTH:
    shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
    st.global.b32 [%rd3], %r4;
    """
    assert run(body)[:32] == [20, 10] * 16


def test_a_block_has_names_of_its_own() -> None:
    block = "{ .reg .pred p; setp.eq.b32 p, %r1, 0; @p bra.uni DONE; add.s32 %r3, %r3, 1; DONE: }"
    assert run(f"mov.b32 %r3, 5; {block} {block} st.global.b32 [%rd3], %r3;")[:3] == [5, 7, 7]


@pytest.mark.parametrize("body", ["st.global.b32 [%rd3+256], %r1;", "ld.global.b32 %r2, [%rd3+-128];"])
def test_what_is_not_in_a_tensor_is_a_fault(body: str) -> None:
    with pytest.raises(Fault, match="not in a tensor"):
        run(body)


def test_a_misaligned_address_is_a_fault() -> None:
    with pytest.raises(Fault, match="misaligned"):
        run("add.s32 %r2, %r15, 4; st.shared.v2.b32 [%r2], {%r1, %r1};")


WAIT = """
{ .reg .pred P1;
LAB: mbarrier.try_wait.parity.shared.b64 P1, [%r15], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB;
DONE: }
"""


@pytest.mark.parametrize(("arrivals", "hangs"), [(1, False), (2, True)])
def test_a_wait_without_arrivals_hangs(arrivals: int, hangs: bool) -> None:
    """The first thread of two warps arrives, and both warps wait for the end of the phase."""
    body = f"""
    mov.b32 %r2, {arrivals};
    @%p1 mbarrier.init.shared.b64 [%r15], %r2;
    bar.sync 0;
    @!%p1 bra $WAIT;
    mov.b32 %r3, 1;
    mbarrier.arrive.shared.b64 %rd4, [%r15], %r3;
$WAIT: {WAIT}
    st.global.b32 [%rd3], %r1;
    """
    if hangs:
        with pytest.raises(Fault, match=r"hangs: CTA 0 warp . at mbarrier\.try_wait"):
            run(body, threads=64)
    else:
        assert run(body, threads=64) == list(range(64))


def staged(fence: str, wait: str) -> str:
    """Stores to shared memory, copies from there to global memory, and stores there again."""
    return f"""
    shl.b32 %r2, %r1, 2;
    add.s32 %r3, %r15, %r2;
    st.shared.b32 [%r3], %r1;
    {fence}
    bar.warp.sync -1;
    @!%p1 bra $END;
    mov.b32 %r5, 128;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r15], %r5;
    cp.async.bulk.commit_group;
    {wait}
$END:
    bar.warp.sync -1;
    mov.b32 %r4, 1000;
    st.shared.b32 [%r3], %r4;
    {fence}
    """


FENCE, WHOLE = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("chance", [LATE, SOON], ids=["late", "soon"])
def test_a_copy_reads_what_is_fenced(chance: Chance) -> None:
    for wait in (WHOLE, "cp.async.bulk.wait_group.read 0;"):
        assert run(staged(FENCE, wait), chance=chance)[:33] == [*range(32), 77]


def test_a_missing_fence_is_a_fault() -> None:
    with pytest.raises(Fault, match="without a proxy fence"):
        run(staged("", WHOLE))


MEET = "bar.sync 0;"


AGAIN = "@%p1 st.shared.b32 [%r15], %r1;"


@pytest.mark.parametrize(
    ("meets", "then", "late", "said"),
    [
        (MEET, "", 0, None),
        (MEET, MEET + AGAIN, 0, None),
        ("", "", 1, "warp 1 meets a store of warp 0 without a barrier"),
        ("", "", 0, "warp 0 stores what warp 1 may not have read"),
        (MEET, AGAIN, 1, "warp 1 meets a store of warp 0 without a barrier"),
        (MEET, AGAIN, 0, "warp 0 stores what warp 1 may not have read"),
    ],
    ids=["one barrier", "two barriers", "no barrier", "read first", "stored too early", "stored after all"],
)
def test_a_race_in_shared_memory_is_a_fault(meets: str, then: str, late: int, said: str | None) -> None:
    """The first thread stores a word, and the second warp reads it. A race is noticed whoever comes first."""
    body = f"""
    @%p1 st.shared.b32 [%r15], %r1;
    {meets}
    setp.ge.s32 %p2, %r1, 32;
    @!%p2 bra $AFTER;
    ld.shared.b32 %r9, [%r15];
    st.global.b32 [%rd3], %r9;
$AFTER:
    {then}
    """
    chance = Chance(0, slow=(late,))
    if said is None:
        assert run(body, threads=64, chance=chance)[32:] == [0] * 32
    else:
        with pytest.raises(Fault, match=said):
            run(body, threads=64, chance=chance)


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_of_bytes_that_nobody_has_waited_for_is_a_fault(waits: bool) -> None:
    body = f"""
    mov.b32 %r2, 1;
    @%p1 mbarrier.init.shared.b64 [%r15], %r2;
    bar.sync 0;
    mov.b32 %r3, 128;
    add.s32 %r4, %r15, 128;
    @!%p1 bra $WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %rd4, [%r15], %r3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], %r3, [%r15];
$WAIT: {WAIT if waits else ""}
    ld.shared.b32 %r9, [%r4];
    st.global.b32 [%rd3+128], %r9;
    """
    if waits:
        assert run(body)[32:] == [77] * 32
    else:
        with pytest.raises(Fault, match="warp 0 meets a copy without a barrier"):
            run(body)


def test_a_copy_that_nobody_awaits_is_late() -> None:
    body = staged(FENCE, "") + "cp.async.bulk.wait_group.read 0;"
    assert run(body)[:32] == [1000] * 32, "it has read what was stored after its issue"


@pytest.mark.parametrize(("wait", "seen"), [(WHOLE, 0), ("cp.async.bulk.wait_group.read 0;", 77)])
def test_a_copy_that_has_read_its_source_has_not_written(wait: str, seen: int) -> None:
    body = staged(FENCE, f"{wait} ld.global.b32 %r9, [%rd1]; st.global.b32 [%rd1+128], %r9;")
    assert run(body)[32] == seen


def test_a_turnstile_between_ctas() -> None:
    """Each CTA waits for its turn. The second word says in which order they came: each adds itself as a digit to base
    4, behind 77."""
    body = """
    mov.u32 %r2, %ctaid.x;
    @!%p1 bra $END;
    add.s32 %r7, %r2, 77;
$POLL:
    ld.acquire.gpu.global.b32 %r3, [%rd1];
    setp.ne.s32 %p2, %r3, %r7;
    @%p2 bra $POLL;
    ld.global.b32 %r4, [%rd1+4];
    mad.lo.s32 %r4, %r4, 4, %r2;
    st.global.b32 [%rd1+4], %r4;
    mov.b32 %r5, 1;
    red.release.gpu.global.add.s32 [%rd1], %r5;
$END:
    bar.warp.sync -1;
    """
    for seed in range(5):
        assert run(body, chance=Chance(seed, slice=5), ctas=3)[:2] == [80, ((77 * 4 + 0) * 4 + 1) * 4 + 2]


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(Fault, match=r"does not know brev\.b32"):
        run("brev.b32 %r2, %r1;")


# ---- arithmetic ------------------------------------------------------------------------------------------------

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=32)
WORDS = st.integers(0, 2**32 - 1)


def compute(op: str, *operands: np.ndarray) -> np.ndarray:
    found = computing(op)
    assert found is not None
    function, types = found
    with np.errstate(all="ignore"):
        return bits(function(*(x.view(dtype) for x, dtype in zip(operands, types, strict=False))))


@given(FLOATS)
def test_rounding_is_that_of_torch(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    for op, dtype in (("cvt.rn.bf16x2.f32", torch.bfloat16), ("cvt.rn.f16x2.f32", torch.float16)):
        packed = compute(op, x[::-1].copy(), x).view(np.uint16).reshape(-1, 2)  # the second one is in the lower half
        low, high = (torch.from_numpy(packed[:, i].astype(np.int16)).view(dtype) for i in range(2))
        want = torch.from_numpy(x).to(dtype)
        for got, right in ((low, want), (high, want.flip(0))):
            assert torch.equal(got.isnan(), right.isnan())
            assert torch.equal(got.nan_to_num(1.0, 2.0, -2.0), right.nan_to_num(1.0, 2.0, -2.0))


@settings(max_examples=50)
@given(WORDS, WORDS, st.integers(0, 40))
def test_integers_are_those_of_the_machine(a: int, b: int, by: int) -> None:
    x, y, shift = (np.array([each], np.uint32) for each in (a, b, by))
    signed = [each - (each >> 31 << 32) for each in (a, b)]
    assert compute("add.s32", x, y)[0] == (a + b) % 2**32
    assert compute("mul.lo.s32", x, y)[0] == a * b % 2**32
    assert compute("mul.wide.s32", x, y)[0] == signed[0] * signed[1] % 2**64
    assert compute("shl.b32", x, shift)[0] == (a << by) % 2**32
    assert compute("shr.u32", x, shift)[0] == a >> by
    assert compute("shr.s32", x, shift)[0] == (signed[0] >> by) % 2**32
    assert compute("setp.lt.s32", x, y)[0] == (signed[0] < signed[1])
    assert compute("setp.lt.u32", x, y)[0] == (a < b)
    if b:
        quotient = abs(signed[0]) // abs(signed[1]) * (1 if (signed[0] < 0) == (signed[1] < 0) else -1)
        assert compute("div.s32", x, y)[0] == quotient % 2**32
        assert compute("rem.s32", x, y)[0] == (signed[0] - quotient * signed[1]) % 2**32
