"""The roles of the kernel as Python generators over the same barrier specs, for random interleavings.

Each generator yields before every step that another role could see. A wait yields until it is satisfied.
Buffers hold labels instead of data: whoever reads one checks that it holds what it must.
"""

from __future__ import annotations

import random

from dash_attn.backends.sm90.barriers import mbarrier_specs
from dash_attn.backends.sm90.config import RING, KernelConfig


class MBarrier:
    """Arrivals per phase; completing a phase flips the parity that waits see."""

    def __init__(self, arrivals: int):
        self.arrivals, self.left, self.completed = arrivals, arrivals, 0

    def arrive(self, n: int = 1):
        assert self.left >= n, "more arrivals than the phase takes"
        self.left -= n
        if self.left == 0:
            self.left, self.completed = self.arrivals, self.completed + 1

    def passed(self, parity: int) -> bool:
        """As mbarrier.try_wait.parity: true unless the phase of that parity is the one running."""
        return self.completed % 2 != parity


class Machine:
    """One worker (CTA); `counters` are shared by all workers."""

    def __init__(self, cfg: KernelConfig, chains, counters):
        self.cfg, self.chains, self.counters = cfg, chains, counters
        self.bars = {(s.name, i): MBarrier(s.arrivals) for s in mbarrier_specs(cfg) for i in range(s.count)}
        self.ring, self.info = [None] * RING, [None, None]
        self.q, self.do, self.kv, self.ds, self.slots = [None] * 2, [None] * 2, [None] * 2, [None] * 2, {}
        self.meeting = [0, 0]

    def wait(self, name, index, parity):
        while not self.bars[name, index].passed(parity):
            yield "blocked"
        yield "step"

    def arrive(self, name, index=0, n=1):
        self.bars[name, index].arrive(n)

    def producer(self):
        task = 0
        for i, (chain, tasks) in enumerate(self.chains):
            if not tasks:
                yield from self.load_kv(i, chain, 0)
            for t, (tile, turn, last) in enumerate(tasks):
                stage, free = task & 1, ((task >> 1) & 1) ^ 1
                yield from self.wait("q_empty", stage, free)
                last = last and self.cfg.last_finishes
                self.publish(task + i, ("task", tile, turn, last, t == 0, t + 1 == len(tasks), i & 1))
                self.q[stage] = (i, t)
                self.arrive("q_full", stage)
                yield from self.wait("do_empty", stage, free)
                self.do[stage] = (i, t)
                self.arrive("do_full", stage)
                if t == 0:
                    yield from self.load_kv(i, chain, len(tasks))
                task += 1
            self.publish(task + i, ("grad", chain))
        for w in range(self.cfg.writers):
            self.publish(task + len(self.chains) + w, ("end",))
        yield "step"

    def publish(self, entry, what):
        self.ring[entry % RING] = (entry, what)
        self.arrive("task_full", entry % RING)

    def load_kv(self, i, chain, tasks):
        yield from self.wait("v_empty", 0, (i & 1) ^ 1)
        self.kv[1] = i
        self.arrive("v_full")
        yield from self.wait("k_empty", 0, (i & 1) ^ 1)
        self.kv[0], self.info[i & 1] = i, (i, chain, tasks)
        self.arrive("k_full")

    def read(self, entry):
        label, what = self.ring[entry % RING]
        assert label == entry, "a ring entry was overwritten before it was read"
        return what

    def consumer(self, wg):
        task = 0
        for i in range(len(self.chains)):
            yield from self.wait("k_full", 0, i & 1)
            label, _, tasks = self.info[i & 1]
            assert label == i and self.kv[0] == i
            if tasks == 0:
                yield from self.wait("dk_empty", 0, (i & 1) ^ 1)
                self.arrive("v_empty", n=4)
                self.arrive("k_empty", n=4)
            for t in range(tasks):
                yield from self.task(wg, task, i, t)
                task += 1
            yield from self.meet(wg)
            self.ds[wg] = ("dk", i)
            self.arrive("dk_full", n=4)
            yield from self.fill(wg, task + i, ("dv", i))

    def task(self, wg, task, i, t):
        stage, phase, entry = task & 1, (task >> 1) & 1, task + i
        yield from self.wait("q_full", stage, phase)
        _, tile, turn, last, begins, ends, odd = self.read(entry)
        assert self.q[stage] == (i, t) and odd == i & 1
        if begins:
            yield from self.wait("v_full", 0, odd)
        yield from self.wait("do_full", stage, phase)
        assert self.do[stage] == (i, t) and self.kv == [i, i]
        if begins and self.cfg.p_early:
            yield from self.wait("dk_empty", 0, odd ^ 1)
        yield "step"
        if ends:
            self.arrive("v_empty", n=4)
        if begins and not self.cfg.p_early:
            yield from self.wait("dk_empty", 0, odd ^ 1)
        self.ds[stage] = ("ds", task)
        self.arrive("ds_full", stage, n=4)
        yield from self.wait("ds_full", stage, phase)
        assert self.ds[stage] == ("ds", task) and self.kv[0] == i
        yield "step"
        assert self.ds[stage] == ("ds", task), "dS was overwritten while dQ read it"
        self.arrive("do_empty", stage, n=4)
        if ends:
            self.arrive("k_empty", n=4)
        yield from self.fill(wg, entry, ("finish" if last else "add", tile, turn))
        assert self.q[stage] == (i, t)
        self.arrive("q_empty", stage, n=4)

    def meet(self, wg):
        self.meeting[wg] += 1
        mine = self.meeting[wg]
        while self.meeting[1 - wg] < mine:
            yield "blocked"
        yield "step"

    def fill(self, wg, entry, what):
        half, phase = (entry & 1) * 2 + wg, (entry >> 1) & 1
        yield from self.wait("dq_empty", half, phase)
        held = self.slots.get(half)
        fetched = what[0] == "finish" and what[2] > 0
        assert held == (("sum", what[1], what[2]) if fetched else None), "the slot was not free"
        self.slots[half] = what
        self.arrive("dq_full", half, n=4)

    def writer(self, w):
        split, stride = self.cfg.split, 1 if self.cfg.split else self.cfg.writers
        halves, entry = ((w,), 0) if split else ((0, 1), w)
        if not self.cfg.last_finishes:
            for slot in range(self.cfg.dq_slots) if split else (w,):
                self.free(halves, slot)
        elif split:
            yield from self.offer(halves, entry)
        while True:
            if self.cfg.last_finishes:
                yield from self.offer(halves, entry + self.cfg.dq_slots - stride)
            yield from self.wait("task_full", entry % RING, (entry // RING) & 1)
            what = self.read(entry)
            if what[0] == "end":
                return
            yield from self.serve(halves, entry, what)
            entry += stride

    def offer(self, halves, entry):
        yield from self.wait("task_full", entry % RING, (entry // RING) & 1)
        what = self.read(entry)
        if not (what[0] == "task" and what[3] and what[2] > 0):
            self.free(halves, entry)

    def free(self, halves, entry):
        for wg in halves:
            self.arrive("dq_empty", (entry & 1) * 2 + wg)

    def serve(self, halves, entry, what):
        phase = (entry >> 1) & 1
        key = None
        if what[0] == "task":
            _, tile, turn, last = what[:4]
            key = (tile, halves)
            while self.counters.get(key, 0) != turn:
                yield "blocked"
            if last and turn > 0:
                for wg in halves:
                    self.slots[(entry & 1) * 2 + wg] = ("sum", tile, turn)
                    self.arrive("dq_empty", (entry & 1) * 2 + wg)
        for wg in halves:
            half = (entry & 1) * 2 + wg
            yield from self.wait("dq_full", half, phase)
            held = self.slots[half]
            assert held[0] == ("dv" if key is None else "finish" if last else "add")
            assert key is None or held[1:] == (tile, turn), "the slot holds another contribution"
            yield "step"
            assert self.slots[half] == held, "the slot was overwritten before it was stored"
            self.slots[half] = None
        if not self.cfg.last_finishes:
            self.free(halves, entry)
            yield "step"
        if key is not None:
            self.counters[key] = turn + 1

    def dk_writer(self):
        for i in range(len(self.chains)):
            yield from self.wait("dk_full", 0, i & 1)
            assert self.info[i & 1][0] == i and self.ds == [("dk", i)] * 2
            yield "step"
            assert self.info[i & 1][0] == i and self.ds == [("dk", i)] * 2
            self.arrive("dk_empty")

    def roles(self):
        return [
            self.producer(),
            self.consumer(0),
            self.consumer(1),
            self.dk_writer(),
            *[self.writer(w) for w in range(self.cfg.writers)],
        ]


def run(machines, rng: random.Random, patience: int = 200_000) -> None:
    """Random interleaving until every role has ended; fails if none can move."""
    live = [role for m in machines for role in m.roles()]
    idle = 0
    for _ in range(patience):
        if not live:
            return
        role = rng.choice(live)
        for _ in range(rng.choice((1, 1, 1, 5, 50))):
            state = next(role, "ended")
            if state == "ended":
                live.remove(role)
                idle = 0
                break
            idle = idle + 1 if state == "blocked" else 0
            if state == "blocked":
                break
        assert idle <= 500 * len(live), f"deadlock: {len(live)} roles wait"
    raise AssertionError("ran out of patience")
