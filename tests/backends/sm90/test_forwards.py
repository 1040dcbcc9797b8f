"""Who runs the forward on CUDA, and how it is called: chosen and checked without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.functional import pad

from dash_attn.backends.base import Extras
from dash_attn.backends.cpu.forward import forward
from dash_attn.backends.sm90 import fa4, flex, forwards, packing
from dash_attn.backends.sm90.config import PIECE_ROWS, Piece
from dash_attn.backends.sm90.forwards import CuDnn, FlashAttention4, Flex, Packing, Provider, TorchFlash, choose
from dash_attn.backends.sm90.packing import packing_of, spread_of, spread_pieces
from dash_attn.backends.sm90.tables import joined
from dash_attn.problem import CAUSAL, FULL, Documents, Features, Mask, Problem, documents, intervals, tiles, window
from tests.backends.sm90.featured import attend
from tests.strategies import examples

DOCUMENTS = documents([0, 20, 20, 50], [0, 10, 25, 40], causal=True)


def posed(mask: Mask = FULL, len_q: int = 50, len_k: int = 40, **changes: Any) -> Problem:
    return Problem(
        **{"batch": 2, "heads_q": 4, "heads_kv": 2, "dim": 16, "dtype": "float32", **changes},
        len_q=len_q,
        len_k=len_k,
        mask=mask,
    )


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(forwards.VARIABLE, raising=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which providers this machine is taken to have; all, to begin with."""
    found = {"fa4", "cudnn", "torch", "flex"}
    for kind in (FlashAttention4, CuDnn, Flex):
        monkeypatch.setattr(kind, "missing", lambda self: None if self.key in found else f"{self.key} is not installed")
    return found


EVERY = {"fa4", "cudnn", "flex"}
CAPPED, SINKS, BOTH = Features(softcap=30.0), Features(sinks=True), Features(softcap=30.0, sinks=True)
# Problem, what is installed, who runs it.
CHOICES = [
    (posed(), {"fa4", "cudnn"}, "fa4"),
    (posed(DOCUMENTS), {"fa4", "cudnn"}, "fa4"),
    (posed(window(3, 100)), {"fa4", "cudnn"}, "fa4"),
    (posed(), {"cudnn", "flex"}, "flex"),
    (posed(CAUSAL, 50, 40), {"flex"}, "flex"),
    (posed(window(3, 100)), {"flex"}, "flex"),  # more queries than keys
    (posed(tiles([[1]], 64, 64)), EVERY, "flex"),
    (posed(intervals([0] * 50, [9] * 50)), EVERY, "flex"),
    (posed(features=CAPPED), EVERY, "fa4"),
    (posed(features=SINKS), EVERY, "fa4"),
    (posed(DOCUMENTS, features=BOTH), EVERY, "fa4"),
    (posed(features=CAPPED), {"cudnn", "flex"}, "flex"),
    (posed(CAUSAL, features=SINKS), {"cudnn", "flex"}, "flex"),
    (posed(intervals([0] * 50, [9] * 50), features=BOTH), EVERY, "flex"),
]


@pytest.mark.parametrize(("problem", "there", "chosen"), CHOICES, ids=lambda value: None)
def test_chosen(problem: Problem, there: set[str], chosen: str, installed: set[str]) -> None:
    installed &= there
    assert choose(problem).key == chosen


@pytest.mark.parametrize("key", ["fa4", "cudnn", "torch", "flex"])
def test_the_environment_is_read_at_the_call(key: str, installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(posed()).key == "fa4"
    monkeypatch.setenv(forwards.VARIABLE, key)
    assert choose(posed()).key == key


# Problem, who is asked for: those that run only by name.
NAMED = [
    (posed(), "cudnn"),
    (posed(CAUSAL, 40, 40), "cudnn"),
    (posed(CAUSAL, 50, 40), "torch"),  # cuDNN aligns it at the start
    (posed(window(3, 0), 40, 40), "torch"),
    (posed(DOCUMENTS), "torch"),
    (posed(FULL, 1, 40), "torch"),
    (posed(window(3, 10)), "torch"),
    (posed(window(3, 100), 40, 40), "torch"),
]


@pytest.mark.parametrize(("problem", "key"), NAMED, ids=lambda value: None)
def test_by_name_only(problem: Problem, key: str, installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(problem).key == "fa4"
    monkeypatch.setenv(forwards.VARIABLE, key)
    assert choose(problem).key == key


REFUSED = [
    (posed(), "fa3", ValueError, ["DASH_ATTN_FORWARD must be one of fa4, cudnn, torch, flex", "'fa3'"]),
    (posed(), "fa4", NotImplementedError, ["DASH_ATTN_FORWARD=fa4", "not installed", "cudnn, torch, flex"]),
    (posed(DOCUMENTS), "cudnn", NotImplementedError, ["DASH_ATTN_FORWARD=cudnn", "documents(3)", "fa4, torch, flex"]),
    (posed(window(3, 100)), "torch", NotImplementedError, ["right side of 100", "more queries than keys"]),
    (posed(window(3, 100)), None, NotImplementedError, ["fa4: ", "cudnn: ", "torch: ", "flex: ", "dash_attn.backward"]),
    (
        posed(),
        None,
        NotImplementedError,
        ["not installed", "only by DASH_ATTN_FORWARD=cudnn", "=torch, because"],
    ),
    (posed(DOCUMENTS), None, NotImplementedError, ["only by DASH_ATTN_FORWARD=torch, because out may change"]),
    (posed(tiles([[1]], 64, 64)), None, NotImplementedError, ["torch: flash kernels take no tile masks"]),
    (posed(intervals([0] * 50, [9] * 50)), "torch", NotImplementedError, ["row by row", "fa4, cudnn, flex"]),
    (posed(features=BOTH), "cudnn", NotImplementedError, ["no softcap and no sinks", "fa4, torch, flex"]),
    (posed(features=SINKS), "torch", NotImplementedError, ["have no sinks", "fa4, cudnn, flex"]),
    (posed(DOCUMENTS), "flex", NotImplementedError, ["other bits in another pack"]),
    (posed(dim=8), "flex", NotImplementedError, ["head dims from 16 on"]),
    (posed(scale=-1.0), None, NotImplementedError, ["scale must be above 0", "-1.0", "dash_attn.backward"]),
]


@pytest.mark.parametrize(("problem", "asked", "kind", "words"), REFUSED, ids=lambda value: None)
def test_refused(
    problem: Problem,
    asked: str | None,
    kind: type[Exception],
    words: list[str],
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed -= {"fa4"} if asked else {"fa4", "flex"}
    if asked:
        monkeypatch.setenv(forwards.VARIABLE, asked)
    with pytest.raises(kind) as caught:
        choose(problem)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_installed_and_broken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.0")

    def broken() -> None:
        raise ImportError("no such symbol")

    monkeypatch.setattr(forwards, "entry", broken)
    forwards._fa4_missing.cache_clear()
    with pytest.raises(NotImplementedError, match=r"4\.0 is installed and cannot be imported.*DASH_ATTN_FORWARD=flex"):
        choose(posed())
    monkeypatch.setattr(forwards, "entry", lambda: lambda q, k, v: None)
    assert "does not take causal, cu_seqlens_k" in str(FlashAttention4().missing())
    forwards._fa4_missing.cache_clear()


def test_labels_name_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0b36")
    assert FlashAttention4().label() == "flash-attn-4 4.0.0b36"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert CuDnn().label().startswith("cudnn 9.10.2 (torch ")
    assert f"(torch {torch.__version__})" in TorchFlash().label()
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert f"(torch {torch.__version__}, FA3)" in TorchFlash().label()


def test_packing_is_copied_once() -> None:
    where = torch.device("cpu")
    packing = packing_of(Documents((0, 3, 5), (0, 4, 4)), 2, where)
    assert packing.cu_seqlens_q.tolist() == [0, 3, 5, 8, 10] and packing.cu_seqlens_k.tolist() == [0, 4, 4, 8, 8]
    assert packing.cu_seqlens_q.dtype == torch.int32 and packing[2:] == (3, 4)
    assert packing_of(Documents((0, 3, 5), (0, 4, 4)), 2, where) is packing


# ---- the calls, with the library's function replaced by one that does on the CPU what it documents -----------


def without_keys(problem: Problem) -> Tensor:
    return ~torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k)).any(1)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
    softcap: float | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]:
    """As FlashAttention 4's forward."""
    assert return_lse and (cu_seqlens_q is None) == (q.ndim == 4)
    if seqused_k is not None:
        used = [torch.arange(a, a + n) for a, n in zip(cu_seqlens_k.tolist(), seqused_k.tolist(), strict=False)]
        k, v = k[torch.cat(used)], v[torch.cat(used)]
        cu_seqlens_k = torch.cat([seqused_k.new_zeros(1), seqused_k.cumsum(0)]).int()
    mask = window(window_size_left, window_size_right) & (CAUSAL if causal else FULL)
    if cu_seqlens_q is not None:
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        mask &= documents(cu_seqlens_q, cu_seqlens_k)
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    batch, len_q, heads, dim = q.shape
    features = Features(softcap=softcap or 0.0, sinks=learnable_sink is not None)
    sizes = batch, heads, k.shape[2], len_q, k.shape[1], dim
    problem = Problem(*sizes, "float32", softmax_scale, mask, features=features)
    out, lse = (x.float() for x in attend(problem, q, k, v, learnable_sink))
    if learnable_sink is not None:  # the kernel rounds the sink of a row without keys
        lse = torch.where(without_keys(problem), lse * (1 + 2**-22), lse)
    return (out, lse, None) if cu_seqlens_q is None else (out[0], lse[0], None)


def aten_flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float, **sides: int) -> tuple[Tensor, ...]:
    *packing, dropout, causal, debug = args
    assert dropout == 0.0 and not debug
    if packing[0] is None:
        assert packing[2:] == [q.shape[1], k.shape[1]]
        packing = [None] * 4
    sides = {name: side for name, side in sides.items() if side is not None}
    out, lse, _ = flash(q, k, v, *packing, scale, causal, **sides, return_lse=True)
    nothing = torch.empty(0)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), nothing, nothing, nothing


def aten_cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float = 0.0, causal: bool = False, *, scale: float
) -> tuple[Any, ...]:
    assert bias is None and lse and dropout == 0.0 and not (causal and q.shape[2] != k.shape[2])
    out, found, _ = flash(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal, return_lse=True)
    return (out.transpose(1, 2), found.unsqueeze(-1), None, None, 0, 0, torch.empty(0), torch.empty(0), None)


def copy_pieces(sources: tuple[Tensor, ...], copies: tuple[Tensor, ...], pieces: Tensor) -> None:
    """As the kernel of device/spread.py."""
    for source, copy in zip(sources, copies, strict=True):
        for first, filled, to, rows in pieces.tolist():
            copy[to : to + rows] = 0
            copy[to : to + filled] = source[first : first + filled]


@pytest.fixture(autouse=True)
def spread_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "side_kernel", lambda kind, cfg: copy_pieces)
    monkeypatch.setattr(fa4, "DTYPE_OF", {"float32": "bf16"})  # there is no kernel for the tensors of these tests


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fa4, "entry", lambda: flash)
    monkeypatch.setattr(flex, "compiled", lambda shape: flex.run)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", aten_flash, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention", aten_cudnn, "CPU")
        yield


PROBLEMS = [
    posed(scale=0.3),
    posed(CAUSAL),
    posed(CAUSAL, 40, 40),
    posed(window(5, 3)),
    posed(window(None, 3)),
    posed(window(5, 0)),
    posed(DOCUMENTS),
    posed(DOCUMENTS & window(4, 2)),
    posed(CAUSAL, features=CAPPED),
    posed(window(5, 3), features=SINKS),
    posed(CAUSAL, features=SINKS),
    posed(DOCUMENTS & CAUSAL, features=SINKS),
    posed(DOCUMENTS & window(4, 2), features=BOTH),
    posed(intervals([row % 40 for row in range(50)], [row * 7 % 45 for row in range(50)])),
    posed(intervals([0] * 50, [row * 7 % 45 for row in range(50)]), features=BOTH),
    posed(tiles([[1, 0, 1], [0, 0, 1], [0, 0, 0]], 20, 16) & CAUSAL),
]


TAKEN = [(problem, each) for problem in PROBLEMS for each in forwards.PROVIDERS if not each.refuses(problem)]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("problem", "provider"), TAKEN, ids=lambda x: getattr(x, "key", None) or forwards._shape(x))
def test_called_as_documented(
    problem: Problem, provider: Provider, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forwards.VARIABLE, provider.key)
    torch.manual_seed(0)
    q = torch.randn(2, problem.len_q, 4, 16)
    k, v = (torch.randn(2, problem.len_k, 2, 16) for _ in range(2))
    run = forwards.LibraryForward(problem)
    sinks = torch.tensor([0.5, -2.0, 3.0, 200.0]) if problem.features.sinks else None
    want, want_lse = (x.float() for x in attend(problem, q, k, v, sinks))
    for _ in range(2):
        out, lse = run(q, k, v, Extras(sinks=sinks)) if problem.features.sinks else run(q, k, v)
        assert lse.shape == (2, 4, problem.len_q) and lse.dtype == torch.float32 and lse.is_contiguous()
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
        if sinks is not None:
            assert torch.equal(lse[:, :, without_keys(problem)], want_lse[:, :, without_keys(problem)])


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("provider", ["fa4", "torch"])
def test_the_tensors_that_a_graph_reads_live_with_the_forward(
    provider: str, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph reads the boundaries of a pack at every replay. The caches may drop them meanwhile."""
    made = list[weakref.ref[Tensor]]()

    def watched(lengths: Any, device: torch.device) -> Any:
        tensors = joined(lengths, device)
        made.extend(map(weakref.ref, tensors))
        return tensors

    monkeypatch.setenv(forwards.VARIABLE, provider)
    monkeypatch.setattr(packing, "joined", watched)
    packing_of.cache_clear()
    spread_of.cache_clear()
    problem = posed(DOCUMENTS)
    run = forwards.LibraryForward(problem)
    run(*(torch.randn(2, n, heads, 16) for n, heads in ((problem.len_q, 4), (problem.len_k, 2), (problem.len_k, 2))))
    packing_of.cache_clear()
    spread_of.cache_clear()
    assert made and all(tensor() is not None for tensor in made)


@pytest.mark.parametrize("mask", [Mask(3, -2), Mask(-2, None)], ids=str)
def test_negative_sides_come_as_documents(mask: Mask, installed: set[str]) -> None:
    assert choose(posed(mask)).key == "flex"
    installed.discard("flex")
    with pytest.raises(NotImplementedError, match=r"fa4: negative sides .* torch: torch's flash kernel takes negative"):
        choose(posed(mask))
    assert choose(posed(mask.without_negative_sides(50, 40))).key == "fa4"


@pytest.mark.parametrize("dim", [16, 80])
def test_nothing_of_a_neighbour_reaches_a_document(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel multiplies whole tiles, in which values of neighbours meet zeros, and leaves anything in rows without
    keys."""
    cu_q, cu_k = [0, 30, 45, 45, 50, 50], [0, 20, 20, 35, 40, 340]
    problem = posed(documents(cu_q, cu_k), 50, 340, dim=dim)
    q, k, v = (torch.randn(2, n, heads, dim) for n, heads in ((50, 4), (340, 2), (340, 2)))
    want, want_lse = forward(problem, q, k, v)
    tile = fa4.keys_of_a_tile(problem)

    def careless(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor, None]:
        out, lse, _ = flash(q, k, v.nan_to_num(), **how)
        starts, ends = how["cu_seqlens_k"].tolist(), how["cu_seqlens_q"].tolist()
        for d, used in enumerate(how["seqused_k"].tolist()):
            out[ends[d] : ends[d + 1]] += 0 * v[starts[d] : starts[d] + -(-used // tile) * tile].sum()
        blind = lse == -torch.inf
        return out.masked_fill(blind.T[..., None], torch.nan), lse.masked_fill(blind, 3.0), None

    monkeypatch.setattr(fa4, "entry", lambda: careless)
    for poisoned, (row, q_rows) in product(((20, 40), (0, 35)), enumerate([slice(0, 30), slice(45, 50)])):
        values = v.clone()
        values[1 - row, slice(*poisoned)] = torch.nan  # the other batch entry, and neighbours in this one
        values[row, slice(*poisoned)] = torch.nan
        own = slice(0, 20) if q_rows.start == 0 else slice(35, 40)
        values[row, own] = v[row, own]
        out, lse = fa4.Fa4Forward(problem)(q, k, values)
        torch.testing.assert_close(out[row, q_rows], want[row, q_rows])
        torch.testing.assert_close(lse, want_lse)
        assert (out[:, 30:45] == 0).all() and (lse[:, :, 30:45] == -torch.inf).all()


@examples(100)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.sampled_from([128, 144]))
def test_pieces_copy_every_row_once(lengths: list[int], tile: int) -> None:
    keys = np.array(lengths)
    room = -(-keys // tile) * tile
    source = torch.arange(1, int(keys.sum()) + 1)[:, None]
    copy = torch.full((int(room.sum()), 1), -1)
    pieces = spread_pieces(keys, room)
    assert pieces[:, Piece.ROWS].max(initial=0) <= PIECE_ROWS and pieces[:, Piece.ROWS].sum() == room.sum()
    copy_pieces((source,), (copy,), torch.from_numpy(pieces))
    ends = (room - keys).tolist()
    expected = [pad(part, (0, 0, 0, zeros)) for part, zeros in zip(source.split(lengths), ends, strict=True)]
    assert torch.equal(copy, torch.cat(expected))


def test_keys_that_end_with_tiles_are_not_copied() -> None:
    where = torch.device("cpu")
    assert spread_of(Documents((0, 3, 5), (0, 256, 300)), 1, 128, where) is None
    assert spread_of(Documents((0, 3, 5), (0, 256, 300)), 2, 128, where) is not None
    assert spread_of(Documents((0, 3, 5), (0, 0, 300)), 1, 128, where) is None


def test_packing_fields_are_arguments_of_the_library() -> None:
    assert set(Packing._fields) <= set(flash.__annotations__)


# ---- FlashAttention-4 without its front ----------------------------------------------------------------------


class Front:
    """A library that looks its kernel up in a table, as FlashAttention-4 does, and counts how often it is entered."""

    def __init__(self, own_tensor: bool = False) -> None:
        self.compile_cache: dict[object, Any] = {}
        self.entered, self.ran, self.own_tensor = 0, 0, own_tensor

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any) -> None:
        self.ran += 1
        how, cu = others[0], others[1:]
        result, sums, _ = flash(q, k, v, *cu[:2], *how["max"], seqused_k=cu[2], **how["rest"])
        out.copy_(result)
        lse.copy_(sums)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, None]:
        self.entered += 1
        if "key" not in self.compile_cache:
            self.compile_cache["key"] = self.kernel
        cu = tuple(given.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
        how = {"max": tuple(given.pop(name, None) for name in ("max_seqlen_q", "max_seqlen_k")), "rest": given}
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3])
        made = (torch.zeros(1),) if self.own_tensor else ()
        self.compile_cache["key"](q.detach(), k.detach(), v.detach(), out, lse, how, *cu, *made)
        return out, lse, None


def runs(problem: Problem, front: Front, monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Results of three calls with different values, each beside what the CPU gives."""
    monkeypatch.setattr(fa4, "entry", lambda: front)
    run, pairs = fa4.Fa4Forward(problem), []
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, n, heads, 16) for n, heads in ((50, 4), (40, 2), (40, 2)))
        pairs += [[*run(q, k, v), *forward(problem, q, k, v)]]
    return pairs


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(5, 3), DOCUMENTS], ids=str)
def test_later_calls_go_to_the_kernel(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    for out, lse, want, want_lse in runs(posed(mask), front, monkeypatch):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
    assert (front.entered, front.ran) == (1, 3)
    assert isinstance(front.compile_cache, dict), "the library has its own table back"


def test_a_front_that_makes_tensors_is_always_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(own_tensor=True)
    for out, _, want, _ in runs(posed(CAUSAL), front, monkeypatch):
        torch.testing.assert_close(out, want)
    assert front.entered == 3


def test_other_strides_are_noted_anew(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    monkeypatch.setattr(fa4, "entry", lambda: front)
    monkeypatch.setenv(forwards.VARIABLE, "fa4")
    run = forwards.LibraryForward(posed())
    q, k, v = torch.randn(2, 50, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    wide = torch.randn(2, 40, 4, 16)[:, :, ::2]
    for keys in (k, wide, k, wide):
        torch.testing.assert_close(run(q, keys, v)[0], forward(posed(), q, keys, v)[0])
    assert (front.entered, front.ran) == (2, 4)


def test_a_start_that_is_not_aligned_is_copied_at_every_call(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strides of the tensor fit, and an earlier call had them."""
    front, starts = Front(), []
    run, kernel = forwards.LibraryForward(posed()), front.kernel
    front.kernel = lambda *given: (starts.append(given[1].data_ptr() % 16), kernel(*given))
    monkeypatch.setattr(fa4, "entry", lambda: front)
    monkeypatch.setenv(forwards.VARIABLE, "fa4")
    q, k, v = torch.randn(2, 50, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    shifted = torch.randn(k.numel() + 1)[1:].view_as(k)
    for keys in (k, shifted, shifted):
        torch.testing.assert_close(run(q, keys, v)[0], forward(posed(), q, keys, v)[0])
    assert starts == [0, 0, 0] and shifted.data_ptr() % 16
