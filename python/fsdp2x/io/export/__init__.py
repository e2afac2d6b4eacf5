"""Streams full tensors out of a sharded model: ``stream`` gathers them one bucket at a time."""
