"""Instructions that compute in registers: each is a function of arrays with one element for each lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Function = Callable[..., Array]

WIDTHS = {"16": np.uint16, "32": np.uint32, "64": np.uint64}
LANES = np.arange(32)


def kind(suffix: str) -> Any:
    """The type of a PTX type name: s32, u16, b64, f32, pred."""
    if suffix == "pred":
        return np.bool_
    base = {"s": "int", "u": "uint", "b": "uint", "f": "float"}[suffix[0]]
    return np.dtype(base + suffix[1:]).type


def bits(x: Array) -> Array:
    """A result with the type in which registers hold it."""
    return x if x.dtype.kind in "ub" else x.view(WIDTHS[str(8 * x.dtype.itemsize)])


def shifted_left(a: Array, by: Array) -> Array:
    width = 8 * a.dtype.itemsize
    return np.where(by < width, a << (by % width).astype(a.dtype), 0).astype(a.dtype)


def shifted_right(a: Array, by: Array) -> Array:
    """A signed number keeps its sign, however far it is shifted."""
    width = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(by, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < width, shifted, 0).astype(a.dtype)


def divided(a: Array, b: Array) -> Array:
    """Towards zero. What a division by zero gives is not defined."""
    b = np.where(b == 0, 1, b).astype(b.dtype)
    if a.dtype.kind == "u":
        return a // b
    return (np.sign(a) * np.sign(b) * (abs(a.astype(np.int64)) // abs(b.astype(np.int64)))).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    return a - divided(a, b) * b


def fused(a: Array, b: Array, c: Array) -> Array:
    """The product of two float32 is exact in float64. The sum is rounded there once more, which hardly ever shows."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def pack_bf16(high: Array, low: Array) -> Array:
    return _bf16(high) << np.uint32(16) | _bf16(low)


def _bf16(x: Array) -> Array:
    word = x.view(np.uint32)
    rounded = (word + 0x7FFF + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def pack_fp16(high: Array, low: Array) -> Array:
    return _fp16(high) << np.uint32(16) | _fp16(low)


def _fp16(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """prmt: four bytes chosen from eight. The kernel copies no signs."""
    both = np.stack([a, b], 1).view(np.uint8)
    nibbles = np.stack([selector >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], 1)
    assert (nibbles < 8).all()
    return np.take_along_axis(both, nibbles.astype(np.int64), 1).copy().view(np.uint32)[:, 0]


ARITHMETIC: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul.lo": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "fma.rn": fused,
    "div": divided,
    "rem": remainder,
    "min": np.fmin,  # for floats: the other operand if one is NaN
    "max": np.fmax,
    "abs": np.abs,
    "neg": lambda a: -a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "mov": lambda a: a,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "prmt": permuted,
    "ex2.approx.ftz": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "tanh.approx": np.tanh,
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: (a != b) & (a == a) & (b == b),  # false with NaN; setp.neu is true
    "setp.neu": lambda a, b: ~(a == b),
    "setp.lt": lambda a, b: a < b,
    "setp.le": lambda a, b: a <= b,
    "setp.gt": lambda a, b: a > b,
    "setp.ge": lambda a, b: a >= b,
}


# These have the same result for signed and unsigned numbers. Registers hold unsigned numbers, which need no view.
UNSIGNED = ("add", "sub", "mul.lo", "mad.lo", "and", "or", "xor", "not", "mov", "setp.eq", "setp.ne")


def computing(op: str) -> tuple[Function, tuple[Any, ...]] | None:
    """What an instruction computes, and the types of its operands. None if it does more than compute."""
    name, _, suffix = op.rpartition(".")
    if name in ARITHMETIC:
        operand = kind(suffix.replace("s", "u") if name in UNSIGNED else suffix)
        return ARITHMETIC[name], (operand, operand, operand)
    if name in ("shl", "shr"):
        return (shifted_left if name == "shl" else shifted_right), (kind(suffix), np.uint32)
    if name == "selp":
        return (lambda a, b, p: np.where(p, a, b)), (kind(suffix), kind(suffix), np.bool_)
    if name in ("mul.wide", "mul.hi"):
        return _widening(name, suffix)
    if op in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        return (pack_bf16 if "bf16" in op else pack_fp16), (np.float32, np.float32)
    if op in ("cvt.rn.bf16.f32", "cvt.rn.f16.f32"):
        return (lambda a: (_bf16(a) if "bf16" in op else _fp16(a)).astype(np.uint16)), (np.float32,)
    if op in ("cvt.f32.bf16", "cvt.f32.f16"):
        return (lambda a: widened(a, suffix)), (np.uint16,)
    if name.startswith("cvt.") and name.count(".") == 1:
        return _converting(name[4:], suffix)
    return None


def _widening(name: str, suffix: str) -> tuple[Function, tuple[Any, ...]]:
    """Products of twice as many bits, and their upper halves."""
    narrow, wide = kind(suffix), kind(f"{suffix[0]}{2 * int(suffix[1:])}")
    if name == "mul.wide":
        return (lambda a, b: a.astype(wide) * b.astype(wide)), (narrow, narrow)
    shift = wide(8 * np.dtype(narrow).itemsize)
    return (lambda a, b: (a.astype(wide) * b.astype(wide) >> shift).astype(narrow)), (narrow, narrow)


def widened(halves: Array, dtype: str) -> Array:
    """bf16 or f16, in words of two bytes, as float32."""
    if dtype == "bf16":
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return halves.view(np.float16).astype(np.float32)


def _converting(to: str, of: str) -> tuple[Function, tuple[Any, ...]]:
    """Between integers. A byte lies in the lower half of a 16-bit register."""
    target, source = kind(to), kind(of)
    if to in ("s8", "u8"):  # the register has 16 bits, and its upper half follows the sign
        wide = np.int16 if to == "s8" else np.uint16
        return (lambda a: a.astype(target).astype(wide)), (source,)
    if of in ("s8", "u8"):
        return (lambda a: a.astype(source).astype(target)), (np.uint16,)
    return (lambda a: a.astype(target)), (source,)
