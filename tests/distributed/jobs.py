"""What the processes of the tests do. The functions are called by name, in processes of their own."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

import dash_attn
from dash_attn.api.arguments import Arguments
from dash_attn.api.extras import Given
from dash_attn.distributed import context_parallel_attention, explain, ops, ranks, shard, tokens, unshard
from dash_attn.distributed.attention import Sharing, terms_of
from dash_attn.distributed.layout import LAYOUTS, MODES
from dash_attn.distributed.routes import Routes
from dash_attn.integrations.megatron import DashCoreAttention
from tests.distributed.pool import Groups
from tests.distributed.tiles import disordered

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A problem. Packed if `cu_seqlens` is given: then the batch is left out.

    dim_v     head dim of v, if not that of q
    with_lse  the loss depends on lse too
    device    of all tensors; the numbers are drawn on the CPU
    """

    batch: int = 1
    lengths: tuple[int, int] = (48, 48)
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    dtype: torch.dtype = torch.float32
    panels: int = 16
    arguments: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dim_v: int | None = None
    with_lse: bool = False
    device: str = "cpu"

    @property
    def packed(self) -> bool:
        return "cu_seqlens" in self.arguments

    @property
    def dim_of_tokens(self) -> int:
        return 0 if self.packed else 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of out."""
        noise = torch.Generator().manual_seed(self.seed)
        batch = () if self.packed else (self.batch,)
        dim_v = self.dim_v or self.dim
        sides = ((0, self.dim), (1, self.dim), (1, dim_v), (0, dim_v))
        q, k, v, dout = (
            torch.randn((*batch, self.lengths[side], self.heads[side], dim), generator=noise).to(
                self.device, self.dtype
            )
            for side, dim in sides
        )
        return q, k, v, dout

    def dlse(self) -> Tensor:
        """The gradient of lse."""
        noise, batch = torch.Generator().manual_seed(self.seed + 1), () if self.packed else (self.batch,)
        return torch.randn((*batch, self.heads[0], self.lengths[0]), generator=noise).to(self.device)

    def gradients(self, results: tuple[Tensor, Tensor], leaves: list[Tensor], given: tuple[Tensor, Tensor]) -> Any:
        """Of a loss of out, and of lse where the case has one. `given` are the gradients of out and lse."""
        count = 2 if self.with_lse else 1
        return torch.autograd.grad(results[:count], leaves, given[:count])

    def alone(self) -> list[Tensor]:
        """The results in one process."""
        q, k, v, dout = self.tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        results = dash_attn.attention(*leaves, panels=self.panels, return_lse=True, **self.arguments)
        return [*(x.detach() for x in results), *self.gradients(results, leaves, (dout, self.dlse()))]


def apart(case: Case, group: Any, mode: str, layout: str) -> list[Tensor]:
    """The results on the ranks of a group, joined."""
    place = {"group": group, "layout": layout, "panels": case.panels}
    q, k, v, dout = (shard(x, dim=case.dim_of_tokens, **place) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = context_parallel_attention(*leaves, mode=mode, return_lse=True, **place, **case.arguments)
    grads = case.gradients(results, leaves, (dout, shard(case.dlse(), dim=-1, **place)))
    out, lse = (x.detach() for x in results)
    whole = [unshard(x, dim=case.dim_of_tokens, **place) for x in (out, *grads)]
    return [whole[0], unshard(lse, dim=-1, **place), *whole[1:]]


def differences(results: list[Tensor], expected: list[Tensor]) -> list[str]:
    """The names of the results whose bits differ."""
    return [name for name, a, b in zip(NAMES, results, expected, strict=True) if not same_bits(a, b)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """0 and -0 differ, and a NaN equals itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def equal_everywhere(
    groups: Groups,
    case: Case,
    sizes: tuple[int, ...],
    chunk_bytes: int,
    layouts: tuple[str, ...] = LAYOUTS,
    modes: tuple[str, ...] = MODES,
) -> dict[str, list[str]]:
    """Compare every number of ranks, mode and layout with one process: the results that differ."""
    tokens.CHUNK_BYTES = chunk_bytes
    expected = case.alone() if 1 in groups else []
    wrong: dict[str, list[str]] = {}
    on_one_dimension = tuple(mode for mode in modes if mode != "a2a+all_gather")
    places: list[tuple[str, Any, tuple[str, ...]]] = [
        (f"{size} ranks", groups[size], on_one_dimension) for size in sizes if size in groups
    ]
    if on_one_dimension != modes:
        places += [(f"mesh {shape}", mesh, ("auto",)) for shape, mesh in meshes(groups, case).items()]
    for name, group, its_modes in places:
        for mode in its_modes:
            for layout in layouts:
                results = apart(case, group, mode, layout)
                if expected and (differ := differences(results, expected)):
                    wrong[f"{name}, {mode}, {layout}"] = differ
    return wrong


def poisoned(groups: Groups, case: Case) -> dict[str, list[str]]:
    """`equal_everywhere`, and memory that nothing was written to holds NaN: also keys that have not arrived."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        return equal_everywhere(groups, case, (2, 4), 2**30, ("zigzag",))
    finally:
        torch.use_deterministic_algorithms(False)


def meshes(groups: Groups, case: Case) -> dict[tuple[int, int], DeviceMesh]:
    """Meshes over all processes, (tokens, heads), whose second dimension divides the kv heads."""
    size = max(groups)
    shapes = [(size // ways, ways) for ways in (2, 4) if size > ways and case.heads[1] % ways == 0]
    return {shape: mesh_of(shape) for shape in shapes}


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def traffic(groups: Groups, case: Case, mode: str) -> tuple[Any, list[int]]:
    """What `explain` says, and the bytes of floating-point tensors sent to other ranks in forward and backward."""
    group = mesh_of((max(groups) // 2, 2)) if mode == "a2a+all_gather" else None
    counted = [0]
    exchange, gather = torch.distributed.all_to_all_single, ranks._all_gather

    def counted_exchange(into: Tensor, x: Tensor, expected: list[int], sizes: list[int], **others: Any) -> Any:
        counted[0] += (sum(sizes) - sizes[others["group"].rank()]) * x.element_size()
        return exchange(into, x, expected, sizes, **others)

    def counted_gather(into: Tensor, x: Tensor, **others: Any) -> Any:
        counted[0] += x.nbytes * (others["group"].size() - 1) * x.is_floating_point()
        return gather(into, x, **others)

    tokens.CHUNK_BYTES = 1
    q, k, v, dout = (shard(x, group=group, dim=case.dim_of_tokens) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    said = explain(*leaves, group=group, mode=mode, **case.arguments)
    torch.distributed.all_to_all_single, ranks._all_gather = counted_exchange, counted_gather
    try:
        out, _ = context_parallel_attention(*leaves, group=group, mode=mode, return_lse=True, **case.arguments)
        forward, counted[0] = counted[0], 0
        out.backward(dout)  # no gradient of lse, so none travels
    finally:
        torch.distributed.all_to_all_single, ranks._all_gather = exchange, gather
    return said, [forward, counted[0]]


def sink_gradients(groups: Groups, case: Case, size: int, mode: str) -> bool:
    """Whether the gradients of the sinks, added over ranks, are the gradient in one process."""
    if size not in groups:
        return True
    group, given = groups[size], {**case.arguments, "sinks": case.arguments["sinks"].clone().requires_grad_()}
    (q, k, v, dout), dlse, given["return_lse"] = case.tensors(), case.dlse(), True
    (alone,) = case.gradients(dash_attn.attention(q, k, v, **given), [given["sinks"]], (dout, dlse))
    q, k, v, dout = (shard(x, group=group, dim=case.dim_of_tokens) for x in (q, k, v, dout))
    results = context_parallel_attention(q, k, v, group=group, mode=mode, **given)
    (own,) = case.gradients(results, [given["sinks"]], (dout, shard(dlse, group=group, dim=-1)))
    is_part = size == 1 or not torch.allclose(own, alone, rtol=1e-4)
    torch.distributed.all_reduce(own, group=group)
    return is_part and torch.allclose(own, alone, rtol=1e-4, atol=1e-6)


def losses_of_lse(groups: Groups, mode: str, size: int) -> tuple[list[str], str] | None:
    """What differs from one process if the loss has lse alone, and the error if it has lse on one rank alone."""
    if size not in groups:
        return None
    group, case = groups[size], Case(arguments={"causal": True})
    q, k, v, _ = case.tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = dash_attn.attention(*leaves, panels=case.panels, return_lse=True, **case.arguments)
    alone = torch.autograd.grad(lse, leaves, case.dlse())
    leaves = [shard(x.detach(), group=group, dim=1).requires_grad_() for x in leaves]
    how: dict[str, Any] = {"group": group, "mode": mode, "return_lse": True, **case.arguments}
    _, lse = context_parallel_attention(*leaves, **how)
    own = torch.autograd.grad(lse, leaves, shard(case.dlse(), group=group, dim=-1))
    pairs = zip(("dq", "dk", "dv"), own, alone, strict=True)
    differ = [name for name, a, b in pairs if not same_bits(unshard(a, group=group, dim=1), b)]
    out, lse = context_parallel_attention(*leaves, **how)
    loss = out.sum() if group.rank() else out.sum() + lse.sum()
    try:
        loss.backward()
    except ValueError as error:
        return differ, str(error)
    return differ, "no error"


def reversed_fold(groups: Groups, case: Case) -> list[str]:
    """The control: the results that differ if dK and dV are added in another order."""
    of = Routes.of

    def turned(problem: Any, layout: Any, rank: int) -> Routes:
        routes = of(problem, layout, rank)
        # The first addend stays the first, because it alone has all rows.
        sums = tuple(replace(each, addends=(each.addends[0], *reversed(each.addends[1:]))) for each in routes.sums)
        return replace(routes, sums=sums)

    tokens.Routes.of = staticmethod(turned)  # type: ignore[assignment]
    try:
        ops._call.cache_clear()
        return differences(apart(case, None, "all_gather", "zigzag"), case.alone())
    finally:
        tokens.Routes.of = staticmethod(of)  # type: ignore[method-assign]
        ops._call.cache_clear()


def another_order(groups: Groups, case: Case, policy: str) -> dict[str, list[str]]:
    """The control: the last of all ranks orders its panels by another policy. What differs, by mode."""
    size = max(groups)
    group, mesh, expected = groups[size], mesh_of((size // 2, 2)), case.alone() if 1 in groups else []
    differ: dict[str, list[str]] = {}
    for mode in MODES:
        with disordered(policy) if group.rank() == size - 1 else nullcontext():
            results = apart(case, mesh if mode == "a2a+all_gather" else group, mode, "zigzag")
        if expected:
            differ[mode] = differences(results, expected)
    return differ


def own_arguments(groups: Groups, calls: list[list[dict[str, Any]]], size: int) -> list[str]:
    """Each rank calls with its own arguments: the errors of this rank."""
    said = list[str]()
    if size not in groups:
        return said
    group, case = groups[size], Case()
    for arguments in calls:
        mine = dict(arguments[group.rank()])
        dtype, rows, layout = mine.pop("dtype", case.dtype), mine.pop("rows", None), mine.get("layout", "zigzag")
        q, k, v, _ = (shard(x.to(dtype), group=group, dim=1, layout=layout) for x in case.tensors())
        try:
            context_parallel_attention(q[:, :rows], k, v, group=group, **mine)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("no error")
    return said


def beside_tensor_parallel(groups: Groups, case: Case) -> list[str]:
    """Half of the heads on each half of the ranks, and the tokens over the ranks of a half: the results that differ."""
    mesh = init_device_mesh("cpu", (2, max(groups) // 2), mesh_dim_names=("tp", "cp"))
    half = mesh.get_local_rank("tp")
    q, k, v, dout = (x.chunk(2, 2)[half] for x in case.tensors())
    leaves = [shard(x, group=mesh["cp"], dim=1).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*leaves, group=mesh["cp"], **case.arguments)
    grads = torch.autograd.grad(out, leaves, shard(dout, group=mesh["cp"], dim=1))
    whole = [unshard(x, group=mesh["cp"], dim=1) for x in (out.detach(), *grads)]
    out, _, *expected = case.alone()
    pairs = zip(("out", "dq", "dk", "dv"), whole, (out, *expected), strict=True)
    return [name for name, mine, every in pairs if not same_bits(mine, every.chunk(2, 2)[half])]


class Layer(torch.nn.Module):
    """A projection, attention over the tokens of all ranks, and another projection."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.heads = group, (4, 8)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(context_parallel_attention(*self._parts(x), group=self.group, causal=True).flatten(2))

    def alone(self, x: Tensor) -> Tensor:
        """With all tokens in one process."""
        return self.out(dash_attn.attention(*self._parts(x), causal=True, panels=16).flatten(2))

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(-3)


def under_fsdp(groups: Groups, size: int) -> bool:
    """Whether a layer under FSDP2, over the ranks that share its tokens, has the gradients of the plain layer."""
    if size not in groups:
        return True
    group = groups[size]
    torch.manual_seed(0)
    plain, x = Layer(group), shard(torch.randn(1, 64, 32), group=group, dim=1)
    plain(x).square().sum().backward()
    for weight in plain.parameters():
        torch.distributed.all_reduce(weight.grad, group=group)
    torch.manual_seed(0)
    sharded = fully_shard(Layer(group), mesh=DeviceMesh.from_group(group, "cpu"))
    sharded(x).square().sum().backward()
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad.full_tensor() * size, rtol=1e-4, atol=1e-5) for a, b in pairs)


def check_operators(groups: Groups, mode: str, size: int) -> None:
    """torch's own checks of the operators: schema, and shapes and strides against those that torch.compile expects."""
    if size not in groups:
        return
    group = groups[size]
    case = Case(dim_v=12)
    q, k, v, dout = (shard(x, group=group, dim=1) for x in case.tensors())
    dlse = shard(case.dlse(), group=group, dim=-1)
    asked = Arguments(causal=True, panels=16)
    sharing = Sharing(ranks.ranks_of(group), mode, "zigzag")
    said, _ = terms_of(q, k, v, asked, Given(0.0, None, None, None), sharing)
    terms = said.text()
    sinks = torch.zeros(q.shape[2])
    out, lse, turn, spread = ops.forward(q, k, v, None, None, sinks, None, terms)
    checks = ("test_schema", "test_faketensor")
    forward, backward = (getattr(torch.ops.dash_attn, f"context_parallel_{x}").default for x in ("forward", "backward"))
    torch.library.opcheck(forward, (q, k, v, None, None, sinks, None, terms), test_utils=checks)
    operands = (dout, *(spread or (q, k, v, out, lse)), None, None, sinks, None, terms, (q.shape[1], k.shape[1]), turn)
    for given in (operands, (*operands, dlse)):
        torch.library.opcheck(backward, given, test_utils=checks)


def refusals(groups: Groups, size: int) -> list[str]:
    """The errors of calls that all ranks make alike."""
    if size not in groups:
        return []
    group = groups[size]
    q, k, v, dout = (shard(x, group=group, dim=1) for x in Case().tensors())
    q.requires_grad_()

    def twice(mode: str) -> None:
        out = context_parallel_attention(q, k, v, group=group, mode=mode)
        torch.autograd.grad(out, q, dout, create_graph=True)

    def call(**arguments: Any) -> None:
        context_parallel_attention(q, k, v, **{"group": group, **arguments})

    cells = dash_attn.tiles([[True]], 48, 48)
    calls: list[Any] = [
        lambda: twice("a2a"),
        lambda: twice("all_gather"),
        lambda: call(mask=cells),
        lambda: call(mode="ring"),
        lambda: call(mode="a2a+all_gather"),
        lambda: call(group="world"),
        lambda: call(panels=6),
        lambda: unshard(q, group=group, dim=1),
        lambda: unshard(k[:, :20], group=group, dim=1, panels=16) if group.rank() else unshard(k, group=group, dim=1),
    ]
    said = list[str]()
    for each in calls:
        try:
            each()
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
        else:
            said.append("no error")
    return said


def die_or_wait(groups: Groups, mode: str, where: str, limit: float, grave: str) -> tuple[str, float]:
    """The last rank dies: the error of the others, and how long after the death it comes.

    where  'before' the forward; or in the 'forward' or the 'backward', when tensors are about to travel
    limit  of the group, in seconds
    grave  the file with the time of the death. All processes have the same clock
    """
    group = torch.distributed.new_group(timeout=timedelta(seconds=limit))
    case, meet = Case(heads=(4, 4), arguments={"causal": True}), ops.meet
    q, k, v, dout = (shard(x, dim=1) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def die() -> None:
        Path(grave).write_text(str(time.monotonic()), encoding="utf-8")
        os._exit(1)

    def at(place: str) -> None:
        if group.rank() < group.size() - 1 or place != where:
            return
        if place == "before":
            die()
        ops.meet = lambda *given: (meet(*given), die())  # type: ignore[assignment,return-value,func-returns-value]

    context_parallel_attention(*leaves, group=group, mode=mode, causal=True)
    try:
        at("before")
        at("forward")
        out = context_parallel_attention(*leaves, group=group, mode=mode, causal=True)
        at("backward")
        out.backward(dout)
    except RuntimeError as error:
        assert all(x.grad is None for x in leaves)
        return type(error).__name__, time.monotonic() - float(Path(grave).read_text(encoding="utf-8"))
    return "no error", 0.0


def in_megatron(groups: Groups, mode: str, size: int) -> bool | None:
    """Whether Megatron's core attention on the ranks has the bits of one process. Megatron cuts the tokens itself."""
    if size not in groups:
        return None
    group, kind = groups[size], Enum("Kind", ["causal"]).causal
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=size)
    core = DashCoreAttention(config, 1, kind, cp_comm_type=mode, pg_collection=SimpleNamespace(cp=group))
    q, k, v = (x.transpose(0, 1) for x in Case(batch=2).tensors()[:3])
    # 2 * size chunks of the sequence, of which a rank has one from each end.
    mine = [torch.cat([x.chunk(2 * size)[i] for i in (group.rank(), 2 * size - 1 - group.rank())]) for x in (q, k, v)]
    out = core(*mine).unflatten(2, q.shape[2:]).transpose(0, 1)
    whole = dash_attn.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, panels=16)
    try:
        core(*mine, packed_seq_params=SimpleNamespace(qkv_format="thd"))
    except NotImplementedError:
        return same_bits(unshard(out, group=group, dim=1), whole)
    return False


def data_parallel_around_it(groups: Groups) -> list[str]:
    """FSDP2 over all ranks of a mesh ("dp", "cp"), of which each row has a batch of its own: what differs."""
    mesh = init_device_mesh("cpu", (2, max(groups) // 2), mesh_dim_names=("dp", "cp"))
    group, row = mesh["cp"].get_group(), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    plain, sharded, batches = Layer(None), Layer(group), torch.randn(2, 1, 64, 32)
    sharded.load_state_dict(plain.state_dict())
    wrong = list[str]()
    fully_shard(sharded, mesh=DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu"))
    out = sharded(shard(batches[row], group=group, dim=1))
    out.square().sum().backward()
    whole = [plain.alone(x) for x in batches]
    torch.stack(whole).square().sum().backward()
    if not torch.allclose(unshard(out.detach(), group=group, dim=1), whole[row], rtol=1e-4, atol=1e-5):
        wrong.append("out")
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if not torch.allclose(a.grad, b.grad.full_tensor() * max(groups), rtol=1e-4, atol=1e-4):
            wrong.append(name)
    return wrong


def cut_by_torch(groups: Groups) -> bool:
    """Whether torch's context parallel, which accelerate wraps, cuts a tensor as `shard` does."""
    x = torch.arange(2 * 64).view(2, 64)
    mine = x.clone()
    with context_parallel(mesh_of((max(groups),)), buffers=[mine], buffer_seq_dims=[1], no_restore_buffers={mine}):
        return torch.equal(mine, shard(x, dim=1))
