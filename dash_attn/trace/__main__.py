"""python -m dash_attn.trace"""

from dash_attn.trace.run import main

main()
