"""The mask that Transformers asks for, as an object that only our attention function can use.

A model that computes attention itself would take None for "no mask" and would see the future. It would add a padding
mask of zeros and ones to its scores. So a model never gets either: it gets a ModelMask, and every calculation with a
ModelMask raises an error that names the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dash_attn.problem import Mask, intervals

# The largest mask that is written out to compare it with a simpler one, in elements.
LARGEST_WRITTEN_OUT = 2**30
DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv and rand or ror xor rxor invert neg eq ne lt le gt ge bool len iter "
    "int float setitem matmul rmatmul array"
)

# Configs of models that compute attention themselves. Each model that is built with dash_attn's name adds its own.
COMPUTED_BY_THE_MODEL: set[type] = set()


class ModelMask:
    """Which keys each query of a model sees.

    batch, len_q, len_k   the sizes that the mask was made for
    causal                a query sees keys up to its own position; the last query is level with the last real key
    left, right           how many keys before and after its own position a query sees; None is no limit
    number                None, or (batch, keys): 0 for padding, else the number of the document. It may be shorter
                          than the keys, which then end in places of a static cache that are still empty
    intervals             None, or the mask of each batch entry, or one for all of them. Nothing above but the sizes
                          counts then
    foreign               the model computes attention itself, so it has no use for the mask
    refusal               None, or why no layer can use the mask. A model may make it for layers that it does not have
    """

    __slots__ = (
        "batch",
        "causal",
        "device",
        "foreign",
        "intervals",
        "left",
        "len_k",
        "len_q",
        "model",
        "number",
        "refusal",
        "right",
    )

    def __init__(self, model: str, batch: int, len_q: int, len_k: int, device: Any, causal: bool) -> None:
        self.model = model
        self.batch, self.len_q, self.len_k = batch, len_q, len_k
        self.device = device
        self.causal = causal
        self.left: int | None = None
        self.right: int | None = None
        self.number: Tensor | None = None
        self.intervals: tuple[Mask, ...] | None = None
        self.foreign = False
        self.refusal: str | None = None

    # What models look at before they hand a mask on, and what moving a layer to another device does.
    ndim = 4
    requires_grad = False

    @property
    def dtype(self) -> torch.dtype:
        if self.intervals is not None:  # Gemma4Audio asks for its smallest number, and calculates with it next
            refuse(self, "uses its mask (dtype)")
        return torch.bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.len_q, self.len_k))

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        if self.foreign:  # it compares the size with that of its scores, and adds the mask next
            refuse(self, "uses its mask (size)")
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> ModelMask:
        """The numbers follow the queries when they are read, and a boolean has no other meaning in another dtype."""
        return self

    def contiguous(self) -> ModelMask:
        return self

    def __getitem__(self, index: Any) -> ModelMask:
        """All of it, as in mask[:, :, :, : keys]."""
        every = index if isinstance(index, tuple) else (index,)
        if Ellipsis in every:
            at = every.index(Ellipsis)
            every = (*every[:at], *[slice(None)] * (5 - len(every)), *every[at + 1 :])
        for part, length in zip(every, self.shape, strict=False):
            if not isinstance(part, slice) or part.indices(length) != (0, length, 1):
                refuse(self, "takes a part of its mask")
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        refuse(self, f"uses its mask ({name})")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [x for several in given if isinstance(several, tuple | list) for x in several]
        mask = next(x for x in given if isinstance(x, ModelMask))
        refuse(mask, f"calculates with its mask ({getattr(function, '__name__', function)})")

    __hash__ = object.__hash__


def refuse(mask: ModelMask, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{mask.model} {what} instead of handing it to the attention function of Transformers, so dash_attn cannot run "
        f"its attention: use attn_implementation='eager' for {mask.model}"
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: ModelMask, *args: Any) -> NoReturn:
        refuse(self, f"calculates with its mask ({name})")

    return method


for _name in DUNDERS.split():
    setattr(ModelMask, f"__{_name}__", _refusing(_name))


def model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> ModelMask:
    """The mask function of Transformers' interface. Never None: only a ModelMask shows who uses the mask."""
    if isinstance(attention_mask, ModelMask):
        return attention_mask  # as Transformers does with a mask that is ready
    model = type(kwargs.get("config")).__name__.removesuffix("Config")
    shown = Shown(model, batch_size, q_length, kv_length, kv_offset, kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: dash_attn takes a padding mask (batch, keys)"
        )
    if attention_mask is not None and attention_mask.shape[0] != batch_size:
        if attention_mask.shape[0] != 1:
            raise ValueError(f"attention_mask has {attention_mask.shape[0]} rows for a batch of {batch_size}")
        attention_mask = attention_mask.expand(batch_size, -1)  # one row can only be meant for all
    if torch.compiler.is_compiling():
        shown.compiled(mask_function, attention_mask is not None)
    else:
        shown.eager(mask_function, q_offset, attention_mask)
    mask = ModelMask(model, batch_size, q_length, kv_length, kwargs.get("device"), shown.causal)
    mask.left, mask.right, mask.refusal = shown.left, shown.right, shown.refusal
    mask.intervals = shown.intervals
    if mask.intervals is None:
        mask.number = shown.numbers(attention_mask, q_offset)
    mask.foreign = type(kwargs.get("config")) in COMPUTED_BY_THE_MODEL
    return mask


class Shown:
    """What a mask function of Transformers means: read from its parts, or while code is compiled from its answers."""

    def __init__(self, model: str, batch: int, len_q: int, len_k: int, kv_offset: int, options: dict[str, Any]) -> None:
        self.model, self.batch, self.len_q, self.len_k, self.kv_offset = model, batch, len_q, len_k, kv_offset
        self.options = options
        self.causal = False
        self.left: int | None = None
        self.right: int | None = None
        self.documents: Tensor | None = None
        self.intervals: tuple[Mask, ...] | None = None
        self.refusal: str | None = None

    def eager(self, mask_function: Callable[..., Any] | None, q_offset: int | Tensor, padding: Tensor | None) -> None:
        if mask_function is None:
            self.causal = True  # as Transformers' own mask functions
            return
        end = max(int(q_offset) + self.len_q, self.kv_offset + self.len_k)
        unknown = [name for part in parts_of(mask_function) if (name := self.add(*part, end)) is not None]
        if not unknown:
            return
        asked = self.written_out(mask_function, int(q_offset), padding)
        if asked is not None and self.is_plain(asked, int(q_offset), padding):
            return
        self.intervals = None if asked is None else self.rows_of(asked, int(q_offset), padding)
        if self.intervals is None:
            raise NotImplementedError(
                f"{self.model} masks with {', '.join(sorted(set(unknown)))}, which dash_attn does not know: "
                "use attn_implementation='sdpa' or 'eager' for it"
            )

    def add(self, name: str, part: Callable[..., Any], end: int) -> str | None:
        """Take in one part of an intersection, or give its name back."""
        if name == "causal_mask_function":
            self.causal = True
        elif name == "sliding_window_overlay":
            self.limit(inside(part, "sliding_window") - 1, None)  # Transformers counts a token itself in
        elif name == "sliding_window_bidirectional_overlay":
            self.limit(inside(part, "sliding_window"), inside(part, "sliding_window"))
        elif name == "packed_sequence_mask_function":
            # From here and not from position_ids, since not every model hands those on to its attention.
            ids = inside(part, "packed_sequence_mask")
            fits = self.len_q == self.len_k == end and ids.shape == (self.batch, end)  # no cache, an id for each token
            if self.documents is not None or not fits or (documents := runs_of(ids)) is None:
                return name
            self.documents = documents
        elif name == "or_masks":
            first, *others = inside(part, "mask_functions")
            names = [each for part in parts_of(first) if (each := self.add(*part, end)) is not None]
            return ", ".join(names + [name_of(other) for other in others if not adds_nothing(other)]) or None
        elif name != "bidirectional_mask_function" and not (
            name == "chunked_overlay" and end <= inside(part, "chunk_size")
        ):
            return name
        return None

    def limit(self, left: int | None, right: int | None) -> None:
        if left is not None and left < 0:
            self.refusal = f"sliding_window must be None or at least 1; {self.model} has a smaller one"
        self.left, self.right = least(self.left, left), least(self.right, right)

    def compiled(self, mask_function: Callable[..., Any] | None, padded: bool) -> None:
        """While code is compiled the inside of a function is not open; its name, its options and its answers are."""
        name = "causal_mask_function" if mask_function is None else mask_function.__name__
        window = self.options.get("local_size")
        if name not in ("causal_mask_function", "bidirectional_mask_function", "and_mask") or self.options["use_vmap"]:
            raise NotImplementedError(f"{self.model} masks with {name}: dash_attn does not compile it; use 'sdpa'")
        self.causal = "allow_is_bidirectional_skip" not in self.options
        config = self.options["config"]
        if window is not None and getattr(config, "attention_chunk_size", None) == window:
            if self.len_k + self.kv_offset > window:
                raise NotImplementedError(f"{self.model} masks with chunked_overlay: use attn_implementation='sdpa'")
        elif window is not None:
            self.limit(*((window - 1, None) if self.causal else (window, window)))
        packable = name == "and_mask" and self.causal and self.len_q == self.len_k and self.left != 0
        # Transformers looks for documents only where there is no padding mask.
        if packable and mask_function is not None and self.len_q > 1 and not padded:
            # A token that does not see the token before it begins a document.
            now = torch.arange(1, self.len_q, device=self.options["device"])
            row = torch.arange(self.batch, device=now.device)[:, None]
            first = ~mask_function(row, 0, now[None], now[None] - 1)
            self.documents = torch.nn.functional.pad(first.expand(self.batch, -1).long().cumsum(1), (1, 0)) + 1

    def numbers(self, padding: Tensor | None, q_offset: int | Tensor) -> Tensor | None:
        number = None if padding is None else padding[:, self.kv_offset : self.kv_offset + self.len_k]
        if self.documents is not None:
            number = self.documents if number is None else self.documents[:, : number.shape[1]] * number
        if self.causal:
            seen = int(q_offset) + self.len_q - self.kv_offset
            if padding is not None and padding.shape[1] < seen + self.kv_offset:
                raise ValueError(
                    "attention_mask must cover all tokens so far, those in the cache too: "
                    f"{seen + self.kv_offset}; got {padding.shape[1]}"
                )
            if seen > self.len_k:
                raise NotImplementedError(
                    f"{self.model}: {seen} tokens so far and {self.len_k} keys; use attn_implementation='sdpa'"
                )
            if number is None and seen < self.len_k:
                number = torch.ones(self.batch, seen, dtype=torch.bool, device=self.options.get("device"))
            elif number is not None:
                number = number[:, :seen]
        elif self.left is not None and int(q_offset) + self.len_q != self.kv_offset + self.len_k:
            raise NotImplementedError(
                f"{self.model}: a window on both sides and a cache; use attn_implementation='sdpa'"
            )
        whole = number is not None and number.dtype == torch.bool and number.shape[1] == self.len_k
        if whole and not torch.compiler.is_compiling() and number is not None and bool(number.all()):
            return None
        return number

    def written_out(self, mask_function: Callable[..., Any], offset: int, padding: Tensor | None) -> Tensor | None:
        """The mask of this very call, (batch, 1, queries, keys), unless it is too large."""
        from transformers.masking_utils import sdpa_mask

        if self.batch * self.len_q * self.len_k > LARGEST_WRITTEN_OUT:
            return None
        sizes = (self.batch, self.len_q, self.len_k, offset, self.kv_offset)
        vmap = {"use_vmap": self.options.get("use_vmap", False), "device": self.options.get("device", "cpu")}
        asked: Tensor = sdpa_mask(*sizes, mask_function, padding, allow_is_causal_skip=False, **vmap)
        return asked

    def rows_of(self, asked: Tensor, offset: int, padding: Tensor | None) -> tuple[Mask, ...] | None:
        """The mask of each batch entry, or one for all, if each row of a real token sees one interval of keys."""
        seen = asked[:, 0]
        if padding is not None and offset + self.len_q <= padding.shape[1]:
            seen = (
                seen & padding[:, offset : offset + self.len_q, None].bool()
            )  # what padding sees is nobody's business
        bits = seen.to(torch.uint8)
        count, first, after = bits.sum(-1), bits.argmax(-1), self.len_k - bits.flip(-1).argmax(-1)
        if not bool(((after - first == count) | (count == 0)).all()):
            return None
        ends = torch.stack([first, torch.where(count == 0, first, after)], 1).cpu()
        masks = tuple(intervals(*each).without_rows(self.len_q, self.len_k) for each in ends)
        return masks[:1] if len(set(masks)) == 1 else masks

    def is_plain(self, asked: Tensor, offset: int, padding: Tensor | None) -> bool:
        """Whether the known parts alone give the mask of this very call."""
        device = asked.device
        q = torch.arange(offset, offset + self.len_q, device=device)[:, None]
        k = torch.arange(self.kv_offset, self.kv_offset + self.len_k, device=device)
        plain = torch.ones(self.batch, 1, self.len_q, self.len_k, dtype=torch.bool, device=device)
        for limit, distance in ((0 if self.causal else self.right, k - q), (self.left, q - k)):
            if limit is not None:
                plain &= distance <= limit
        if self.documents is not None:
            plain &= (self.documents[:, :, None] == self.documents[:, None])[:, None]
        if padding is not None:
            real = torch.nn.functional.pad(padding, (0, max(0, self.kv_offset + self.len_k - padding.shape[1])))
            plain &= real[:, self.kv_offset : self.kv_offset + self.len_k][:, None, None]
            if offset + self.len_q <= real.shape[1]:  # what padding sees is nobody's business
                plain, asked = (x & real[:, offset : offset + self.len_q][:, None, :, None] for x in (plain, asked))
        return bool((plain == asked).all())


def least(*limits: int | None) -> int | None:
    """None is no limit."""
    given = [x for x in limits if x is not None]
    return min(given) if given else None


def runs_of(ids: Tensor) -> Tensor | None:
    """The number of its segment for each token, from 1 in each row; None if a segment comes back in a row."""
    changes, distinct = ((x.diff() != 0).cumsum(1) for x in (ids, ids.sort(1).values))
    if not torch.equal(changes[:, -1:], distinct[:, -1:]):
        return None
    return torch.nn.functional.pad(changes, (1, 0)) + 1


def name_of(mask_function: Callable[..., Any]) -> str:
    return mask_function.__qualname__.partition(".<locals>")[0]


def inside(function: Callable[..., Any], name: str) -> Any:
    """What a mask function of Transformers was made with."""
    cells = function.__closure__ or ()
    code = function.__code__
    return dict(zip(code.co_freevars, cells, strict=True))[name].cell_contents


def parts_of(mask_function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """What a mask function is the intersection of, each with the name of what made it."""
    name = name_of(mask_function)
    if name == "and_masks":
        return [part for each in inside(mask_function, "mask_functions") for part in parts_of(each)]
    return [(name, mask_function)]


def adds_nothing(mask_function: Callable[..., Any]) -> bool:
    """Blocks of tokens that see each other, where no token is in a block: text without images."""
    return name_of(mask_function) == "blockwise_overlay" and not bool(
        (inside(mask_function, "block_sequence_ids") >= 0).any()
    )
