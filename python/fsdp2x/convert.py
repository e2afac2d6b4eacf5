"""Converts checkpoints to other forms and to HuggingFace folders, in one process and without a process group."""

from fsdp2x.io.convert.checkpoints import convert_checkpoint
from fsdp2x.io.convert.folders import dcp_to_hf, export_checkpoint, hf_to_dcp, ranks_to_hf

__all__ = ["convert_checkpoint", "dcp_to_hf", "export_checkpoint", "hf_to_dcp", "ranks_to_hf"]
