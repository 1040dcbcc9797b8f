"""dash_attn as the attention of other libraries."""
