"""The JSON of results. JSON has no number for NaN and infinity, so these are written as "nan", "inf" and "-inf".

Python's float() reads these strings. A script that compares one with a number gets an error or no, but null would count
as 0 in some languages, and pass a limit.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


def to_json(value: Any, indent: int | None = None) -> str:
    """Text that every reader of JSON takes."""
    return json.dumps(_named(value), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """What `to_json` has written, with NaN and infinity as numbers again."""
    return _numbered(json.loads(text))


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _named(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbered(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_numbered(each) for each in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
