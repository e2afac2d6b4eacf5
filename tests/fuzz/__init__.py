"""A differential fuzzer: random programs, run on the unsharded model, on stock FSDP2 and on every transport of ours.

`program` is the plain data of a case, `grammar` draws it, `parts` builds its model, `machine` and `unsharded` run it,
`judge` compares what `observe` recorded, `known` lists what is left out and why, `search` drives it all.
"""
