"""The command `dash-attn`, also `python -m dash_attn`."""

import sys


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    from dash_attn.tools import missing_package

    try:
        from dash_attn.tools.cli.main import main as run
    except ImportError as error:
        sys.exit(f"dash-attn: error: {missing_package(error)}")
    run()


if __name__ == "__main__":
    main()
