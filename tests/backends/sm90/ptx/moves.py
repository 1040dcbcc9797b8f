"""Instructions that move words: between registers, lanes and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.sm90.ptx.lanes import LANES, bits, kind
from tests.backends.sm90.ptx.memory import Bools
from tests.backends.sm90.ptx.operands import Act, Get, Operands, Put, Then, several
from tests.backends.sm90.ptx.warp import ALL, Warp


def computed(at: Operands, compute: tuple[Callable[..., Any], tuple[Any, ...]], names: tuple[str, ...]) -> Act:
    """An instruction that only computes: see lanes.py."""
    (function, types), target = compute, at.number(names[0])
    gets = [at.get(name, dtype) for name, dtype in zip(names[1:], types, strict=False)]
    value = _value(function, gets)

    def act(warp: Warp, lanes: Bools) -> Then:
        registers, new = warp.registers, bits(value(warp))
        registers[target] = new if lanes is ALL else np.where(lanes, new, registers[target])
        return Then.GO_ON

    return act


def _value(function: Callable[..., Any], gets: list[Get]) -> Get:
    """Each number of operands has its own lambda, because most of the time goes here."""
    if len(gets) == 1:
        (first,) = gets
        return lambda warp: function(first(warp))
    if len(gets) == 2:
        first, second = gets
        return lambda warp: function(first(warp), second(warp))
    first, second, third = gets
    return lambda warp: function(first(warp), second(warp), third(warp))


def put_all(puts: list[Put], warp: Warp, lanes: Bools, values: Any) -> None:
    """Column i of the values, (32, registers), goes to register i."""
    for i, put in enumerate(puts):
        put(warp, lanes, values[:, i].copy())


def joined(gets: list[Get], warp: Warp) -> Any:
    """The values of several registers, (32, registers)."""
    return np.ascontiguousarray(np.stack([get(warp) for get in gets], 1))


def halves(at: Operands, op: str, to: str, of: str) -> Act:
    """mov between a register and the registers of its halves. The half '_' is dropped."""
    whole, half = (np.uint32, np.uint16) if op == "mov.b32" else (np.uint64, np.uint32)
    if to.startswith("{"):
        get = at.get(of, whole)
        puts = [(i, at.put(name)) for i, name in enumerate(several(to)) if name != "_"]

        def apart(warp: Warp, lanes: Bools) -> Then:
            both = get(warp).view(half).reshape(32, 2)
            for i, put in puts:
                put(warp, lanes, both[:, i].copy())
            return Then.GO_ON

        return apart
    gets, put = [at.get(name, half) for name in several(of)], at.put(to)

    def join(warp: Warp, lanes: Bools) -> Then:
        put(warp, lanes, joined(gets, warp).view(whole)[:, 0])
        return Then.GO_ON

    return join


# ---- memory --------------------------------------------------------------------------------------------------


def load_param(at: Operands, op: str, to: str, of: str) -> Act:
    puts = [at.put(name) for name in several(to)]
    values = at.parameter(of, kind(op.rpartition(".")[2]), len(puts))

    def act(warp: Warp, lanes: Bools) -> Then:
        for put, value in zip(puts, values, strict=True):
            put(warp, lanes, bits(value))
        return Then.GO_ON

    return act


def load_shared(at: Operands, op: str, to: str, of: str) -> Act:
    assert op.endswith("32")
    puts, address = at.puts(to), at.shared(of)

    def act(warp: Warp, lanes: Bools) -> Then:
        shared, out = warp.cta.shared, np.zeros((32, len(puts)), np.uint32)
        out[lanes] = shared.load(shared.words_at(address(warp)[lanes], len(puts)), warp.clock)
        put_all(puts, warp, lanes, out)
        return Then.GO_ON

    return act


def store_shared(at: Operands, op: str, to: str, of: str) -> Act:
    assert op.endswith("32")
    gets, address = at.gets(of), at.shared(to)

    def act(warp: Warp, lanes: Bools) -> Then:
        shared = warp.cta.shared
        shared.store(shared.words_at(address(warp)[lanes], len(gets)), joined(gets, warp)[lanes], warp.clock)
        warp.world.progress += 1
        return Then.GO_ON

    return act


def load_global(at: Operands, op: str, to: str, of: str) -> Act:
    """A load with .acquire or .relaxed is a poll: after it the warp waits until something has changed."""
    assert op.endswith("32")
    puts, address = at.puts(to), at.address(of, np.uint64)
    polls = "acquire" in op or "relaxed" in op

    def act(warp: Warp, lanes: Bools) -> Then:
        words = warp.world.memory.load(address(warp), 4 * len(puts), lanes).view(np.uint32)
        put_all(puts, warp, lanes, words)
        if not polls:
            return Then.GO_ON
        seen = warp.world.progress
        warp.waits, warp.polls = lambda: warp.world.progress > seen, True
        return Then.PAUSE

    return act


def store_global(at: Operands, op: str, to: str, of: str) -> Act:
    assert op.endswith("32")
    gets, address = at.gets(of), at.address(to, np.uint64)

    def act(warp: Warp, lanes: Bools) -> Then:
        warp.world.memory.store(address(warp), joined(gets, warp).view(np.uint8), lanes)
        warp.world.progress += 1
        return Then.GO_ON

    return act


def add_global(at: Operands, to: str | None, where: str, by: str) -> Act:
    """red, or with a target atom."""
    put, address, get = None if to is None else at.put(to), at.address(where, np.uint64), at.get(by, np.uint32)

    def act(warp: Warp, lanes: Bools) -> Then:
        old, places, values = np.zeros(32, np.uint32), address(warp), get(warp)
        for lane in np.flatnonzero(lanes):
            room = warp.world.memory.room(int(places[lane]), 4).view(np.uint32)
            old[lane] = room[0]
            room[0] += values[lane]
        if put is not None:
            put(warp, lanes, old)
        warp.world.progress += 1
        return Then.GO_ON

    return act


# ---- lanes ---------------------------------------------------------------------------------------------------


def shuffle(at: Operands, op: str, to: str, of: str, by: str, *_: str) -> Act:
    mode = op.split(".")[2]
    assert mode in ("idx", "bfly") and "|" not in to
    put, get, index = at.put(to), at.get(of, np.uint32), at.get(by, np.uint32)

    def act(warp: Warp, lanes: Bools) -> Then:
        source = index(warp) % 32 if mode == "idx" else LANES ^ index(warp)
        put(warp, lanes, get(warp)[source])
        return Then.GO_ON

    return act


def elect(at: Operands, op: str, to: str, *_: str) -> Act:
    number, flag = (at.put(name) for name in to.split("|"))

    def act(warp: Warp, lanes: Bools) -> Then:
        number(warp, lanes, np.full(32, warp.world.leader, np.uint32))
        flag(warp, lanes, warp.world.leader == LANES)
        return Then.GO_ON

    return act


def ballot(at: Operands, op: str, to: str, of: str, *_: str) -> Act:
    put, get = at.put(to), at.get(of, np.bool_)

    def act(warp: Warp, lanes: Bools) -> Then:
        word = int(((get(warp) & lanes).astype(np.uint64) << LANES.astype(np.uint64)).sum())
        put(warp, lanes, np.full(32, word, np.uint32))
        return Then.GO_ON

    return act
