"""dash_attn.watch for the Trainer of Transformers."""

from __future__ import annotations

from collections.abc import Container
from os import PathLike
from typing import Any

from transformers import TrainerCallback

from dash_attn.watching.scope import SHARE
from dash_attn.watching.watcher import Watcher, watch


class WatchCallback(TrainerCallback):  # type: ignore[misc]
    """Records a training: `Trainer(..., callbacks=[WatchCallback("folder")])`. The options are those of `watch`.
    A training that resumes from a checkpoint records the numbers of its own steps."""

    def __init__(
        self,
        to: str | PathLike[str],
        steps: Container[int] | None = None,
        depth: int | None = None,
        share: float = SHARE,
    ) -> None:
        self._to, self._steps, self._depth, self._share = to, steps, depth, share
        self._watcher: Watcher | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.on_train_end(args, state, control)  # of a training that ended in an error
        # accelerate wraps the optimizer, and does not call hooks of the wrapper.
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        self._watcher = watch(
            given["model"],
            optimizer=optimizer,
            to=self._to,
            steps=self._steps,
            depth=self._depth,
            share=self._share,
            first_step=0 if state is None else state.global_step,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._watcher is not None:
            self._watcher.close()
