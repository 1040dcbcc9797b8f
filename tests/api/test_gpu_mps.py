"""Two processes under NVIDIA's Multi-Process Service, each with grids that fill the GPU: make gpu-test"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "nvidia-cuda-mps-control"
SECONDS = 180  # for both processes: their imports, a compilation, and a second of work
Environment = dict[str, str]


@contextmanager
def daemon() -> Iterator[Environment]:
    """The environment of processes that use a service of their own. The service ends, whatever happens."""
    # Its folder holds a socket, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        places = {name: str(Path(folder) / name[9:13]) for name in names}
        for place in places.values():
            Path(place).mkdir()
        environment = dict(os.environ) | places
        started = subprocess.run([CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=30)
        try:
            if started.returncode:
                pytest.skip(f"{CONTROL} does not start: {started.stderr.strip()[:200]}")
            yield environment
        finally:
            ended(environment)


def ended(environment: Environment) -> None:
    """Ask the service to end, and kill it if it does not. It removes the file with its number when it ends."""
    servers = ask("get_server_list", environment).split()
    ask("quit -t 10", environment)
    file, deadline = Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / f"{CONTROL}.pid", time.monotonic() + 20
    while file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if file.exists():
        for number in (file.read_text().strip(), *servers):
            with suppress(ValueError, ProcessLookupError, PermissionError):
                os.kill(int(number), signal.SIGKILL)


def ask(words: str, environment: Environment) -> str:
    """What the service answers, or nothing if it does not answer."""
    how = {"input": f"{words}\n", "env": environment, "timeout": 30}
    try:
        return subprocess.run([CONTROL], capture_output=True, text=True, check=False, **how).stdout
    except subprocess.TimeoutExpired:
        return ""


def two(environment: Environment, device: str = "cuda") -> tuple[list[str], str]:
    """What two processes say at last that work at the same time, and the servers that worked for them."""
    command = [sys.executable, "-m", "tests.api.gpu_alone", "share", device]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) for _ in range(2)]

    def kill() -> None:
        for process in both:
            process.kill()

    limit = threading.Timer(SECONDS, kill)
    limit.start()
    try:
        said = [process.stdout.readline().strip() for process in both]
        servers = ask("get_server_list", environment)
        for process in both:
            with suppress(BrokenPipeError):
                process.stdin.write("go\n")
                process.stdin.flush()
        # A process that is killed says nothing more.
        last = [process.stdout.read().strip() or first for process, first in zip(both, said, strict=True)]
        return last, servers
    finally:
        limit.cancel()
        kill()
        for process in both:
            process.wait()


def test_two_processes_that_each_want_every_sm() -> None:
    """Both compute the right bits, or say an error. They never wait for each other."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"{CONTROL} is not on PATH")
    with daemon() as environment:
        said, servers = two(environment)
    print("under the Multi-Process Service:", said)
    assert servers.strip(), "the processes did not use the service"
    assert all(each == "right" or each.startswith("refused") for each in said), f"hung or wrong: {said}"
