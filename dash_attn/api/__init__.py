"""The functions that users call: tensors in, tensors out."""

from dash_attn.api.attention import attention
from dash_attn.api.backward import backward
from dash_attn.api.explain import Explanation, explain
from dash_attn.api.flash import flash_attn_func, flash_attn_varlen_func

__all__ = ["Explanation", "attention", "backward", "explain", "flash_attn_func", "flash_attn_varlen_func"]
