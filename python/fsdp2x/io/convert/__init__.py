"""Checkpoints to HuggingFace folders and back, offline: one process, no process group, a few MiB of buffers."""
