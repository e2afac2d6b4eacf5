"""The way to and from HuggingFace files."""

from .export import export, export_checkpoint

__all__ = ["export", "export_checkpoint"]
