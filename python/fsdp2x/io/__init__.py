"""Weights and states in and out: file formats, checkpoints, HuggingFace folders, conversions, whole tensors."""
