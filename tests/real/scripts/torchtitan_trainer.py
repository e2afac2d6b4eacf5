# ruff: noqa: E402 - code for the CPU comes before the imports.
"""torchtitan's Trainer with a family's debug model, by default in its default setting, spmd_types; settings follow.

Changes for a CPU: The device is "cpu", and the memory monitor is a stub. Attention is torch's instead of compiled flex
attention. Timeouts do not change after the first step, and nothing is compiled or captured. gloo has no PREMUL_SUM, so
reductions are sums. Ranks get different numbers of expert tokens, which go through `all_to_all_single`, because gloo's
lists need equal tensors. MoE models only have their first two layers, because their products are a loop on a CPU.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as wrapping
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention

import report

stats = types.SimpleNamespace(
    max_active_gib=0, max_active_pct=0, max_reserved_gib=0, max_reserved_pct=0, num_alloc_retries=0, num_ooms=0
)
monitor = types.SimpleNamespace(
    device_name="cpu", device_capacity_gib=1.0, reset_peak_stats=lambda: None, get_peak_stats=lambda: stats
)
metrics.build_device_memory_monitor = lambda: monitor
dist_utils.set_pg_timeouts = lambda **kwargs: None


def causal(q, k, v, *, scale, enable_gqa, **kwargs):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out, None


FlexAttention._compiled_flex_attn = staticmethod(causal)
divide = wrapping.disable_fsdp_gradient_division


def divide_by_sums(model):
    divide(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


wrapping.disable_fsdp_gradient_division = divide_by_sums


def all_to_all(outputs, inputs, group=None):
    sizes = [[each.shape[0] for each in tensors] for tensors in (outputs, inputs)]
    received = torch.cat(outputs)
    torch.distributed.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)


torch.distributed.all_to_all = all_to_all

folder = Path(f"{sys.argv[1]}.data.{os.environ['RANK']}")
folder.mkdir(exist_ok=True)
words = [f"w{i}" for i in range(100)]
plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *words])}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
plain.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
(folder / "data").mkdir(exist_ok=True)
rows = [{"text": " ".join(words[(i * 7 + j * j) % 100] for j in range(60))} for i in range(64)]
(folder / "data" / "data.json").write_text("\n".join(map(json.dumps, rows)))

example = sys.argv[2] == "example"
family, *settings = sys.argv[2 + example :]
config = getattr(importlib.import_module(f"torchtitan.models.{family}.config_registry"), f"{family}_debugmodel")()
model_registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
config.model_spec = model_registry("debugmodel", attn_backend="flex")
if family != "llama3":
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
config.hf_assets_path = str(folder)
config.dataloader.dataset_path = str(folder / "data")
config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, 6
config.training.disable_cuda_graphs = True
config.dump_folder = str(folder)
# The weights are drawn by every process from its own clock unless a seed is set.
config.debug.seed = 7
for setting in settings:
    place, _, value = setting.partition("=")
    if place == "activation_checkpoint":
        config.activation_checkpoint = getattr(activation_checkpoint, value).Config()
        continue
    *holders, name = place.split(".")
    holder = config
    for part in holders:
        holder = getattr(holder, part)
    assert hasattr(holder, name), setting
    setattr(holder, name, json.loads(value))

losses = []
log = metrics.MetricsProcessor.log


def recorded(self, step, global_avg_loss, global_max_loss, grad_norm, *args, **kwargs):
    losses.extend((global_avg_loss, grad_norm))
    return log(self, step, global_avg_loss, global_max_loss, grad_norm, *args, **kwargs)


metrics.MetricsProcessor.log = recorded
trainer = config.build()
if example:
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "integrations"))
    from torchtitan_local_step import step_locally

    step_locally(trainer)
trainer.train()
assert len(losses) >= 6, losses
report.write(losses, trainer.model_parts[0])
trainer.close()
