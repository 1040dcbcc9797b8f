"""attn_implementation="dash" for the models of Hugging Face Transformers."""

from dash_attn.integrations.transformers.checking import Report, check
from dash_attn.integrations.transformers.forward import attention_forward
from dash_attn.integrations.transformers.masks import model_mask
from dash_attn.integrations.transformers.registration import register

__all__ = ["Report", "attention_forward", "check", "model_mask", "register"]
