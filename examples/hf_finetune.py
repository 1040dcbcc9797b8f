"""Trains a small Llama twice and compares every weight, bit for bit. Nothing is downloaded.

python examples/hf_finetune.py [--steps 20] [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dash_attn.integrations.transformers import register

SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def train(steps: int, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, attn_implementation="dash")
    model = LlamaForCausalLM(config).to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens = torch.randint(config.vocab_size, (2, 128), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step in (0, steps - 1):
            print(f"step {step + 1:3}  loss {loss.item():.4f}")
    return model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    register()
    first, second = (train(arguments.steps, arguments.device) for _ in range(2))
    # As bytes: numbers would take 0 and -0 for the same, and NaN for different from itself.
    raw = [{name: weight.view(torch.uint8) for name, weight in weights.items()} for weights in (first, second)]
    different = [name for name in first if not torch.equal(raw[0][name], raw[1][name])]
    if different:
        raise SystemExit(f"{len(different)} of {len(first)} tensors differ, the first is {different[0]}")
    print(f"identical: all {len(first)} tensors, bit for bit, after {arguments.steps} steps")


if __name__ == "__main__":
    main()
