"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def registered() -> Iterator[None]:
    """`dash` is registered, and torch has one thread: small models need no more."""
    import torch

    from dash_attn.integrations.transformers import register

    register()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rest of the model repeats its bits too, where torch can do that."""
    import torch

    from dash_attn.integrations.transformers import register

    register()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
