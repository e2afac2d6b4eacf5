"""Saves and loads checkpoints: atomic, resumable on other world sizes, in the background. Loading executes no code."""

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.background import Saved
from fsdp2x.io.checkpoint.directory import mark, resolve
from fsdp2x.io.checkpoint.loading import Loaded, load
from fsdp2x.io.checkpoint.saving import save, wait
from fsdp2x.io.checkpoint.sources import read_parts

__all__ = ["CheckpointError", "Loaded", "Saved", "load", "mark", "read_parts", "resolve", "save", "wait"]
