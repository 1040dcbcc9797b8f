"""Context parallel attention has the bits of one process, on 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dash_attn.distributed.layout import LAYOUTS, MODES
from dash_attn.distributed.scale import predict, ways_of
from dash_attn.problem import CAUSAL, Features, Problem, documents
from dash_attn.tiling import TileShape
from tests.distributed import jobs, memory, tiles, training, wrong
from tests.distributed.jobs import Case
from tests.distributed.pool import Pool

SIZES = (1, 2, 4, 8)
SMALL = 1  # bytes of a chunk: every kv head is gathered by itself
LARGE = 2**30


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(max(SIZES))
    yield pool
    pool.close()


PACK = [0, 5, 5, 22, 23, 48]

# Results in 16 bits seldom show in which order they were added. So most cases are float32.
CASES = {
    "full": Case(heads=(8, 4), dtype=torch.bfloat16),
    "causal": Case(heads=(8, 4), arguments={"causal": True}),
    "window": Case(batch=2, arguments={"causal": True, "window": (9, 0)}),
    "pack": Case(arguments={"cu_seqlens": PACK}),
    "causal pack": Case(heads=(8, 4), arguments={"cu_seqlens": PACK, "causal": True}),
    "softcap": Case(heads=(8, 4), arguments={"causal": True, "softcap": 2.0}),
    "dropout": Case(batch=2, heads=(8, 4), arguments={"causal": True, "dropout": 0.3, "seed": 5}),
    "dropout in a pack": Case(arguments={"cu_seqlens": PACK, "dropout": 0.4, "seed": [3, 1, 4, 1, 5]}),
    "values": Case(batch=2, heads=(8, 4), arguments={"causal": True}, dim_v=12),
    "lse": Case(batch=2, heads=(8, 4), arguments={"causal": True}, with_lse=True),
    "sinks in a pack": Case(arguments={"cu_seqlens": PACK, "causal": True, "sinks": torch.linspace(-1.0, 2.0, 4)}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_mode_layout_and_number_of_ranks_has_the_bits_of_one_process(pool: Pool, name: str) -> None:
    assert pool.run(jobs.equal_everywhere, CASES[name], SIZES, SMALL)[0] == {}


class Tiled(NamedTuple):
    """A case, the shape of its tiles, and a policy that gives dQ, dK and dV another order than `auto`."""

    case: Case
    shape: TileShape
    other: str = "descending"


# There are 16 ranges of 11 tokens. The first and the third document lie in one range each, and the third has several
# tiles. The fourth is empty. The others lie in several ranges.
UNEVEN = [0, 5, 44, 54, 54, 150, 176]
TILED = {
    "causal": Tiled(Case(arguments={"causal": True}), TileShape(4, 16)),
    "window": Tiled(Case(batch=2, heads=(2, 2), arguments={"causal": True, "window": (40, 0)}), TileShape(4, 8)),
    "pack": Tiled(Case(arguments={"cu_seqlens": UNEVEN}), TileShape(4, 4), "spt"),
    "causal pack": Tiled(Case(arguments={"cu_seqlens": UNEVEN, "causal": True}), TileShape(4, 4)),
}


@pytest.mark.parametrize("name", TILED)
def test_panels_of_several_tiles(pool: Pool, name: str) -> None:
    """The largest panels have 3 q tiles, and 7 kv tiles or more. So their sums have an order.

    The control: the bits differ if one rank of eight orders its panels by another policy.
    """
    case, shape, other = TILED[name]
    case = replace(case, lengths=(UNEVEN[-1], UNEVEN[-1]))
    assert pool.run(tiles.with_tiles, shape, jobs.equal_everywhere, case, SIZES, SMALL)[0] == {}
    differ = pool.run(tiles.with_tiles, shape, jobs.another_order, case, other)[0]
    assert differ == {mode: ["dq", "dk", "dv"] for mode in MODES}


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    heads_kv = chance.choice([1, 2, 3, 4, 8])
    lengths = chance.choice([(n, n) for n in (1, 7, 40, 65)] + [(33, 50), (50, 33), (16, 3)])
    arguments: dict[str, Any] = {"causal": chance.random() < 0.6}
    if chance.random() < 0.4:
        arguments["window"] = chance.choice([(8, 0), (5, 6), (0, 20)])
    if chance.random() < 0.5:
        count = chance.randint(1, 5)
        cuts = [sorted(chance.randint(0, n) for _ in range(count)) for n in lengths]
        arguments |= {"cu_seqlens": [0, *cuts[0], lengths[0]], "cu_seqlens_k": [0, *cuts[1], lengths[1]]}
    return Case(
        chance.choice([1, 2]),
        lengths,
        (heads_kv * chance.choice([1, 2]), heads_kv),
        chance.choice([8, 20]),
        chance.choice([torch.float32] * 6 + [torch.bfloat16, torch.float16]),
        chance.choice([16, 32]),
        arguments,
        seed,
        chance.choice([None, 4, 13]),
        chance.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(pool: Pool, seed: int) -> None:
    case, layout = random_case(seed), LAYOUTS[seed // 2 % 2]
    size = SIZES[1 + seed % 3]
    assert pool.run(jobs.equal_everywhere, case, (size,), (SMALL, LARGE)[seed % 2], (layout,))[0] == {}, case


@pytest.mark.parametrize("name", ["causal", "causal pack", "lse"])
def test_keys_that_have_not_arrived_change_nothing(pool: Pool, name: str) -> None:
    assert pool.run(jobs.poisoned, CASES[name])[0] == {}


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_the_gradient_of_sinks_is_that_of_the_own_queries(pool: Pool, mode: str) -> None:
    case = CASES["sinks in a pack"]
    for size in (1, 2, 4):
        assert all(pool.run(jobs.sink_gradients, replace(case, with_lse=size != 2), size, mode))


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_losses_of_lse(pool: Pool, mode: str) -> None:
    for differ, error in pool.run(jobs.losses_of_lse, mode, 2)[:2]:
        assert differ == []
        assert "gradient of lse is given on rank 0, not given (add 0 * lse.sum() to the loss) on rank 1" in error


def test_another_order_of_the_sums_has_other_bits(pool: Pool) -> None:
    """The control: the comparison above can fail."""
    assert pool.run(jobs.reversed_fold, CASES["causal"])[0] == ["dk", "dv"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["causal", "pack", "values"])
def test_explain_says_what_is_sent(pool: Pool, name: str, mode: str) -> None:
    case = CASES[name]
    results = pool.run(jobs.traffic, case, mode)
    for said, (forward, backward) in results:
        assert (said.forward_bytes, said.backward_bytes) == (forward, backward)
        assert said.heads_over * said.tokens_over == said.ranks == 8
        assert 0 < said.exposed_ms < said.predicted_ms
    mask, features = documents(PACK) if name == "pack" else CAUSAL, Features(dim_v=case.dim_v)
    problem = Problem(case.batch, *case.heads, *case.lengths, case.dim, "float32", mask=mask, features=features)
    ways = 2 if mode == "a2a+all_gather" else ways_of(problem, 8, mode)[0]  # on a mesh the caller chooses
    predicted = predict(problem, 8, mode, "zigzag", ways).sent_bytes  # by one of the ranks
    assert predicted in {said.forward_bytes + said.backward_bytes for said, _ in results}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("heads", [(8, 8), (2, 2)], ids=str)
def test_explain_says_what_is_held(pool: Pool, heads: tuple[int, int], chunk_bytes: int, mode: str) -> None:
    """Two kv heads on 8 ranks are `a2a` over two of them, and gathered by parts of a group.

    Beside what `explain` says there are the results, and a part of one that is copied.
    """
    case = Case(lengths=(256, 256), heads=heads, dim=32, arguments={"causal": True})
    assert_held(pool.run(memory.measured, case, mode, chunk_bytes))


def test_explain_says_what_panels_of_several_tiles_hold(pool: Pool) -> None:
    case = Case(lengths=(256, 256), heads=(4, 2), dim=32, arguments={"causal": True})
    assert_held(pool.run(tiles.with_tiles, TileShape(4, 16), memory.measured, case, "a2a+all_gather", SMALL))


def assert_held(every: list[memory.Measured]) -> None:
    for said, most, results, part in every:
        assert results <= most["other"] <= results + part
        assert said.gathered_bytes == most.get("gathered", 0)
        workspace = most["workspace"]
        if said.tokens_over > 1:
            assert said.sums_bytes == most["sums"]
        else:
            assert said.sums_bytes == 0
            workspace += most["sums"]  # all panels lie on the rank, and their sums are workspace
        assert 0.85 * said.workspace_bytes < workspace <= said.workspace_bytes


@pytest.mark.parametrize(("heads_kv", "heads_over"), [(8, 8), (16, 8), (4, 1), (1, 1)])
def test_auto_shares_heads_over_all_ranks_or_none(pool: Pool, heads_kv: int, heads_over: int) -> None:
    case = Case(heads=(16, heads_kv), arguments={"causal": True})
    assert {said.heads_over for said, _ in pool.run(jobs.traffic, case, "auto")} == {heads_over}


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([{}, {"causal": True}, {}, {}], "window (left, right) is (-1, -1) on ranks 0, 2, 3, (-1, 0) on rank 1"),
    ([{"mode": "a2a"}] * 3 + [{"mode": "all_gather"}], "number of ranks that share heads (mode)"),
    ([{"layout": "zigzag"}, *[{"layout": "contiguous"}] * 3], "panels and layout is (16, 'zigzag') on rank 0"),
    ([{"dtype": torch.float16}, *[{}] * 3], "dtype is torch.float16 on rank 0, torch.float32 on ranks 1, 2, 3"),
    ([{}, {"softcap": 5.0}, {}, {}], "softcap is 0.0 on ranks 0, 2, 3, 5.0 on rank 1"),
    ([{"dropout": 0.1, "seed": 3}] * 3 + [{"dropout": 0.1, "seed": 4}], "seed is 3 on ranks 0, 1, 2, 4 on rank 3"),
    ([{"dropout": 0.1}, *[{}] * 3], "dropout needs a seed, the same on every rank: give seed"),
    ([{"sinks": torch.zeros(4)}, *[{}] * 3], "sinks is [0.0, 0.0, 0.0, 0.0] on rank 0, not given on ranks 1, 2, 3"),
    (
        [{"sinks": torch.tensor([0.5, 2.0, 3.0, last])} for last in (4.0, 4.0, 4.0, 5.0)],
        "sinks is [0.5, 2.0, 3.0, 4.0] on ranks 0, 1, 2, [0.5, 2.0, 3.0, 5.0] on rank 3",
    ),
    ([{"sinks": torch.zeros(3)}, *[{}] * 3], "sinks must have one number for each of the 4 heads of q"),
    ([{}, {}, {"scale": 0.5}, {}], "scale is None on ranks 0, 1, 3, 0.5 on rank 2"),
    ([{}, {"scale": "no"}, {}, {}], "scale must be a finite number from -2**120 to 2**120, or None; got 'no'"),
    ([{"rows": 3}, *[{}] * 3], "q has [3, 12, 12, 12] tokens on the ranks"),
    ([{"panels": 8}] * 3 + [{"panels": 16}], "panels and layout"),
]


def test_every_rank_names_the_argument_that_differs(pool: Pool) -> None:
    said = pool.run(jobs.own_arguments, [arguments for arguments, _ in WRONG], 4)
    for number, (_, message) in enumerate(WRONG):
        for rank in range(4):
            assert message in said[rank][number]


ON_ONE_RANK: list[tuple[dict[str, Any], str]] = [
    ({}, "no error"),
    ({"q": None}, "q must be a torch.Tensor, got NoneType"),
    ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
    ({"q": None, "k": None, "v": None}, "q must be a torch.Tensor, got NoneType"),
    ({"q": torch.empty(24, 4, 8, device="meta")}, "k must have the device of q, meta; got cpu"),
    ({"cu_seqlens": ["a"]}, "cu_seqlens must be a list of whole numbers, or a tensor of them (int32); got ['a']"),
    ({"cu_seqlens": [0, 20.5, 48]}, "cu_seqlens must be a list of whole numbers"),
    ({"cu_seqlens_k": 48}, "cu_seqlens_k must be a list of whole numbers"),
    ({"scale": [1.0]}, "scale must be a finite number from -2**120 to 2**120, or None; got [1.0]"),
]


def test_what_one_rank_refuses_is_an_error_on_all(pool: Pool) -> None:
    first, last, *_ = pool.run(wrong.on_one_rank, [call for call, _ in ON_ONE_RANK])
    for (_, message), said, others in zip(ON_ONE_RANK, last, first, strict=True):
        assert [each for each in (*said, *others) if message not in each] == []
        if message != "no error":
            assert all(each.startswith("ValueError: rank 1 refuses its arguments: ") for each in others)


UNSHARD_ON_ONE_RANK: list[tuple[dict[str, Any], str]] = [
    ({}, "no error"),
    ({"x": torch.zeros(4, 3)}, "shape of x beside dim is (4,) on rank 0, (3,) on rank 1"),
    ({"x": torch.zeros(4, 4, dtype=torch.int16)}, "dtype is torch.float32 on rank 0, torch.int16 on rank 1"),
    ({"x": torch.zeros(4, 4, 1)}, "shape of x beside dim is (4,) on rank 0, (4, 1) on rank 1"),
    ({"x": torch.tensor(1.0)}, "dim must be a dimension of x, which has shape (); got 0"),
    ({"x": torch.zeros(4, 4, requires_grad=True)}, "unshard has no gradient"),
    ({"x": torch.zeros(4, 4, device="meta")}, "x must be on a device that the group serves, got meta"),
    ({"x": None}, "x must be a torch.Tensor, got NoneType"),
    ({"dim": 1}, "dim is 0 on rank 0, 1 on rank 1"),
    ({"dim": 1.0}, "dim must be a whole number, got 1.0"),
    ({"dim": -2}, "no error"),
    ({"dim": 2}, "dim must be a dimension of x, which has shape (4, 4); got 2"),
    ({"layout": "contiguous"}, "panels and layout is (16, 'zigzag') on rank 0, (16, 'contiguous') on rank 1"),
]


def test_what_one_rank_refuses_to_unshard_is_an_error_on_all(pool: Pool) -> None:
    for said in pool.run(wrong.unshard_on_one_rank, [call for call, _ in UNSHARD_ON_ONE_RANK])[:2]:
        for (_, message), error in zip(UNSHARD_ON_ONE_RANK, said, strict=True):
            assert message in error
            assert error.startswith(("ValueError: ", "no error"))


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_ranks_that_make_different_calls_get_an_error_and_no_numbers(pool: Pool, mode: str) -> None:
    expected = {
        "without_backward": r"backward of call \d+ on rank 0, forward on rank 1",
        "checkpoints_in_another_order": r"backward of call (\d+) on rank 0, backward of call (?!\1)\d+ on rank 1",
        "after_checkpoint": "forward again on rank 0, forward on rank 1",
        "after_reentrant_checkpoint": "forward again on rank 0, forward on rank 1",
        "between_checkpoints": "forward again on rank 0, forward on rank 1",
        "explained": "forward on rank 0, explain on rank 1",
        "gathered": "forward on rank 0, unshard on rank 1",
        "in_another_order": r"backward of call (\d+) on rank 0, backward of call (?!\1)\d+ on rank 1",
    }
    for said in pool.run(wrong.other_calls_on_one_rank, mode)[:2]:
        assert said.keys() == expected.keys()
        for name, (error, after) in said.items():
            assert re.match(f"ValueError: the ranks of the group make different calls: {expected[name]}", error), error
            assert after == "no error"


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_a_second_derivative_on_one_rank_is_an_error_on_all(pool: Pool, mode: str) -> None:
    other, own, *_ = pool.run(wrong.second_derivative_on_one_rank, mode)
    message = "context_parallel_attention can be differentiated once, not twice: leave out create_graph=True"
    assert other == [f"ValueError: rank 1 refuses its arguments: {message}", "no error"]
    assert own == [f"NotImplementedError: {message}", "no error"]


def test_a_part_has_memory_of_its_own(pool: Pool) -> None:
    assert pool.run(training.shared_memory) == [[]] * 8


def test_every_dtype_is_cut_and_joined(pool: Pool) -> None:
    assert pool.run(training.kinds_that_change) == [[]] * 8


def test_what_cannot_be_cut_is_refused(pool: Pool) -> None:
    for said in pool.run(wrong.shard_of_nothing):
        assert said == "ValueError: dim must be a dimension of x, which has shape (); got 0"


REFUSED = (
    "differentiated once, not twice",
    "differentiated once, not twice",
    "mask has tiles, which are not cut",
    "mode must be one of auto, a2a, all_gather, a2a+all_gather, got 'ring'",
    "needs a group of two dimensions, a DeviceMesh",
    "group must be a process group that this process belongs to",
    "panels must be a multiple of 4 for layout 'zigzag' on 2 ranks; got 6",
    "unshard has no gradient",
    "x has [24, 20] rows on the ranks, where layout 'zigzag' with 16 panels puts [20, 24]",
)


def test_what_is_refused(pool: Pool) -> None:
    for said in pool.run(jobs.refusals, 2)[:2]:
        for message, expected in zip(said, REFUSED, strict=True):
            assert expected in message


def test_ranks_of_a_mesh_that_do_not_ascend_are_refused_on_all_of_them(pool: Pool) -> None:
    """torch sorts the ranks of a group, so that their numbers there would not be a grid."""
    meshes = ([[0, 1], [2, 3]], [[3, 0], [1, 2]], [[2, 3], [0, 1]], [3, 2, 1, 0])
    for rank, (good, *others) in enumerate(pool.run(wrong.on_meshes, meshes)):
        if rank < 4:
            assert good == ["no error"] * 4
        for mesh, said in zip(meshes[1:], others, strict=True):
            expected = f"whose ranks ascend along every dimension, got {mesh}" if rank < 4 else "that this process"
            assert all(each.startswith(f"ValueError: group must be a DeviceMesh {expected}") for each in said)


def test_ranks_of_a_mesh_and_of_its_dimension_are_named(pool: Pool) -> None:
    said = "the ranks give different groups: a mesh of 1 x 2 ranks on rank 0, a group of 2 ranks on rank 1"
    assert pool.run(wrong.on_a_mesh_and_on_its_dimension)[:2] == [[f"ValueError: {said}"] * 3] * 2


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
@pytest.mark.parametrize(
    "way",
    [
        *("checkpoint", "checkpoint reentrant", "accumulate", "strides", "late"),
        *("compile", "compile dynamic", "compile lse", "compile checkpoint", "inductor"),
    ],
)
def test_training(pool: Pool, way: str, mode: str) -> None:
    assert pool.run(training.in_training, way, mode, 2)[:2] == [[], []]


def test_tensor_parallel_around_it(pool: Pool) -> None:
    assert pool.run(jobs.beside_tensor_parallel, CASES["causal"]) == [[]] * 8


def test_fsdp_around_it(pool: Pool) -> None:
    assert all(pool.run(jobs.under_fsdp, 2))


def test_data_parallel_around_it(pool: Pool) -> None:
    assert pool.run(jobs.data_parallel_around_it) == [[]] * 8


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_in_megatron(pool: Pool, mode: str) -> None:
    assert pool.run(jobs.in_megatron, mode, 2)[:2] == [True, True]


def test_torch_cuts_the_tokens_in_the_same_way(pool: Pool) -> None:
    assert all(pool.run(jobs.cut_by_torch))


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_operators_are_as_torch_expects_them(pool: Pool, mode: str) -> None:
    pool.run(jobs.check_operators, mode, 2)


@pytest.mark.parametrize("mode", ["a2a", "all_gather"])
def test_a_backward_without_order_is_an_error_if_torch_is_strict(pool: Pool, mode: str) -> None:
    for every, one in pool.run(memory.strict, Case(heads=(4, 4)), mode, 2)[:2]:
        assert "was called with deterministic=False" in every
        assert "torch.use_deterministic_algorithms is True on rank 0, False on rank 1" in one


DEATHS = [("all_gather", "before"), *((mode, at) for mode in ("a2a", "all_gather") for at in ("forward", "backward"))]


@pytest.mark.parametrize(("mode", "where"), DEATHS)
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path, mode: str, where: str) -> None:
    """A rank that talks to the dead one gets an error at once. The others wait for the time limit of the group."""
    limit, entering = 5.0, 1.0  # a rank may enter the collective after the death, and the limit counts from there
    pool = Pool(4)
    try:
        pool.start(jobs.die_or_wait, mode, where, limit, str(tmp_path / "grave"))
        *survivors, dead = pool.results()
        assert dead is None
        for error, seconds in survivors:
            assert error != "no error"
            assert seconds <= limit + entering
    finally:
        pool.close()
