"""Finds the first tensor in which two runs of a training script differ: `fsdp2x compare`.

``Recorder`` records a run as a trace of sketches (``sketch.py``), ``judge`` compares traces, and ``compare_sides`` runs
both sides as processes. ``engines.py`` replaces how a script shards its model, and ``joining.py`` lets a side with
fewer ranks train on the rows of the other one.
"""
