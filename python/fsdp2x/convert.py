"""Checkpoints to HuggingFace folders and back, offline: one process, no process group, a few MiB of buffers."""

from fsdp2x.io.convert.folders import dcp_to_hf, export_checkpoint, hf_to_dcp, ranks_to_hf

__all__ = ["dcp_to_hf", "export_checkpoint", "hf_to_dcp", "ranks_to_hf"]
