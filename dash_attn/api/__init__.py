"""The functions that users call: tensors in, tensors out. `dash_attn.api.explain` has `explain`, which loads more."""

from dash_attn.api.autograd import attention
from dash_attn.api.flash import flash_attn_func, flash_attn_varlen_func
from dash_attn.api.gradients import backward

__all__ = ["attention", "backward", "flash_attn_func", "flash_attn_varlen_func"]
