"""The name "dash" among Transformers' attention implementations."""

from __future__ import annotations

from dash_attn.integrations.transformers.forward import attention_forward
from dash_attn.integrations.transformers.masks import model_mask


def register(name: str = "dash") -> None:
    """Make `attn_implementation=name` mean dash_attn, for models built or loaded from now on. Again does no harm."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("Transformers 5 or later is needed: pip install 'dash-attn[hf]'") from error
    from transformers import AttentionInterface, AttentionMaskInterface

    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which Transformers takes for its own kernels; got {name!r}")
    # Without the mask function Transformers would leave out the padding mask, and say nothing.
    pairs = ((AttentionInterface(), attention_forward), (AttentionMaskInterface(), model_mask))
    for interface, ours in pairs:
        if interface.get(name, ours) is not ours:
            raise ValueError(f"{name!r} is already the name of another attention; choose one of your own")
    for interface, ours in pairs:
        interface.register(name, ours)
