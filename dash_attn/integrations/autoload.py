"""Registration without a line of code, for command lines such as `trl sft`: DASH_ATTN_REGISTER=transformers.

torch calls `autoload` at the end of its own import (entry points of the group torch.backends). Without the variable it
does nothing. With it, dash_attn registers at the first import after Transformers' base of all models is loaded.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "DASH_ATTN_REGISTER"
AFTER = "transformers.modeling_utils"


def autoload() -> None:
    asked = os.environ.get(VARIABLE, "")
    if asked == "transformers":
        if not any(isinstance(finder, Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, Watch())
    elif asked:
        warnings.warn(
            f"{VARIABLE} must be transformers, or not be set; got {asked!r}: nothing is registered", stacklevel=2
        )


class Watch(importlib.abc.MetaPathFinder):
    """Finds no module. Python asks it at every import, and so it sees when Transformers is ready.

    Often torch is imported by the very module that is waited for, so its import cannot be watched from its beginning.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        module = sys.modules.get(AFTER)
        if module is None or getattr(module.__spec__, "_initializing", False):
            return
        sys.meta_path.remove(self)
        from dash_attn.integrations.transformers import register

        register()
