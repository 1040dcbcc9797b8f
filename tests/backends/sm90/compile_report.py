"""Compiles configs for sm_90a without a GPU and prints facts about their machine code, a line of JSON each.

An argument names a kernel and the arguments of `select`: kind,dim,dtype,mask,ordered,keys. A further ",debug",
",trace", ",cut", ",packed" or ",softcap" asks for that build.

    python tests/backends/sm90/compile_report.py main,128,bf16,causal,1,0 finish,64,fp16,full,1,4096
"""

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))

from dash_attn.backends.sm90.config import DEBUG, TRACE, KernelConfig, select

# Address, perhaps a predicate, opcode.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


FIELDS = {"debug": dict(DEBUG), "trace": dict(TRACE), **{name: {name: True} for name in ("cut", "packed", "softcap")}}


def config_of(name: str) -> tuple[str, KernelConfig]:
    kind, dim, dtype, mask, ordered, keys, *builds = name.split(",")
    cfg = select(int(dim), dtype, mask, ordered == "1", int(keys), "softcap" in builds)
    for build in builds:
        cfg = replace(cfg, **FIELDS[build])
    return kind, cfg


def disassembler() -> str | None:
    """The path of nvdisasm, from the wheel nvidia-cuda-nvdisasm or from a CUDA toolkit on the path."""
    try:
        in_wheel = [str(f.locate()) for f in files("nvidia-cuda-nvdisasm") or () if f.name == "nvdisasm"]
    except PackageNotFoundError:
        in_wheel = []
    return in_wheel[0] if in_wheel else shutil.which("nvdisasm")


def opcodes(elf: bytes) -> Counter[str]:
    """How often each instruction occurs, as NAME.MODIFIERS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        text = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return Counter(INSTRUCTION.findall(text))


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


def report(kind: str, cfg: KernelConfig) -> dict:
    from dash_attn.backends.sm90.device.bundles import smem_struct
    from dash_attn.backends.sm90.device.compile import COMPILERS

    start, text = time.time(), io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        fn = COMPILERS[kind](cfg, "--keep-cubin remarks{ptx}")
    remarks, ops = text.getvalue(), opcodes(fn.__cubin__)

    def count(*names: str) -> int:
        """Instructions whose name and modifiers include all of `names`."""
        return sum(n for op, n in ops.items() if set(names) <= set(op.split(".")))

    return dict(
        kind=kind,
        config=str(cfg),
        seconds=round(time.time() - start, 1),
        instructions=ops.total(),
        frames=frame_sizes(fn.__cubin__),
        spills=[int(x) for x in re.findall(r"(\d+) bytes spill", remarks)],
        warnings=[w for w in re.findall(r"C75\d\d", remarks) if w != "C7519"],
        remarked="ptxas" in remarks,
        local=count("LDL") + count("STL"),
        products=count("HGMMA"),
        register_moves=count("USETMAXREG"),
        bulk_adds=count("UBLKRED", "ADD", "F32"),
        loads=count("UTMALDG"),
        polls=count("LDG", "STRONG", "GPU"),
        fences=count("MEMBAR", "GPU"),
        releases=count("REDG", "ADD", "STRONG", "GPU"),
        traps=count("BPT", "TRAP"),
        tanhs=count("MUFU", "TANH"),
        smem=smem_struct(cfg).size_in_bytes(),
    )


if __name__ == "__main__":
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    # The compiler names the cubin that it keeps after the argument types alone, and reads it back by that name. So two
    # processes that compile different configs must not share a folder.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        for name in sys.argv[1:]:
            print(json.dumps(report(*config_of(name))), flush=True)
