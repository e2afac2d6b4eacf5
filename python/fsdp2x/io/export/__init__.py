"""Whole tensors out of a sharded model: ``stream`` gathers them a bucket at a time."""
