"""Operands of instructions: registers, constants and addresses, as functions of a warp."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from tests.backends.sm90.ptx.lanes import bits, kind
from tests.backends.sm90.ptx.memory import SHARED_BASE, Bools, Fault
from tests.backends.sm90.ptx.text import Text
from tests.backends.sm90.ptx.warp import ALL, Warp

Get = Callable[[Warp], Any]
Put = Callable[[Warp, Bools, Any], None]
Act = Callable[[Warp, Bools], "Then"]  # what an instruction does in the lanes where its guard is true

PARAMETERS = 1 << 40  # where the parameters begin: addresses that no tensor has
PARAMETER_BYTES = 128  # the largest parameter is a TMA descriptor
SPECIAL = {"%tid.x", "%laneid", *(f"%{of}.{axis}" for of in ("ctaid", "nctaid") for axis in "xyz")}
PREFIXES = {"%p": "pred", "%rs": "b16", "%rd": "b64"}  # registers that the compiler names; all others have 32 bits


class Then(Enum):
    """What follows an instruction."""

    GO_ON = 0
    PAUSE = 1  # other warps have their turn
    AGAIN = 2  # the warp waits, and then begins the same instruction anew


def several(operand: str) -> list[str]:
    """The names in '{a, b}', or the only one."""
    return [each.strip() for each in operand.strip("{}").split(",")]


class Operands:
    """The registers of a kernel, numbered as they are met, and its parameters."""

    def __init__(self, text: Text, params: dict[str, bytes]) -> None:
        self.text = text
        self._numbers: dict[str, int] = {}
        self._initial: list[Any] = []
        assert all(len(value) <= PARAMETER_BYTES for value in params.values())
        self._params = {name: i * PARAMETER_BYTES for i, name in enumerate(params)}
        self.bytes = b"".join(value.ljust(PARAMETER_BYTES, b"\0") for value in params.values())

    def registers(self, special: dict[str, Any]) -> list[Any]:
        """Those of a new warp. `special` are the values of registers like %tid.x."""
        out = list(self._initial)
        for name, value in special.items():
            if name in self._numbers:
                out[self._numbers[name]] = value.astype(np.uint32)
        return out

    def number(self, name: str) -> int:
        """The place of a register."""
        if name not in self._numbers:
            self._numbers[name] = len(self._initial)
            usual = re.fullmatch(r"(%(?:p|r|rs|rd))\d+", name)
            if not (usual or name in self.text.registers or name in SPECIAL):
                raise Fault(f"the machine does not know the register {name}")
            width = self.text.registers.get(name) or PREFIXES.get(usual[1] if usual else "", "b32")
            self._initial.append(~np.zeros(32, bits(np.empty(0, kind(width))).dtype))
        return self._numbers[name]

    def get(self, name: str, dtype: Any) -> Get:
        if name.startswith("%") or name in self.text.registers:
            at = self.number(name)
            assert self._initial[at].dtype.itemsize == np.dtype(dtype).itemsize, (name, dtype)
            if self._initial[at].dtype == dtype:
                return lambda warp: warp.registers[at]
            return lambda warp: warp.registers[at].view(dtype)
        value = self.constant(name, dtype)
        return lambda warp: value

    def gets(self, operand: str) -> list[Get]:
        """Words, from one name or several."""
        return [self.get(name, np.uint32) for name in several(operand)]

    def constant(self, name: str, dtype: Any) -> Any:
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint32).view(dtype)
        if name.startswith("__dynamic_shmem"):
            return np.full(32, SHARED_BASE, np.uint32).view(dtype)
        if name in self._params:
            return np.full(32, PARAMETERS + self._params[name], np.uint64).view(dtype)
        if dtype is np.bool_:
            return np.full(32, bool(int(name)))
        word = bits(np.empty(0, dtype)).dtype
        return np.full(32, int(name, 0) & (1 << 8 * word.itemsize) - 1, word).view(dtype)

    def address(self, operand: str, dtype: Any) -> Get:
        """Of '[base]' or '[base+offset]'."""
        base, _, offset = operand.strip("[]").partition("+")
        get, shift = self.get(base.strip(), dtype), self.constant(offset or "0", dtype)
        return lambda warp: get(warp) + shift

    def shared(self, operand: str) -> Get:
        return self.address(operand, np.uint32)

    def put(self, name: str) -> Put:
        at = self.number(name)

        def put(warp: Warp, lanes: Bools, value: Any) -> None:
            warp.registers[at] = value if lanes is ALL else np.where(lanes, value, warp.registers[at])

        return put

    def puts(self, operand: str) -> list[Put]:
        """Registers for words. A register of 64 bits takes a word with its sign."""
        if not operand.startswith("%rd"):
            return [self.put(name) for name in several(operand)]
        put = self.put(operand)
        return [lambda warp, lanes, word: put(warp, lanes, word.view(np.int32).astype(np.int64).view(np.uint64))]

    def parameter(self, operand: str, dtype: Any, count: int) -> list[Any]:
        """`count` values at '[name]' or '[name+offset]', the same in all lanes."""
        name, _, offset = operand.strip("[]").partition("+")
        at, size = self._params[name.strip()] + int(offset or 0), np.dtype(dtype).itemsize
        return [np.frombuffer(self.bytes, dtype, 1, at + i * size).repeat(32) for i in range(count)]
