"""Settings shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import lru_cache

import pytest
from hypothesis import settings

# The first call of a compiled loop takes seconds and machines may be busy: no test fails by the clock.
settings.register_profile("dash_attn", deadline=None, print_blob=True)
settings.load_profile("dash_attn")

GPU_SECONDS = 180  # several kernels may have to be compiled first


def pytest_configure() -> None:
    """A shell starts commands in the background with interrupts turned off. The tests of interrupts need them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A watchdog for what waits on a GPU. A signal would not get through to a process that waits in the driver; a
    thread ends it and shows where it stood."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.timeout(GPU_SECONDS, method="thread"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not hopper():
        pytest.fail("asked for GPU tests, but there is no Hopper GPU")


@lru_cache
def hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of torch's operations repeat their bits."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
