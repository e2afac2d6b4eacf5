"""Checkpoints in three forms: atomic, for other world sizes too, in the background, and executing nothing they hold."""

from fsdp2x.errors import CheckpointError

from .background import Saved
from .directory import mark, resolve
from .loading import Loaded, load
from .saving import save, wait
from .sources import read_parts

__all__ = ["CheckpointError", "Loaded", "Saved", "load", "mark", "read_parts", "resolve", "save", "wait"]
