"""The few instructions the DSL has no call for. Bulk copies must be issued by one thread."""

import cutlass.cute as cute
from cutlass import Int32


def bulk_add_f32(dst_gmem, src_smem, nbytes: int):
    """Asynchronous dst += src (fp32), completion through the issuing thread's bulk groups."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[dst_gmem.toint(), src_smem.toint(), Int32(nbytes)],
    )


def bulk_store(dst_gmem, src_smem, nbytes: int):
    """Asynchronous dst = src, completion through the issuing thread's bulk groups."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[dst_gmem.toint(), src_smem.toint(), Int32(nbytes)],
    )


def bulk_load(dst_smem, src_gmem, nbytes: int, mbar):
    """Asynchronous smem = gmem; the bytes count towards `mbar`."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst_smem.toint(), src_gmem.toint(), Int32(nbytes), mbar.toint()],
    )


def phase_done(mbar, phase):
    """1 if the barrier's phase of this parity is complete, else 0, at once."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[mbar.toint(), Int32(phase)],
    )


def fresh_thread_index():
    """threadIdx.x behind an opaque move: addresses made from it stay where they are used, instead of being
    computed once before the task loop and held (or spilled) across it."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[cute.arch.thread_idx()[0]]
    )
