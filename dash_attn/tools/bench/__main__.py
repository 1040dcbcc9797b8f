"""python -m dash_attn.tools.bench [audit] ...: the same commands with nothing but torch and numpy installed."""

from __future__ import annotations

import sys


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["audit"]:
        from dash_attn.tools.bench.audit.command import main

        return main(arguments[1:])
    from dash_attn.tools.bench.command import main as bench

    return bench(arguments[1:] if arguments[:1] == ["bench"] else arguments)


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"dash-attn: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
