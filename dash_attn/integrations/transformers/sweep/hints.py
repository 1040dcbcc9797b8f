"""What the general rules of small.py cannot know: sizes that must fit each other in a single family."""

from __future__ import annotations

from typing import Any

# model_type -> path of a field -> value
HINTS: dict[str, dict[str, Any]] = {}
