"""Sharded checkpoints: atomic, loadable at another world size, and executing nothing that they contain."""

from .agree import CheckpointError
from .directory import resolve
from .state import Loaded, load_checkpoint, save_checkpoint

__all__ = ["CheckpointError", "Loaded", "load_checkpoint", "resolve", "save_checkpoint"]
