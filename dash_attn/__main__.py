"""python -m dash_attn"""

from dash_attn.tools.cli.main import main

if __name__ == "__main__":
    main()
