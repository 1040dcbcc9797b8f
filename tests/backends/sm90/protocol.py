"""The roles of the kernel as Python generators, run in random interleavings.

The model of a worker (worker_model.py) takes every barrier from the kernel's own tables in barriers.py. The classes and
methods here have the names of those in device/, and test_protocol.py compares the barrier calls of both.

A generator yields before every step that another role could see, and "blocked" while it waits. Buffers hold labels
instead of data: whoever reads one checks that it holds the right label.
"""

from __future__ import annotations

import random
from collections.abc import Generator

from dash_attn.backends.sm90.barriers import NamedBarrier, Role
from dash_attn.backends.sm90.cta import CONSUMER_WARPGROUPS, DQ_SLOTS, STAGES, WARP, WARPGROUP, WRITERS
from tests.backends.sm90.role_model import RoleModel, Steps
from tests.backends.sm90.worker_model import Chain, Cta, Entry, Task

WARPGROUPS = range(CONSUMER_WARPGROUPS)


def stage_of(task: int) -> tuple[int, int]:
    return task % STAGES, (task // STAGES) & 1


def half_slot(entry: int, wg: int) -> tuple[int, int]:
    return (entry % DQ_SLOTS) * CONSUMER_WARPGROUPS + wg, (entry // DQ_SLOTS) & 1


def publish(producer: Producer, number: int, entry: Entry) -> None:
    slot = number % len(producer.cta.ring)
    producer.cta.ring[slot] = number, entry
    producer.arrive("task_full", slot)


def await_entry(writer: DqWriter | DkWriter, number: int) -> Steps:
    ring = len(writer.cta.ring)
    yield from writer.wait("task_full", number % ring, (number // ring) & 1)


def read(cta: Cta, number: int) -> Entry:
    held = cta.ring[number % len(cta.ring)]
    assert held is not None and held[0] == number, "a ring entry was overwritten before it was read"
    return held[1]


class Producer(RoleModel):
    role = Role.PRODUCER

    def run(self) -> Steps:
        if self.cta.cfg.packed:
            yield from self.take_tickets()
        else:
            task = 0
            for i, chain in enumerate(self.cta.chains):
                task = yield from self.walk(i, task, chain)
            self.close(task + len(self.cta.chains) * self.cta.cfg.chain_entries)
        yield "step"

    def take_tickets(self) -> Steps:
        task, i = 0, 0
        while self.cta.chains:
            task = yield from self.walk(i, task, self.cta.chains.pop(0))
            i += 1
            yield "step"
        yield from self.wait("k_empty", 0, (i & 1) ^ 1)
        self.cta.info[i & 1] = i, -1
        self.arrive("k_full")
        self.close(task + i * self.cta.cfg.chain_entries)

    def walk(self, i: int, task: int, chain: Chain) -> Generator[str, None, int]:
        """Returns the number of the task after the chain."""
        ends, count = self.cta.cfg.chain_entries, len(chain.tasks)
        if not chain.tasks:
            yield from self.load_kv(i, count)
        for t, what in enumerate(chain.tasks):
            what = what._replace(last=what.last and self.cta.cfg.last_finishes)
            entry = Entry("task", i, what, begins=t == 0, ends=t + 1 == count)
            yield from self.load_task(task, task + i * ends, entry, (i, t))
            if entry.begins:
                yield from self.load_kv(i, count)
            task += 1
        for part in range(ends):
            publish(self, task + i * ends + part, Entry("grad", i, part=part, target=chain.target, turn=chain.turn))
        return task

    def close(self, number: int) -> None:
        for w in range(WRITERS):
            publish(self, number + w, Entry("end"))

    def load_task(self, task: int, number: int, entry: Entry, label: object) -> Steps:
        stage, phase = stage_of(task)
        yield from self.wait("q_empty", stage, phase ^ 1)
        publish(self, number, entry)
        yield "step"
        self.cta.q[stage] = self.cta.delta[stage] = label
        self.expect("q_full", stage)
        yield from self.wait("do_empty", stage, phase ^ 1)
        self.cta.do[stage] = label
        self.expect("do_full", stage)

    def load_kv(self, i: int, tasks: int) -> Steps:
        yield from self.wait("v_empty", 0, (i & 1) ^ 1)
        self.cta.v = i
        self.expect("v_full")
        yield from self.wait("k_empty", 0, (i & 1) ^ 1)
        self.cta.k, self.cta.info[i & 1] = i, (i, tasks)
        self.expect("k_full")


class Consumer(RoleModel):
    role, threads = Role.CONSUMER, WARPGROUP

    def __init__(self, cta: Cta, wg: int):
        super().__init__(cta)
        self.wg = wg

    def leave(self, name: str, index: int = 0) -> None:
        """Every warp of the warpgroup arrives once."""
        for _ in range(WARPGROUP // WARP):
            self.arrive(name, index)

    def run(self) -> Steps:
        cta, task = self.cta, 0
        if cta.cfg.packed:
            i = 0
            yield from self.wait("k_full", 0, 0)
            while self.tasks_of(i) >= 0:
                task = yield from self.chain(i, task)
                i += 1
                yield from self.wait("k_full", 0, i & 1)
            if not cta.cfg.cut and not cta.cfg.delta_in_product:
                yield from self.wait("dk_empty", 0, (i & 1) ^ 1)
                self.leave("dk_full")
        else:
            for i in range(len(cta.chains)):
                yield from self.wait("k_full", 0, i & 1)
                task = yield from self.chain(i, task)

    def tasks_of(self, i: int) -> int:
        info = self.cta.info[i & 1]
        assert info is not None and info[0] == i, "facts of another chain"
        return info[1]

    def chain(self, i: int, task: int) -> Generator[str, None, int]:
        """Returns the number of the task after the chain."""
        cta, ends, arrived = self.cta, self.cta.cfg.chain_entries, False
        assert cta.k == i, "K of another chain"
        if self.tasks_of(i) == 0:
            if not cta.cfg.cut:
                yield from self.wait("dk_empty", 0, (i & 1) ^ 1)
            self.leave("v_empty")
            self.leave("k_empty")
        else:
            for t in range(self.tasks_of(i)):
                arrived = yield from self.task((task, task + i * ends), (i, t), arrived)
                task += 1
        if cta.cfg.cut:
            yield from self.hand_over_parts(i, task + i * ends)
        else:
            yield from self.hand_over_dk(i)
            yield from self.hand_over_dv(i, task + i * ends)
        return task

    def task(self, numbers: tuple[int, int], label: tuple[int, int], arrived: bool) -> Generator[str, None, bool]:
        """Returns whether the next Q has arrived."""
        cta, cfg = self.cta, self.cta.cfg
        (task, number), chain = numbers, label[0]
        stage, phase = stage_of(task)
        if not arrived:
            yield from self.wait("q_full", stage, phase)
        entry = read(cta, number)
        assert cta.q[stage] == label and entry.chain == chain, "Q of another task"
        if entry.begins:
            yield from self.wait("v_full", 0, chain & 1)
        yield from self.wait("do_full", stage, phase)
        assert cta.do[stage] == label and (cta.k, cta.v) == (chain, chain), "dO of another task"
        self.check_delta(stage, label)
        if cfg.stores_slopes:
            yield from self.await_ds_buffers(entry)
            cta.ds[stage, self.wg] = ("slopes", task)
        if cfg.p_early:
            yield from self.await_ds_buffers(entry)
        yield "step"
        self.check_delta(stage, label)
        if entry.ends:
            self.leave("v_empty")
        if cfg.stores_slopes:
            assert cta.ds[stage, self.wg] == ("slopes", task), "the slopes were overwritten"
        if not cfg.p_early and not cfg.stores_slopes:
            yield from self.await_ds_buffers(entry)
        cta.ds[stage, self.wg] = cta.last_rows[stage, self.wg] = ("ds", task)
        self.leave("ds_full", stage)
        yield from self.wait("ds_full", stage, phase)
        self.check_ds(stage, task)
        yield "step"
        self.check_ds(stage, task)
        assert cta.k == chain, "K was overwritten while dQ read it"
        self.leave("do_empty", stage)
        if entry.ends:
            self.leave("k_empty")
        if cfg.peek:
            arrived = self.is_done("q_full", *stage_of(task + 1))
        yield from self.stage_dq(number, entry)
        assert cta.q[stage] == label, "Q was overwritten while dK read it"
        self.leave("q_empty", stage)
        return arrived

    def check_ds(self, stage: int, task: int) -> None:
        for rows in (self.cta.ds, self.cta.last_rows):
            held = [rows.get((stage, wg)) for wg in WARPGROUPS]
            assert held == [("ds", task)] * CONSUMER_WARPGROUPS, "dS is not there, or was overwritten"

    def check_delta(self, stage: int, label: object) -> None:
        if self.cta.cfg.delta_in_product:
            held = self.cta.last_rows.get((stage, self.wg))
            assert held == ("delta", label), "delta is not there, or was overwritten"

    def await_ds_buffers(self, entry: Entry) -> Steps:
        if not self.cta.cfg.cut and entry.begins:
            yield from self.wait("dk_empty", 0, (entry.chain & 1) ^ 1)

    def stage_dq(self, number: int, entry: Entry) -> Steps:
        half, phase = half_slot(number, self.wg)
        yield from self.await_slot(half, phase)
        held = self.cta.slots.get(half)
        assert held == (("sum", entry.task) if entry.fetches else None), "the slot was not free"
        if entry.task and entry.task.last:
            yield from self.write_finished()
        self.cta.slots[half] = ("dq", entry.task)
        self.leave("dq_full", half)

    def await_slot(self, half: int, phase: int) -> Steps:
        yield from self.wait("dq_empty", half, phase)

    def write_finished(self) -> Steps:
        yield from self.sync(NamedBarrier(NamedBarrier.GROUP_0 + self.wg))

    def sync_consumers(self) -> Steps:
        yield from self.sync(NamedBarrier.CONSUMERS)

    def hand_over_dk(self, chain: int) -> Steps:
        yield from self.sync_consumers()
        for wg in WARPGROUPS:
            self.cta.ds[self.wg, wg] = ("dk", chain)
        self.leave("dk_full")

    def hand_over_dv(self, chain: int, number: int) -> Steps:
        half, phase = half_slot(number, self.wg)
        yield from self.await_slot(half, phase)
        assert self.cta.slots.get(half) is None, "the slot was not free"
        self.cta.slots[half] = ("dv", chain)
        self.leave("dq_full", half)

    def hand_over_parts(self, chain: int, number: int) -> Steps:
        for part in range(self.cta.cfg.chain_entries):
            half, phase = half_slot(number + part, self.wg)
            yield from self.await_slot(half, phase)
            assert self.cta.slots.get(half) is None, "the slot was not free"
            self.cta.slots[half] = ("part", chain, part)
            self.leave("dq_full", half)


class DqWriter(RoleModel):
    role = Role.DQ_WRITER

    def __init__(self, cta: Cta, writer: int):
        super().__init__(cta)
        self.halves = (writer,) if cta.cfg.split else tuple(WARPGROUPS)
        self.writer = writer

    def run(self) -> Steps:
        cfg = self.cta.cfg
        stride, number = (1, 0) if cfg.split else (WRITERS, self.writer)
        if not cfg.last_finishes:
            for slot in range(DQ_SLOTS) if cfg.split else (self.writer,):
                self.free(slot)
        elif cfg.split:
            yield from self.offer(number)
        while True:
            if cfg.last_finishes:
                yield from self.offer(number + DQ_SLOTS - stride)
            entry = yield from self.flags(number)
            if entry.kind == "end":
                return
            if entry.kind == "grad":
                if cfg.cut:
                    yield from self.add_part(number, entry)
                else:
                    yield from self.store_dv(number, entry)
            else:
                yield from self.contribute(number, entry)
            number += stride

    def flags(self, number: int) -> Generator[str, None, Entry]:
        """Returns the entry."""
        yield from await_entry(self, number)
        return read(self.cta, number)

    def offer(self, number: int) -> Steps:
        entry = yield from self.flags(number)
        if not entry.fetches:
            self.free(number)

    def free(self, number: int) -> None:
        for wg in self.halves:
            self.arrive("dq_empty", half_slot(number, wg)[0])

    def contribute(self, number: int, entry: Entry) -> Steps:
        cta, task = self.cta, entry.task
        assert task is not None
        counter = task.tile, self.halves
        if cta.cfg.ordered:
            while cta.counters.get(counter, 0) != task.turn:
                yield "blocked"
        if entry.fetches:
            self.fetch_sum(number, task)
        if task.last:
            yield from self.store_dq(number, task)
        else:
            yield from self.add_sum(number, task)
        yield "step"
        cta.counters[counter] = cta.counters.get(counter, 0) + 1

    def fetch_sum(self, number: int, task: Task) -> None:
        for wg in self.halves:
            half = half_slot(number, wg)[0]
            assert self.cta.slots.get(half) is None, "a sum was fetched into a slot in use"
            self.cta.slots[half] = ("sum", task)
            self.expect("dq_empty", half)

    def add_sum(self, number: int, task: Task) -> Steps:
        yield from self.take(number, ("dq", task))
        if not self.cta.cfg.last_finishes:
            self.free(number)

    def await_staged(self, number: int, wg: int) -> Steps:
        yield from self.wait("dq_full", *half_slot(number, wg))

    def store_dq(self, number: int, task: Task) -> Steps:
        yield from self.take(number, ("dq", task))

    def store_dv(self, number: int, entry: Entry) -> Steps:
        yield from self.take(number, ("dv", entry.chain))
        if not self.cta.cfg.last_finishes:
            self.free(number)

    def add_part(self, number: int, entry: Entry) -> Steps:
        counter = entry.target, entry.part, self.halves
        while self.cta.counters.get(counter, 0) != entry.turn:
            yield "blocked"
        yield from self.take(number, ("part", entry.chain, entry.part))
        if not self.cta.cfg.last_finishes:
            self.free(number)
        yield "step"
        self.cta.counters[counter] = entry.turn + 1

    def take(self, number: int, label: object) -> Steps:
        """Reads the halves, which must not change until all of them are read."""
        for wg in self.halves:
            yield from self.await_staged(number, wg)
            assert self.cta.slots[half_slot(number, wg)[0]] == label, "the slot holds something else"
        yield "step"
        for wg in self.halves:
            half = half_slot(number, wg)[0]
            assert self.cta.slots[half] == label, "the slot was overwritten before it was stored"
            self.cta.slots[half] = None


class DkWriter(RoleModel):
    role = Role.DK_WRITER

    def run(self) -> Steps:
        if self.cta.cfg.delta_in_product:
            yield from self.follow()
        elif self.cta.cfg.cut:
            return
        elif self.cta.cfg.packed:
            i = 0
            yield from self.wait("dk_full", 0, 0)
            while self.cta.info[i & 1] != (i, -1):
                yield from self.store(i)
                i += 1
                yield from self.wait("dk_full", 0, i & 1)
        else:
            for i in range(len(self.cta.chains)):
                yield from self.wait("dk_full", 0, i & 1)
                yield from self.store(i)

    def follow(self) -> Steps:
        number, task, i, late = 0, 0, 0, False
        while True:
            yield from await_entry(self, number)
            entry = read(self.cta, number)
            if entry.kind == "task":
                yield from self.split_delta(task)
                task += 1
            if self.cta.cfg.cut:
                if entry.kind == "grad" and entry.part + 1 == self.cta.cfg.chain_entries:
                    self.read_end()
            else:
                if late:
                    yield from self.wait("dk_full", 0, i & 1)
                    yield from self.store(i)
                    i += 1
                late = entry.kind == "grad"
            if entry.kind == "end":
                return
            number += 1

    def read_end(self) -> None:
        self.arrive("k_empty")

    def split_delta(self, task: int) -> Steps:
        stage, phase = stage_of(task)
        yield from self.wait("q_full", stage, phase)
        for wg in WARPGROUPS:
            self.cta.last_rows[stage, wg] = ("delta", self.cta.delta[stage])
            yield "step"
        self.arrive("do_full", stage)

    def store(self, i: int) -> Steps:
        self.check_dk(i)
        yield "step"
        self.check_dk(i)
        self.arrive("dk_empty")

    def check_dk(self, chain: int) -> None:
        info = self.cta.info[chain & 1]
        assert info is not None and info[0] == chain, "the chain's facts were overwritten"
        held = {label for (stage, _), label in self.cta.ds.items() if stage < CONSUMER_WARPGROUPS}
        assert held == {("dk", chain)}, "dK is not there, or was overwritten"


def roles_of(cta: Cta) -> list[RoleModel]:
    writers = (DqWriter(cta, writer) for writer in range(WRITERS))
    return [Producer(cta), *(Consumer(cta, wg) for wg in WARPGROUPS), *writers, DkWriter(cta)]


def run(ctas: list[Cta], rng: random.Random, patience: int = 200_000, slow: Role | None = None) -> None:
    """Random interleaving until every role has ended. Fails if none can move.

    `slow` moves only when all others have waited for a while.
    """
    live = [(role.role, role.start()) for cta in ctas for role in roles_of(cta)]
    idle = 0
    for _ in range(patience):
        if not live:
            return
        quick = [each for each in live if each[0] is not slow]
        chosen = rng.choice(quick if quick and idle <= 20 * len(quick) else live)
        for _ in range(rng.choice((1, 1, 1, 5, 50))):
            state = next(chosen[1], "ended")
            if state == "ended":
                live.remove(chosen)
                idle = 0
                break
            idle = idle + 1 if state == "blocked" else 0
            if state == "blocked":
                break
        assert idle <= 500 * len(live), f"deadlock: {len(live)} roles wait"
    raise AssertionError("ran out of patience")
