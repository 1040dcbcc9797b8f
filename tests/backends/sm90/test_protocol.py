"""The protocol between the roles, under random interleavings of a model that is tied to the kernel.

No deadlock, no buffer overwritten early, on random Programs; and no barrier or barrier call that the kernel and the
model do not share.
"""

import ast
import dataclasses
import random
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from dash_attn.backends.sm90 import barriers
from dash_attn.backends.sm90.barriers import (
    CUT_DELTA_MBARRIERS,
    DELTA_MBARRIERS,
    MBARRIERS,
    NAMED_BARRIER_THREADS,
    NamedBarrier,
    Role,
    mbarriers,
)
from dash_attn.backends.sm90.config import select
from dash_attn.backends.sm90.cta import WARP
from dash_attn.launch import compose
from dash_attn.order import applicable
from dash_attn.problem import CAUSAL, FULL, Problem, window
from dash_attn.program import Chain as Column
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import verify
from tests.backends.sm90 import protocol
from tests.backends.sm90.protocol import run
from tests.backends.sm90.worker_model import Chain, Cta, Task

DEVICE = Path(barriers.__file__).parent / "device"
PLAIN = select(128, "bf16", "full")
CAPPED = select(64, "bf16", "full", softcap=True)
NARROW = select(64, "bf16", "full")
NARROW_CUT = dataclasses.replace(NARROW, cut=True)


def chains_of(program, rows):
    """The chains of one worker, with names for the dQ tiles."""
    tasks, group, chains = program.expand(), program.geometry.group, []
    for row in rows.tolist():
        batch, kv_head, kv_tile = program.chains[row, [Column.BATCH, Column.KV_HEAD, Column.KV_TILE]].tolist()
        mine = []
        for t in range(program.task_first[row], program.task_first[row + 1]):
            name = (batch, kv_head * group + int(tasks.head[t]), int(tasks.q[t]))
            last = tasks.turn[t] == program.contributors[tasks.q[t]] - 1
            mine.append(Task(name, int(tasks.turn[t]), bool(last)))
        share = program.geometry.share
        chains.append(Chain((batch, kv_head, kv_tile), mine, (batch, kv_head // share, kv_tile), kv_head % share))
    return chains


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    rng = random.Random(seed)
    length, heads_kv, group = rng.randrange(1, 900), rng.choice([1, 2]), rng.choice([1, 1, 2, 3])
    mask = rng.choice([FULL, CAUSAL, window(rng.randrange(300), rng.randrange(300))])
    problem = Problem(1, heads_kv * group, heads_kv, length, length, mask=mask)
    tiling = tile(problem, TileShape(64, 128))
    cut, packed = rng.random() < 0.4, rng.random() < 0.4
    program = compose(tiling, rng.choice(applicable(tiling)) + "@head" * cut)
    verified = verify(program)
    workers = max(verified.co_resident, rng.randrange(1, 9))
    early = rng.choice([dict(), dict(p_early=0, delta_ahead=0)])
    how = dict(split=rng.random() < 0.5, peek=rng.random() < 0.5, ordered=rng.random() < 0.8, cut=cut, packed=packed)
    finish = rng.choice(["last", "postpass"])
    cfg = dataclasses.replace((CAPPED, NARROW, PLAIN, PLAIN)[seed % 4], finish=finish, **how, **early)
    counters = {}
    if packed:  # one queue, from which workers take chains in launch order
        queue = chains_of(program, program.launch)
        ctas = [Cta(cfg, queue, counters) for _ in range(workers)]
    else:
        placed = verified.on(workers).placement
        parts = [placed.chains[a:b] for a, b in pairwise(placed.first.tolist())]
        ctas = [Cta(cfg, chains_of(program, part), counters) for part in parts]
    run(ctas, rng)
    dq = {key[0]: turns for key, turns in counters.items() if len(key) == 2}
    assert all(turns == program.contributors[name[2]] for name, turns in dq.items())
    dkv = [turns for key, turns in counters.items() if len(key) == 3]
    assert all(turns == program.geometry.share for turns in dkv) and bool(dkv) == cut


@pytest.mark.parametrize("slow", [None, *Role], ids=lambda role: role.value if role else "none")
@pytest.mark.parametrize("cfg", [PLAIN, CAPPED, NARROW], ids=["d128", "softcap", "d64"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_empty_chains_back_to_back(cfg, cut, packed, slow):
    """With many empty chains in a row no role is passed by, however late it is."""
    build = dataclasses.replace(cfg, cut=cut, packed=packed)
    for seed, empty in enumerate((5, 6, 12, 30)):
        chains = [Chain(n, [] if n % (empty + 1) else [Task((n, 0), 0, True)], ("kv", n)) for n in range(64)]
        run([Cta(build, chains, {})], random.Random(seed), slow=slow)


def test_a_dk_writer_that_is_passed_by_is_noticed(monkeypatch):
    chains = [Chain(n, [] if n % 10 else [Task((n, 0), 0, True)], ("kv", n)) for n in range(64)]
    monkeypatch.setattr(protocol.DkWriter, "read_end", lambda self: None)
    with pytest.raises(AssertionError, match=r"overwritten before it was read|deadlock"):
        run([Cta(NARROW_CUT, chains, {}, specs=mbarriers(True, False))], random.Random(0), slow=Role.DK_WRITER)


def test_a_wrong_turn_is_noticed():
    with pytest.raises(AssertionError, match="deadlock"):
        run([Cta(PLAIN, [Chain(0, [Task(0, 1, False)])], {})], random.Random(0))


@pytest.mark.parametrize("seed", range(5))
def test_slopes_wait_for_the_dk_of_the_chain_before(seed, monkeypatch):
    """Slopes lie in the dS buffers, where dK of the chain before may still lie."""
    chains = [Chain(n, [Task((n, q), 0, True) for q in range(2)]) for n in range(6)]
    run([Cta(CAPPED, chains, {})], random.Random(seed))
    monkeypatch.setattr(protocol.Consumer, "await_ds_buffers", lambda self, entry: iter(()))
    with pytest.raises(AssertionError):
        run([Cta(CAPPED, chains, {})], random.Random(seed))


@pytest.mark.parametrize("seed", range(5))
def test_delta_is_split_when_it_has_landed(seed, monkeypatch):
    """The entry of a task is published before the loads of the task begin."""
    chains = [Chain(n, [Task((n, q), 0, True) for q in range(4)]) for n in range(6)]
    run([Cta(NARROW, chains, {})], random.Random(seed))
    wait = protocol.DkWriter.wait

    def early(self, name, index, parity):
        if name != "q_full":
            yield from wait(self, name, index, parity)

    monkeypatch.setattr(protocol.DkWriter, "wait", early)
    with pytest.raises(AssertionError, match="delta is not there"):
        run([Cta(NARROW, chains, {})], random.Random(seed))


def worker(cfg, **changes):
    """A worker with full, short and empty chains on shared dQ tiles. It comes to every barrier of every slot."""
    counts, turns, lasts = [3, 0, 1, 5, 2, 4, 0, 5], {}, {}
    for count in counts:
        for q in range(count):
            lasts[q] = lasts.get(q, 0) + 1
    chains = []
    for n, count in enumerate(counts):
        tasks = [Task(q, turns.get(q, 0), turns.get(q, 0) == lasts[q] - 1) for q in range(count)]
        turns.update({task.tile: task.turn + 1 for task in tasks})
        chains.append(Chain(n, tasks, ("kv", n)))
    return Cta(dataclasses.replace(cfg, peek=True), chains, {}, **changes)


def check_barriers(cfg=PLAIN, **changes):
    """Runs the worker with changed barrier tables. Fails if a declared barrier is not used, or a used one missing."""
    for seed in range(3):
        cta = worker(cfg, **changes)
        run([cta], random.Random(seed), patience=30_000)
        unused = [use for use in cta.unused if not (cfg.cut and unused_by_cut(use))]
        assert not unused, f"declared, but not used by the model: {sorted(map(str, unused))}"


def unused_by_cut(use):
    """Cut chains hand dK over through the dQ slots."""
    return use is NamedBarrier.CONSUMERS or (isinstance(use, tuple) and use[2] in ("dk_full", "dk_empty"))


@pytest.mark.parametrize("cfg", [PLAIN, NARROW, NARROW_CUT], ids=["d128", "d64", "d64-cut"])
def test_the_model_uses_every_declared_barrier(cfg):
    check_barriers(cfg)


def changed_specs(spec) -> Iterator[tuple[str, list[barriers.MBarrierSpec]]]:
    other = {Role.PRODUCER: Role.DK_WRITER}
    yield "removed", []
    yield "one arrival more", [dataclasses.replace(spec, arrivals=spec.arrivals + 1)]
    if spec.arrivals > 1:
        yield "one arrival fewer", [dataclasses.replace(spec, arrivals=spec.arrivals - 1)]
    yield "one barrier more", [dataclasses.replace(spec, count=spec.count + 1)]
    yield "one barrier fewer", [dataclasses.replace(spec, count=spec.count - 1)]
    for use in ("arrives", "waits"):
        first, *others = getattr(spec, use)
        more = next(role for role in Role if role not in (first, *others))
        yield f"another {use}", [dataclasses.replace(spec, **{use: (other.get(first, Role.PRODUCER), *others)})]
        yield f"one more {use}", [dataclasses.replace(spec, **{use: (first, *others, more)})]
    yield "a second one", [spec, dataclasses.replace(spec, name="another")]


CHANGES = [(PLAIN, s, why, specs) for s in MBARRIERS for why, specs in changed_specs(s)]
CHANGES += [(NARROW, s, why, specs) for s in DELTA_MBARRIERS.values() for why, specs in changed_specs(s)]
CHANGES += [(NARROW_CUT, s, why, specs) for s in CUT_DELTA_MBARRIERS.values() for why, specs in changed_specs(s)]
NAMES = [f"d{cfg.dim}{'-cut' * cfg.cut} {s.name}: {why}" for cfg, s, why, _ in CHANGES]


@pytest.mark.parametrize(("cfg", "spec", "why", "specs"), CHANGES, ids=NAMES)
def test_every_change_of_a_barrier_is_noticed(cfg, spec, why, specs):
    tables = [new for old in mbarriers(cfg.delta_in_product, cfg.cut) for new in (specs if old is spec else [old])]
    with pytest.raises(AssertionError):
        check_barriers(cfg, specs=tables)


@pytest.mark.parametrize("barrier", NamedBarrier)
@pytest.mark.parametrize("more", [-WARP, WARP, None], ids=["fewer", "more", "removed"])
def test_every_change_of_a_named_barrier_is_noticed(barrier, more):
    threads = {b: n for b, n in NAMED_BARRIER_THREADS.items() if b is not barrier}
    if more is not None:
        threads[barrier] = NAMED_BARRIER_THREADS[barrier] + more
    with pytest.raises(AssertionError):
        check_barriers(threads=threads)


def with_ring(depth):
    """Random chains on a task ring of another depth, with its barriers."""
    specs = [dataclasses.replace(s, count=depth) if s.name == "task_full" else s for s in MBARRIERS]
    for seed in range(40):
        rng = random.Random(seed)
        chains = [Chain(n, [Task((n, q), 0, True) for q in range(rng.choice([0, 0, 1, 2, 5]))]) for n in range(12)]
        run([Cta(PLAIN, chains, {}, specs=specs, ring=depth)], rng)


def test_the_depth_that_the_ring_needs_is_enough():
    with_ring(barriers.ring_depth_needed(1))


def test_a_shallow_ring_is_noticed():
    with pytest.raises(AssertionError, match="overwritten before it was read"):
        with_ring(4)


# ---- the model against the kernel's source -------------------------------------------------------------------

KINDS = {"wait": "wait", "is_done": "peek", "arrive": "arrive", "expect": "arrive", "leave": "arrive"}
ROLES = ("Producer", "Consumer", "DqWriter", "DkWriter")
FUNCTIONS = ("publish", "await_entry")


def functions_of(*sources):
    """The methods of the roles, and the functions that they share, by name."""
    functions = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name in ROLES:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        functions[node.name, method.name] = method
            elif isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                functions["", node.name] = node
    return functions


def calls_of(functions, role, name, inlined=frozenset()) -> Iterator[tuple[str, str]]:
    """The barrier calls of a function in the order of its source, and its calls of functions that have some.

    Functions in `inlined` are replaced by their own calls.
    """

    def visit(node):
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "NamedBarrier":
            yield "sync", node.attr
        if not isinstance(node, ast.Call):
            return
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        on_self = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "self"
        target = (role, called) if on_self else ("", called)
        literal = node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
        if called in KINDS and literal:
            yield KINDS[called], node.args[0].value
        elif target in inlined:
            yield from calls_of(functions, *target, inlined)
        elif target in functions and any(calls_of(functions, *target, inlined)):
            yield "call", called

    for statement in functions[role, name].body:
        yield from visit(statement)


def outline(functions, inlined=frozenset()):
    """By function: its calls, with repeated ones written once. Branches of a build repeat calls."""
    calls = {at: [call for call, _ in groupby(calls_of(functions, *at, inlined))] for at in functions}
    return {at: made for at, made in calls.items() if made and at not in inlined}


def kernel_sources():
    names = ("producer.py", "consumer.py", "dq_writer.py", "dk_writer.py", "tasks.py")
    return [(DEVICE / name).read_text(encoding="utf-8") for name in names]


def model_outline(kernel):
    """The model's outline, without methods that only the model has."""
    model = functions_of(Path(protocol.__file__).read_text(encoding="utf-8"))
    return outline(model, frozenset(set(model) - set(kernel)))


def test_kernel_and_model_make_the_same_barrier_calls():
    kernel = outline(functions_of(*kernel_sources()))
    assert kernel == model_outline(kernel)
    named = {name for calls in kernel.values() for kind, name in calls if kind in ("wait", "arrive")}
    assert named == {spec.name for spec in MBARRIERS}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('self.leave("k_empty", 0)\n        # (7)', "pass\n        # (7)"),
        ('self.leave("do_empty", stage)', 'self.leave("q_empty", stage)'),
        ('cta.bars.wait("v_full", 0, odd)', "pass"),
        ("self.sync_consumers()  #", "#"),
        ('cta.bars.wait("q_empty", stage, free)', 'cta.bars.wait("do_empty", stage, free)'),
        ("            self.fetch_sum(writer, entry, target)", "            pass"),
        ('cta.bars.arrive("dk_empty")', "pass"),
        (
            'cta.bars.wait("dk_empty", 0, (i & 1) ^ 1)\n                self.leave("dk_full", 0)',
            'self.leave("dk_full", 0)',
        ),
    ],
)
def test_a_change_of_the_kernel_is_noticed(old, new):
    sources = kernel_sources()
    assert sum(old in source for source in sources) == 1
    kernel = outline(functions_of(*(source.replace(old, new) for source in sources)))
    assert kernel != model_outline(kernel)
