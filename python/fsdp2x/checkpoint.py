"""Checkpoints in three forms: atomic, for other world sizes too, in the background, and executing nothing they hold."""

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.background import Saved
from fsdp2x.io.checkpoint.directory import mark, resolve
from fsdp2x.io.checkpoint.loading import Loaded, load
from fsdp2x.io.checkpoint.saving import save, wait
from fsdp2x.io.checkpoint.sources import read_parts

__all__ = ["CheckpointError", "Loaded", "Saved", "load", "mark", "read_parts", "resolve", "save", "wait"]
