"""Converts checkpoints to HuggingFace folders and back, offline, in one process with a few MiB of buffers."""
