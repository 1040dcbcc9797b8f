"""The callback that records what the Trainer of Transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dash_attn.integrations.transformers.watching import WatchCallback  # noqa: E402
from dash_attn.watching.difference import first_difference  # noqa: E402
from dash_attn.watching.files import Record, load_run  # noqa: E402
from tests.integrations.small import GROUPED  # noqa: E402


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(97, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder: Path, name: str, resume: str | None = None, **options: Any) -> list[Record]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    transformers.Trainer(
        model_init=lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, use_cache=False)),
        args=arguments,
        train_dataset=Texts(),
        callbacks=[WatchCallback(folder / name)],
    ).train(resume_from_checkpoint=resume)
    return load_run(folder / name)


def test_two_trainings(tmp_path: Path) -> None:
    a, b = (trained(tmp_path, name) for name in "ab")
    assert first_difference(a, b) is None and sorted(a[0].steps) == [0, 1, 2]
    rows = a[0].steps[1].rows
    data = [row.tensor for row in rows if row.phase == "data"]
    assert data.count("input.input_ids") == data.count("input.labels") == 2  # micro-batches
    assert ("update", "lm_head", "exp_avg of weight") in {row[:3] for row in rows}


def test_another_order_of_the_data(tmp_path: Path) -> None:
    parting = first_difference(trained(tmp_path, "a"), trained(tmp_path, "b", data_seed=5))
    assert parting is not None and (parting.step, parting.topic) == (0, "data")
    assert parting.tensor == "input.input_ids"


def test_gradient_checkpointing(tmp_path: Path) -> None:
    a, b = (trained(tmp_path, name, gradient_checkpointing=True) for name in "ab")
    assert first_difference(a, b) is None
    assert "recompute" in {row.phase for row in a[0].steps[0].rows}


def test_a_training_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = trained(tmp_path, "a", save_strategy="steps", save_steps=2)
    later = trained(tmp_path, "b", resume=str(tmp_path / "out" / "checkpoint-2"))
    assert sorted(whole[0].steps) == [0, 1, 2] and sorted(later[0].steps) == [2]
    assert first_difference(whole, later) is None and first_difference(later, whole) is None


def test_a_training_after_one_that_failed(tmp_path: Path) -> None:
    """The watcher of the first training still writes to the folder. The second one closes it."""
    model = torch.nn.Linear(2, 2)
    optimizer, callback = torch.optim.SGD(model.parameters(), lr=0.1), WatchCallback(tmp_path)
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    callback.on_train_end(None, None, None)
    assert [sorted(record.steps) for record in load_run(tmp_path)] == [[0]]
