"""A differential fuzzer: random programs, run on the unsharded model, on FSDP2, and on every transport of fsdp2x.

`program` is the plain data of a case. `grammar` draws it, `parts` builds its model, and `machine` and `unsharded` run
it. `judge` compares the records of `observe`, and `known` lists the comparisons that it skips and why. `search` drives
all of them.
"""
