"""The core's names for the folders above it: ``train`` and ``rl`` import them from here.

They also import the modules of public names (``fsdp2x.checkpoint``, ``fsdp2x.sequence``, and so on), and those that
README.md lists. They import nothing else of the core, so this is what a change of the core can break.

Users import public names from ``fsdp2x``. The others may change at any time.
"""
# ruff: noqa: F401

from fsdp2x.base.collectives import explained
from fsdp2x.base.memory_file import MemoryFile, aligned_starts, collect_handed
from fsdp2x.base.native import _C, build_info
from fsdp2x.base.processes import boot_id, require_own_process
from fsdp2x.base.torch_private import (
    gathers_of_nccl,
    never_compiled,
    outside_expandable_segments,
    start_memory_history,
    stop_memory_history,
)
from fsdp2x.io.checkpoint.background import Saver
from fsdp2x.io.checkpoint.directory import LATEST, whole_checkpoints
from fsdp2x.io.checkpoint.directory import candidates as checkpoint_candidates
from fsdp2x.io.checkpoint.directory import find as find_checkpoint
from fsdp2x.io.checkpoint.directory import repair as repair_checkpoints
from fsdp2x.io.checkpoint.rng import seed_all
from fsdp2x.io.convert.adapters import ADAPTER_FOLDER
from fsdp2x.io.formats.safe_files import how_to_download, parse_json, read_text
from fsdp2x.io.hf.empty import build_empty, plain_config, read_config, read_hf_config, told_of
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.hf.layout import bars_of_rank_0
from fsdp2x.io.hf.load import from_pretrained
from fsdp2x.io.hf.lora import add_lora, save_adapter
from fsdp2x.io.hf.save import TOKENIZER_FILES, save_adapter_config, write_config
from fsdp2x.io.merged import MergedModel
from fsdp2x.io.names import has_adapters
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.lifecycle.contexts import accumulate, unsharded
from fsdp2x.lifecycle.lazy_init import release_memory
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.sleep import sleep, wake
from fsdp2x.lifecycle.tree import named_params, running_step, unit_states, units_of
from fsdp2x.models.freeze import freeze_module_prefix
from fsdp2x.models.sequence.attention import base_model, find_decoder, head_counts, head_dims
from fsdp2x.models.sequence.exchange import ExchangedBytes
from fsdp2x.models.sequence.layout import Peers, RankPart
from fsdp2x.models.sequence.loss import RowGradients, RowSums, check_labels, check_temperature, mean_of_tokens
from fsdp2x.models.sequence.packing import IGNORE
from fsdp2x.models.tiled_mlp import apply_tiled_mlp
from fsdp2x.optim.local import local_tensor
from fsdp2x.plan.activations import Activations, estimate_activations
from fsdp2x.plan.describe import describe
from fsdp2x.plan.optimizers import PLANNED, may_be_on_host
from fsdp2x.plan.plan import planned_facts, planned_report
from fsdp2x.plan.profile import profile
from fsdp2x.plan.report import columns, readable
from fsdp2x.sharding.offload import OFFLOAD_MODES, HostOffloadPolicy, OffloadMode, cpu_offload_by_budget, mode_of
from fsdp2x.sharding.transport import TRANSPORTS, TransportKind, check_transport
from fsdp2x.sharding.wrap import AutoWrap, clean_name, plan_units, unsharded_class

ALIGN_BYTES, align_up = _C.ALIGN_BYTES, _C.align_up
can_run_kernels, has_device_kernels, take_changes = _C.can_run_kernels, _C.has_device_kernels, _C.take_changes
