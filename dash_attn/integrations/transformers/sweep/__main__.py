"""Build every architecture of the installed Transformers small and compare dash_attn with eager attention."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from dash_attn.integrations.transformers.sweep.compare import NO_MODEL, Outcome, examine
from dash_attn.integrations.transformers.sweep.families import families
from dash_attn.integrations.transformers.sweep.table import counts, row, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.integrations.transformers.sweep", description=__doc__)
    parser.add_argument("--family", nargs="*", default=[], help="model types; all if not given")
    parser.add_argument("--json", type=Path, help="a line for every family; families that it already has are not run")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th family from the i-th on")
    parser.add_argument("--out", type=Path, help="write the rows into this document; other rows stay")
    given = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    part, parts = map(int, given.part.split("/"))
    names = given.family or families()[part::parts]
    known = {}
    if given.json and given.json.exists():
        lines = given.json.read_text(encoding="utf-8").splitlines()
        known = {x.family: x for x in (Outcome(**json.loads(line)) for line in lines)}
    outcomes = []
    for number, family in enumerate(names, 1):
        if family not in known:
            begin = time.monotonic()
            outcome = known[family] = examine(family)
            seconds = time.monotonic() - begin
            print(
                f"{number}/{len(names)} {family}: {outcome.verdict}  {outcome.reason} ({seconds:.1f} s)",
                file=sys.stderr,
            )
            if given.json:
                with given.json.open("a", encoding="utf-8") as file:
                    print(json.dumps(asdict(outcome)), file=file)
        if known[family].reason != NO_MODEL:
            outcomes.append(known[family])
    print(counts(row(x) for x in outcomes))
    if given.out:
        write(outcomes, transformers.__version__, given.out, merge=bool(given.family) or parts > 1)
    sys.exit(any(x.verdict in ("wrong", "crash") for x in outcomes))


if __name__ == "__main__":
    main()
