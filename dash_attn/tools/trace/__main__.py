"""python -m dash_attn.tools.trace"""

from dash_attn.tools.trace.run import main

main()
