"""python -m dash_attn.integrations.transformers.sweep [--family NAME ...] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from dash_attn.integrations.transformers.sweep.compare import examine
from dash_attn.integrations.transformers.sweep.families import families


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.integrations.transformers.sweep", description=__doc__)
    parser.add_argument("--family", nargs="*", help="model types; all if not given")
    parser.add_argument("--json", help="a line for every family goes to this file")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th family from the i-th on")
    given = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    part, parts = map(int, given.part.split("/"))
    names = given.family or families()[part::parts]
    for number, family in enumerate(names, 1):
        begin = time.monotonic()
        outcome = examine(family)
        line = f"{number}/{len(names)} {family}: {outcome.verdict} {outcome.reason} ({time.monotonic() - begin:.1f} s)"
        print(line, file=sys.stderr, flush=True)
        if given.json:
            with open(given.json, "a", encoding="utf-8") as file:
                print(json.dumps(asdict(outcome)), file=file)


if __name__ == "__main__":
    main()
