"""Tools around attention: the command line, pictures, benchmarks, traces. They need the extra `tools`."""

EXTRA = ("matplotlib", "ortools", "rich", "rustworkx", "typer")


def missing_package(error: ImportError) -> str:
    """One line that says what to install."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        return str(error)
    return f"the package {package} is not installed, which the tools of dash_attn need: pip install 'dash-attn[tools]'"
