"""What a model gets as a mask: only our attention function can use it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from dash_attn.api import calls  # noqa: E402
from dash_attn.integrations.transformers import attention_forward, model_mask, register  # noqa: E402
from dash_attn.integrations.transformers import packing as packing_module  # noqa: E402
from dash_attn.integrations.transformers.masks import ModelMask  # noqa: E402
from dash_attn.problem import Documents, Mask  # noqa: E402
from tests.integrations.small import GROUPED, LENGTH  # noqa: E402

CUT = torch.cat([torch.arange(10), torch.arange(23)])[None]  # positions of two documents


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def build(name: str, implementation: str = "dash", kind: str = "ForCausalLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**GROUPED, **changes})
    return getattr(transformers, name + kind)._from_config(config, attn_implementation=implementation)


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(1))


def plain(**changes: Any) -> ModelMask:
    given: dict[str, Any] = {"config": transformers.BloomConfig(), "device": torch.device("cpu")}
    return model_mask(2, 8, 8, 0, 0, masking_utils.causal_mask_function, None, **{**given, **changes})


@pytest.mark.parametrize(
    "use",
    [
        lambda mask, scores: scores + mask,
        lambda mask, scores: mask + scores,
        lambda mask, scores: scores.masked_fill(mask, 0.0),
        lambda mask, scores: torch.where(mask, scores, 0.0),
        lambda mask, scores: torch.cat([mask, scores]),
        lambda mask, scores: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
        lambda mask, scores: mask[:, :, -1],
        lambda mask, scores: mask[:, None],
        lambda mask, scores: mask[:1],
        lambda mask, scores: mask == 0,
        lambda mask, scores: ~mask,
        lambda mask, scores: mask.bool(),
        lambda mask, scores: mask.expand(2, 4, 8, 8),
        lambda mask, scores: bool(mask),
        lambda mask, scores: len(mask),
        lambda mask, scores: list(mask),
    ],
)
def test_every_use_is_refused_with_the_models_name(use: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"Bloom .*attn_implementation='eager' for Bloom"):
        use(plain(), torch.zeros(2, 1, 8, 8))


def test_what_a_model_may_do_before_it_hands_a_mask_on() -> None:
    mask = plain(config=transformers.LlamaConfig())
    assert mask is not None
    assert mask[:, :, :, :8] is mask[..., :99] is mask.to("cpu") is mask.contiguous() is mask
    assert mask.shape == mask.size() == (2, 1, 8, 8)
    assert mask.ndim == mask.dim() == 4
    assert masking_utils.create_causal_mask(build("Llama").config, torch.zeros(2, 8, 64), mask, None) is mask


BLOOM = {"vocab_size": 99, "hidden_size": 64, "n_layer": 2, "n_head": 4}


@pytest.mark.filterwarnings("ignore:.*computes attention itself")
def test_bloom_is_refused() -> None:
    model = transformers.BloomForCausalLM._from_config(transformers.BloomConfig(**BLOOM), attn_implementation="dash")
    with pytest.raises(NotImplementedError, match=r"Bloom calculates with its mask.*'eager'"):
        model(input_ids=tokens())


@pytest.mark.filterwarnings("ignore:.*computes attention itself")
def test_a_model_that_computes_attention_itself_has_no_use_for_the_size_of_a_mask() -> None:
    """Autoformer compares sizes, and then fails on its own scores before it touches the mask."""
    transformers.BloomForCausalLM._from_config(transformers.BloomConfig(**BLOOM), attn_implementation="dash")
    with pytest.raises(NotImplementedError, match=r"Bloom uses its mask \(size\).*'eager'"):
        plain().size()


def test_a_model_that_computes_attention_itself_is_announced() -> None:
    with pytest.warns(UserWarning, match="BloomForCausalLM computes attention itself"):
        transformers.BloomForCausalLM._from_config(transformers.BloomConfig(**BLOOM), attn_implementation="dash")


def test_a_model_with_classes_of_its_own_is_refused_when_built() -> None:
    config = transformers.GPTJConfig(vocab_size=99, n_embd=64, n_layer=1, n_head=4, rotary_dim=8)
    with pytest.warns(UserWarning), pytest.raises(NotImplementedError, match=r"GPTJ_ATTENTION_CLASSES.*'eager'"):
        transformers.GPTJModel._from_config(config, attn_implementation="dash")
    transformers.GPTJModel._from_config(config, attn_implementation="eager")


def given(implementation: str = "dash") -> dict[str, Any]:
    model = build("Llama", implementation)
    embeds = model.get_input_embeddings()(tokens())
    return {"config": model.config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}


@pytest.mark.parametrize(
    "extra",
    [
        {"or_mask_function": lambda b, h, q, k: (q == 3) & (k == 9)},
        {"and_mask_function": lambda b, h, q, k: k != 3},
        {"block_sequence_ids": torch.arange(LENGTH).expand(2, -1) % 2},
        {"block_sequence_ids": torch.tensor([[-1] * LENGTH, [*[0] * 9, *[-1] * (LENGTH - 12), *[0] * 3]])},
    ],
    ids=lambda x: next(iter(x)),
)
def test_unknown_masks_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"Llama masks with .*'sdpa'"):
        masking_utils.create_causal_mask(**given(), **extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"or_mask_function": lambda b, h, q, k: q == k},
        {"and_mask_function": lambda b, h, q, k: k >= 0},
        {"block_sequence_ids": torch.full((2, LENGTH), -1)},
        {"or_mask_function": lambda b, h, q, k: q == 3, "attention_mask": (torch.arange(LENGTH) > 3).expand(2, -1)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_masks_that_are_causal_in_effect_run(extra: dict[str, Any]) -> None:
    mask = masking_utils.create_causal_mask(**{**given(), **extra})
    assert (mask.causal, mask.left, mask.right) == (True, None, None)


BLOCKS = torch.full((2, LENGTH), -1)
BLOCKS[0, 4:9], BLOCKS[0, 20:25], BLOCKS[1, :12] = 0, 1, 0
LEFT, RIGHT = torch.ones(2, 2, LENGTH, dtype=torch.long)
LEFT[1, :5] = RIGHT[0, -7:] = 0


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize(
    ("maker", "extra"),
    [
        ("create_chunked_causal_mask", {}),
        ("create_chunked_causal_mask", {"block_sequence_ids": BLOCKS[:1].expand(2, -1)}),
        ("create_causal_mask", {"block_sequence_ids": BLOCKS}),
        ("create_causal_mask", {"block_sequence_ids": torch.zeros(2, LENGTH, dtype=torch.long)}),
        ("create_causal_mask", {"or_mask_function": lambda b, h, q, k: q == 3}),
        ("create_causal_mask", {"or_mask_function": lambda b, h, q, k: k < 7 + b}),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": BLOCKS}),
        ("create_causal_mask", {"position_ids": torch.arange(LENGTH)[None] % 20, "block_sequence_ids": BLOCKS[:1]}),
    ],
)
def test_masks_of_intervals_are_those_of_sdpa(maker: str, extra: dict[str, Any], padding: Tensor | None) -> None:
    """Chunks, and blocks of tokens that see each other: forward and gradients."""
    arguments = {**given(), **extra, "attention_mask": padding}
    if "position_ids" in extra:  # of one row, and only without a padding mask does Transformers look at positions
        arguments |= {"inputs_embeds": arguments["inputs_embeds"][:1], "attention_mask": None}
    config = arguments["config"]
    config.attention_chunk_size, config.sliding_window = 8, 6
    ours, dense = (
        getattr(masking_utils, maker)(**arguments) for config._attn_implementation_internal in ("dash", "sdpa")
    )
    assert ours.intervals is not None and len(ours.intervals) <= ours.batch
    torch.manual_seed(0)
    q, k, v = (torch.randn(ours.batch, 4, LENGTH, 16, requires_grad=True) for _ in range(3))
    real = torch.ones(ours.batch, LENGTH, dtype=torch.bool) if padding is None or ours.batch == 1 else padding.bool()
    out = attention_forward(torch.nn.Identity(), q, k, v, ours)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense).transpose(1, 2)
    torch.testing.assert_close(out[real], theirs[real], atol=1e-5, rtol=1e-4)
    dout = torch.randn_like(out) * real[..., None, None]
    for mine, their in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, theirs)), strict=True):
        torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-4)


def test_chunks_are_documents() -> None:
    """So they have a forward on GPUs."""
    arguments = given()
    arguments["config"].attention_chunk_size = 8
    mask = masking_utils.create_chunked_causal_mask(**arguments)
    ends, whole = (*range(0, LENGTH, 8), LENGTH), Documents((0, LENGTH), (0, LENGTH))
    assert mask.intervals == (Mask(right=0, documents=Documents(ends, ends, whole)),)
    arguments["config"].attention_chunk_size = LENGTH
    assert masking_utils.create_chunked_causal_mask(**arguments).causal


def test_a_mask_of_intervals_has_no_dtype() -> None:
    """A model that asks for it calculates with the mask next."""
    with pytest.raises(NotImplementedError, match=r"Llama uses its mask \(dtype\).*'eager'"):
        _ = masking_utils.create_causal_mask(**given(), block_sequence_ids=BLOCKS).dtype


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def trained(family: str, kinds: Tensor, sizes: dict[str, Any], *implementations: str) -> list[list[Tensor]]:
    """Logits and gradients of a model that is told the kinds of its tokens, with each implementation."""
    results = []
    for implementation in implementations:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes)
        kind = getattr(transformers, f"{family}ForConditionalGeneration")
        model = kind._from_config(config, attn_implementation=implementation)
        ids = tokens()
        out = model.train()(input_ids=ids, token_type_ids=kinds, labels=ids)
        out.loss.backward()
        grads = [x.grad for x in model.model.language_model.parameters() if x.grad is not None]
        results.append([out.logits.detach(), *grads])
    return results


def test_gemma3_trains_with_image_tokens() -> None:
    """Tokens of an image see each other. Here the tokens that token_type_ids marks have embeddings of text."""
    text = {**GROUPED, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"text_config": text, "vision_config": VISION}
    results = trained("Gemma3", (BLOCKS >= 0).long(), sizes, "eager", "dash", "dash")
    for theirs, first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, theirs, atol=1e-4, rtol=1e-3)
        assert torch.equal(first, second)


def test_embedding_gemma_sees_both_ways() -> None:
    sizes = {**GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    results = []
    for implementation in ("eager", "dash"):
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
        model = transformers.Gemma3TextModel._from_config(config, attn_implementation=implementation)
        out = model.train()(input_ids=tokens(), attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in model.parameters())])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_paligemma_trains_with_a_prefix() -> None:
    """Tokens of type 0 are the prefix, which sees itself both ways."""
    kinds = (torch.arange(LENGTH) >= torch.tensor([[9], [14]])).long()
    vision = {**VISION, "model_type": "siglip_vision_model"}
    sizes = {"text_config": {**GROUPED, "model_type": "gemma"}, "vision_config": vision}
    for theirs, mine in zip(*trained("PaliGemma", kinds, sizes, "eager", "dash"), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_llama4_trains_in_chunks() -> None:
    results = []
    sizes = {**GROUPED, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 8}
    for implementation in ("eager", "dash"):
        torch.manual_seed(0)
        config = transformers.Llama4TextConfig(**sizes, layer_types=["chunked_attention", "full_attention"])
        model = transformers.Llama4ForCausalLM._from_config(config, attn_implementation=implementation)
        ids = tokens()
        labels = ids.masked_fill(LEFT == 0, -100)
        labels[1, 5] = -100  # padding predicts it
        out = model.train()(input_ids=ids, attention_mask=LEFT, labels=labels)
        out.loss.backward()
        results.append([out.logits.detach()[LEFT.bool()], *(x.grad for x in model.parameters() if x.grad is not None)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("window", [1, 4])
def test_a_window_on_both_sides_is_as_wide_as_transformers_means(window: int) -> None:
    """abs(q - k) <= window, without and with padding at the end."""
    config = build("Mistral", sliding_window=window).config
    q, k, v = torch.randn(3, 2, 4, 12, 16).unbind()
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, 9:] = 0
    for mask in (None, padding):
        ours, dense = (
            masking_utils.create_bidirectional_sliding_window_mask(config, torch.zeros(2, 12, 64), mask)
            for config._attn_implementation_internal in ("dash", "sdpa")
        )
        out = attention_forward(torch.nn.Identity(), q, k, v, ours)[0]
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense).transpose(1, 2)
        real = padding.bool() if mask is not None else torch.ones(2, 12, dtype=torch.bool)
        torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=1e-4)


def test_a_hole_in_the_padding_and_a_window_are_refused() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 5:9] = 0
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        build("Mistral", sliding_window=7)(input_ids=tokens(), attention_mask=mask)


def test_gemma3_trains_on_text_alone() -> None:
    text = {**GROUPED, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    logits = []
    for implementation in ("eager", "dash"):
        torch.manual_seed(0)
        config = transformers.Gemma3Config(
            text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}
        )
        model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=implementation)
        ids = tokens()
        out = model.train()(input_ids=ids, token_type_ids=torch.zeros_like(ids), labels=ids)
        out.loss.backward()
        logits.append(out.logits.detach())
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_values_are_read_once_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from a GPU is waiting for it: not once a layer."""
    reads = []
    original = packing_module.read
    monkeypatch.setattr(packing_module, "read", lambda *args: (reads.append(1), original(*args))[1])
    model = build("Llama", num_hidden_layers=5)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    for arguments in ({}, {"attention_mask": mask}, {"position_ids": CUT}, {"position_ids": CUT, "use_cache": False}):
        reads.clear()
        packing_module.packs.answers = ()  # the same values of a test before this one need no reading
        model(input_ids=tokens(), **arguments)
        assert len(reads) == 1, arguments


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("beside", [{}, {"position_ids": CUT}], ids=["alone", "position_ids"])
def test_given_ends_are_read_once_in_a_forward_pass(
    beside: dict[str, Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers wait for as many values as one. position_ids make a mask, which may have padding."""

    def run(layers: int) -> None:
        ends = torch.tensor([0, 10, LENGTH], dtype=dtype)
        given = {"input_ids": tokens(1), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **beside}
        build("Llama", num_hidden_layers=layers)(**given, use_cache=False)

    monkeypatch.setattr(calls, "is_remembered", lambda x: True)  # as on a GPU
    run(1)  # prepares the problem
    reads: list[str] = []
    for name in ("tolist", "__bool__"):
        original = getattr(Tensor, name)
        counted = lambda *a, name=name, original=original: (reads.append(name), original(*a))[1]  # noqa: E731
        monkeypatch.setattr(Tensor, name, counted)
    run(1)
    one = reads.copy()
    reads.clear()
    run(6)
    assert reads == one and one.count("tolist") == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_changed_ends_and_padding_are_read_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "is_remembered", lambda x: True)  # as on a GPU
    model, ends = build("Llama").eval(), torch.tensor([0, 10, LENGTH], dtype=dtype)
    with torch.no_grad():
        for place in (10, 20):
            ends[1] = place
            packed = model(input_ids=tokens(1), cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
            alone = model(input_ids=tokens(1)[:, place:]).logits
            torch.testing.assert_close(packed[:, place:], alone, atol=1e-5, rtol=1e-4)
    q, mask = torch.randn(1, 4, LENGTH, 16), plain()
    mask.batch, mask.len_q, mask.len_k = 1, LENGTH, LENGTH
    mask.number = torch.ones(1, LENGTH, dtype=torch.long)
    for padded in (False, True, False):
        mask.number[0, 4] = not padded
        for _ in range(2):
            with pytest.raises(ValueError, match="leave one out") if padded else nullcontext():
                attention_forward(torch.nn.Identity(), q, q, q, mask, cu_seq_lens_q=ends)


@pytest.mark.parametrize(
    "written",
    [lambda x: x, lambda x: x.data, lambda x: torch.from_numpy(x.numpy())],
    ids=["counted", "data", "numpy"],
)
def test_changed_positions_are_read_again(written: Any) -> None:
    """Also if torch does not count the change."""
    model = build("Llama").eval()
    where = torch.arange(LENGTH)[None].clone()
    with torch.no_grad():
        whole = model(input_ids=tokens(1), position_ids=where).logits
        written(where)[0, 20:] = torch.arange(LENGTH - 20)
        packed = model(input_ids=tokens(1), position_ids=where).logits
        alone = model(input_ids=tokens(1)[:, 20:]).logits
    torch.testing.assert_close(packed[:, :20], whole[:, :20])
    torch.testing.assert_close(packed[:, 20:], alone, atol=1e-5, rtol=1e-4)


def test_the_documents_of_a_row_do_not_depend_on_other_rows() -> None:
    """The row begins with 5, 5: two documents, whatever the lowest position of another row is."""
    model, ids, ones = build("Llama").eval(), tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    where = torch.stack([torch.tensor([5, *range(5, LENGTH + 4)]), torch.arange(LENGTH)])
    with torch.no_grad():
        alone, together = (
            model(input_ids=ids[:n], position_ids=where[:n], attention_mask=ones[:n]).logits[0] for n in (1, 2)
        )
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-4)


def test_another_thread_may_read_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with a kept answer stands in for the other thread: it reads another mask."""
    monkeypatch.setattr(packing_module, "packs", packing_module.Recent())
    packed_of, cpu = packing_module.packed_of, torch.device("cpu")
    masks = [(torch.arange(8) < n)[None] for n in range(1, 5)]
    call = packing_module.CallShape(1, 8, 8, by_position=True, windowed=False)

    class Meanwhile(packing_module.CallShape):
        def __eq__(self, other: object) -> bool:
            packed_of(masks.pop(), None, call, cpu)
            return False

    packed_of(masks.pop(), None, call, cpu)
    packed = packed_of(masks.pop(), None, Meanwhile(1, 8, 8, by_position=True, windowed=False), cpu)
    assert packed is not None and packed.cu_q == [0, 3]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_padding_is_kept_where_reading_means_waiting(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "paddings", packing_module.Recent())
    monkeypatch.setattr(calls, "is_remembered", lambda x: on_gpu)
    number, reads, original = torch.tensor([[1, 1, 0]]), list[Tensor](), Tensor.all
    monkeypatch.setattr(Tensor, "all", lambda x: (reads.append(x), original(x))[1])
    assert [packing_module.has_padding(number) for _ in range(3)] == [True] * 3
    assert len(reads) == (1 if on_gpu else 3) and len(packing_module.paddings.answers) == on_gpu
    number[0, 2] = 1
    assert not packing_module.has_padding(number)


def test_positions_are_no_documents_where_all_see_all() -> None:
    """BERT: eager lets every token see every other, whatever their positions."""
    config = {**GROUPED, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    del config["num_key_value_heads"], config["head_dim"]
    outs = []
    for implementation in ("eager", "dash"):
        torch.manual_seed(0)
        model = transformers.BertModel._from_config(
            transformers.BertConfig(**config), attn_implementation=implementation
        )
        outs.append(model(input_ids=tokens(), position_ids=CUT).last_hidden_state)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


def test_a_window_of_nothing_is_refused_by_the_layers_that_have_it() -> None:
    """Qwen2Moe makes a mask of a window of 0 if its config turns windows off. No layer uses it."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes["shared_expert_intermediate_size"] = 32
    eager, dash = (build("Qwen2Moe", name, **sizes) for name in ("eager", "dash"))
    assert dash.config.sliding_window == 0
    outs = (model(input_ids=tokens(), attention_mask=LEFT).logits[LEFT.bool()] for model in (eager, dash))
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="sliding_window must be None or at least 1; Mistral"):
        build("Mistral", sliding_window=0)(input_ids=tokens())
