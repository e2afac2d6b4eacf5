"""Pushes weights of a sharded model into running inference engines: ``connect`` once, ``push`` for each version."""
