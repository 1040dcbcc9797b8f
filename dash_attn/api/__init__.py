"""What users call: tensors in, tensors out."""

from dash_attn.api.attention import attention
from dash_attn.api.backward import backward
from dash_attn.api.explain import Explanation, explain

__all__ = ["Explanation", "attention", "backward", "explain"]
