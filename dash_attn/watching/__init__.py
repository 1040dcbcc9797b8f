"""Which operation differed first? `dash_attn.watch` records fingerprints of a training run. `first_difference` compares
two records.

The folder is not called `watch`, because a folder of that name would hide the function. Reading and comparing records
needs numpy alone.
"""
