"""The functions that users call: tensors in, tensors out. `dash_attn.api.explain` has `explain`, which loads more."""

from dash_attn.api.attention import attention
from dash_attn.api.backward import backward
from dash_attn.api.flash import flash_attn_func, flash_attn_varlen_func

__all__ = ["attention", "backward", "flash_attn_func", "flash_attn_varlen_func"]
