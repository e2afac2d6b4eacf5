"""Streams full tensors out of a sharded model: ``stream`` gathers them one bucket at a time."""

from fsdp2x.io.export.stream import Bucket, stream

__all__ = ["Bucket", "stream"]
