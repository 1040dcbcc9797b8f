"""Fine-tunes a Transformers model twice with the Trainer and compares every weight, bit for bit.

python examples/hf_finetune.py [--steps 20] [--device cuda] [--model folder-or-name]

Without --model, the model is a small Llama with random weights, and nothing is downloaded. The text is the source of
dash_attn, one token a byte.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dash_attn
from dash_attn.integrations.transformers import register

SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 128


def texts() -> list[dict[str, torch.Tensor]]:
    files = sorted(Path(dash_attn.__file__).parent.rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)]


def finetune(name: str, steps: int, device: str, folder: str) -> dict[str, torch.Tensor]:
    # The one line that changes: attn_implementation.
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dash")
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        bf16=device == "cuda",
        full_determinism=True,  # seeds, and torch's flag for everything that is not attention
        use_cpu=device == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=texts()).train()
    print(f"{steps} steps, mean loss {result.training_loss:.4f}")
    return {name: weight.cpu() for name, weight in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model")
    given = parser.parse_args()
    register()
    with tempfile.TemporaryDirectory() as folder:
        name = given.model
        if name is None:
            name = f"{folder}/small"
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(name)
        first, second = (finetune(name, given.steps, given.device, folder) for _ in range(2))
    # Compare bytes, because as numbers 0 equals -0, and NaN differs from itself.
    raw = [{name: weight.view(torch.uint8) for name, weight in weights.items()} for weights in (first, second)]
    different = [name for name in first if not torch.equal(raw[0][name], raw[1][name])]
    if different:
        raise SystemExit(f"{len(different)} of {len(first)} tensors differ, the first is {different[0]}")
    print(f"identical: all {len(first)} tensors, bit for bit, after {given.steps} steps")


if __name__ == "__main__":
    main()
