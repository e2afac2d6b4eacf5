"""Weights of a sharded model into running inference engines: ``connect`` once, then ``push`` a version at a time."""
