"""Instructions that the kernel language has no call for. One thread issues a bulk copy."""

import cutlass.cute as cute
from cutlass import Float32, Int32


def bulk_add_f32(dst_gmem, src_smem, nbytes: int):
    """Asynchronous dst += src in fp32. It belongs to the bulk group of the thread that issues it."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[dst_gmem.toint(), src_smem.toint(), Int32(nbytes)],
    )


def bulk_store(dst_gmem, src_smem, nbytes: int):
    """Asynchronous dst = src. It belongs to the bulk group of the thread that issues it."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[dst_gmem.toint(), src_smem.toint(), Int32(nbytes)],
    )


def bulk_load(dst_smem, src_gmem, nbytes: int, mbar):
    """Asynchronous dst = src. The bytes count towards the phase of `mbar`."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst_smem.toint(), src_gmem.toint(), Int32(nbytes), mbar.toint()],
    )


def phase_done(mbar, phase):
    """1 if the barrier's phase of this parity is complete, else 0. Does not wait."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[mbar.toint(), Int32(phase)],
    )


def fp16_pair(word):
    """The two fp16 numbers of a word, as floats."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def fresh_thread_index():
    """threadIdx.x, read through a move that the compiler cannot see through.

    Addresses made from it are computed where they are used. Otherwise the compiler computes them before the task loop,
    and they take registers throughout it.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[cute.arch.thread_idx()[0]]
    )


def bf16_parts(number):
    """A float as the sum of three numbers in bf16: two words, the first with two of them. Each has 8 of its 24 bits."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 h; .reg .f32 r, t; and.b32 h, {$r0}, 0xffff0000; sub.f32 r, {$r0}, h; and.b32 h, r, 0xffff0000; "
        "sub.f32 t, r, h; prmt.b32 {$w0}, {$r0}, r, 0x7632; shr.b32 {$w1}, t, 16; }",
        write_only_types=[Int32, Int32],
        read_only_args=[number],
    )
