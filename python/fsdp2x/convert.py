"""Checkpoints to HuggingFace folders and back, offline: one process, no process group, a few MiB of buffers."""

from fsdp2x.io.convert.to_dcp import hf_to_dcp
from fsdp2x.io.convert.to_hf import dcp_to_hf, export_checkpoint, ranks_to_hf

__all__ = ["dcp_to_hf", "export_checkpoint", "hf_to_dcp", "ranks_to_hf"]
