"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# The first call of a compiled loop takes seconds and machines may be busy: no test fails by the clock.
settings.register_profile("dash_attn", deadline=None, print_blob=True)
settings.load_profile("dash_attn")
