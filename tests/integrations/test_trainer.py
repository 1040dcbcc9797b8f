"""The Trainer of Transformers itself: two runs of it, and its full-determinism switch, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dash_attn.api.arguments import wants_determinism  # noqa: E402
from dash_attn.integrations.transformers import forward as integration  # noqa: E402
from dash_attn.integrations.transformers import register  # noqa: E402

STEPS = 20
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences of unequal length, which the collator pads."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(1, SIZES["vocab_size"], (9 + index,), generator=generator)}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that asked for speed, until a Trainer asks for determinism; put back afterwards."""
    register()
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def trained(folder: Path, collator: Callable[..., Any] = collate, **options: Any) -> list[Tensor]:
    """Weights after a few steps, as bits."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=options.pop("max_steps", STEPS),
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )
    # Built by the Trainer, behind the switch and its seed.
    trainer = transformers.Trainer(
        model_init=lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, attn_implementation="dash", use_cache=False)
        ),
        args=arguments,
        train_dataset=Texts(),
        data_collator=collator,
    )
    trainer.train()
    assert trainer.state.global_step == arguments.max_steps
    return [x.detach().view(torch.int32) for x in trainer.model.parameters()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    first, second = (trained(tmp_path, full_determinism=True) for _ in range(2))
    assert same(first, second)
    assert not same(first, trained(tmp_path, full_determinism=True, seed=1))


def test_sequences_packed_by_a_collator(tmp_path: Path) -> None:
    """Given as position_ids or as cu_seq_lens beside, they are the same documents and give the same bits."""
    by_position, by_ends = (
        trained(tmp_path, transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=ends), max_steps=3)
        for ends in (False, True)
    )
    assert same(by_position, by_ends)


def test_recomputed_activations_have_the_same_bits(tmp_path: Path) -> None:
    once, twice = (trained(tmp_path, max_steps=3, gradient_checkpointing=again) for again in (False, True))
    assert same(once, twice)


@pytest.mark.parametrize("switch", [False, True])
def test_the_switch_is_obeyed_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: bool) -> None:
    asked = []
    original = integration.attention

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        asked.append(wants_determinism(options["deterministic"]))
        return original(*tensors, **options)

    monkeypatch.setattr(integration, "attention", spy)
    trained(tmp_path, max_steps=1, full_determinism=switch)
    assert asked == [switch] * SIZES["num_hidden_layers"]
