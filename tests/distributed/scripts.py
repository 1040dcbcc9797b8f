"""Runs a script on several ranks, as torchrun does, in processes that have torch loaded already."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from tests.distributed.pool import CONTEXT


def run_on_ranks(script: Path, ranks: int, limit: float = 200.0) -> str:
    """What the ranks print, one after the other. An error in one of them is an error here."""
    printed = [script.with_suffix(f".{rank}.txt") for rank in range(ranks)]
    port = _free_port()
    processes = [
        CONTEXT.Process(target=_run, args=(str(script), (rank, ranks, port), str(path)), daemon=True)
        for rank, path in enumerate(printed)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit)
        if process.is_alive():
            process.kill()
    texts = [path.read_text(encoding="utf-8") for path in printed]
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, f"{codes}: {texts}"
    return "".join(texts)


def _run(script: str, place: tuple[int, int, int], path: str) -> None:
    rank, ranks, port = place
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    os.chdir(Path(script).parent)
    with open(path, "w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        sys.argv = [script]
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:  # the file is closed before Python would print it
            traceback.print_exc()
            raise


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
