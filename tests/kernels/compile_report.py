"""Compiles configs given as field=value lists (one per argument) and prints facts about the machine code as JSON."""

import io
import json
import os
import re
import struct
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

os.environ["CUTE_DSL_ARCH"] = "sm_90a"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))

from dash_attn.kernels.sm90.bundles import smem_struct
from dash_attn.kernels.sm90.compile import COMPILERS
from dash_attn.kernels.sm90.config import select


def sections(elf: bytes) -> dict[str, bytes]:
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    table = heads[names][4]

    def name(h):
        return elf[table + h[0] : elf.index(b"\0", table + h[0])].decode()

    return {name(h): elf[h[4] : h[4] + h[5]] for h in heads if h[1] != 8}


def frame_sizes(elf: bytes) -> list[int]:
    """Stack bytes per function from .nv.info (attribute 0x11: symbol, bytes)."""
    info, at, out = sections(elf)[".nv.info"], 0, []
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == 4:
            if attribute == 0x11:
                out.append(struct.unpack_from("<II", info, at + 4)[1])
            at += 4 + size
        else:
            at += 4
    return out


def report(kind: str, cfg) -> dict:
    t0, text = time.time(), io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        fn = COMPILERS[kind](cfg, "--keep-ptx --keep-cubin remarks{ptx}")
    ptx = fn.__ptx__ if isinstance(fn.__ptx__, str) else fn.__ptx__.decode()
    remarks = text.getvalue()
    return dict(
        kind=kind,
        config=str(cfg),
        seconds=round(time.time() - t0, 1),
        frames=frame_sizes(fn.__cubin__),
        spills=[int(x) for x in re.findall(r"(\d+) bytes spill", remarks)],
        warnings=[w for w in re.findall(r"C75\d\d", remarks) if w != "C7519"],
        remarked="ptxas" in remarks,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        setmaxnreg=ptx.count("setmaxnreg"),
        bulk_reduce=ptx.count("cp.reduce.async.bulk"),
        tma_loads=ptx.count("cp.async.bulk.tensor"),
        release=len(re.findall(r"red\S*release\S*gpu", ptx)) + len(re.findall(r"atom\S*release\S*gpu", ptx)),
        smem=smem_struct(cfg).size_in_bytes(),
    )


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        kind, dim, dtype, mask, ordered = arg.split(",")
        print(json.dumps(report(kind, select(int(dim), dtype, mask, ordered == "1"))), flush=True)
