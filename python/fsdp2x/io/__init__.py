"""Reads and writes weights and states: file formats, checkpoints, HuggingFace folders, conversions, full tensors."""
