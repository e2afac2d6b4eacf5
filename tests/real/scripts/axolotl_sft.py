# ruff: noqa: E402 - code for the CPU comes before the imports.
"""axolotl's training from a configuration, FSDP version 2: accumulation, sharded checkpoints, a resume from step 4.

Changes for a CPU: as_fsdp.py, a CPU mesh instead of CUDA devices, and no check of GPU peer access. The process group
stays open for the script, which trains twice. Rows are already tokens, because axolotl would make them in processes
that import this file again. During the import of wandb, a stub replaces it, because it reports to a service and needs
packages for that. The deepspeed class that axolotl's tiled MLP imports is also a stub. It is not used with FSDP.
"""

import importlib.machinery
import os
import sys
import types

os.environ |= {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1"}

import as_fsdp
import datasets
import tiny
import torch
import yaml
from accelerate.utils import ParallelismConfig

sys.modules["wandb"] = types.ModuleType("wandb")
sys.modules["wandb"].__spec__ = importlib.machinery.ModuleSpec("wandb", None)
import axolotl.train
import axolotl.utils.callbacks

del sys.modules["wandb"]
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import TrainDatasetMeta

import report

del as_fsdp
make_mesh = ParallelismConfig.build_device_mesh
ParallelismConfig.build_device_mesh = lambda self, _: make_mesh(self, "cpu")
torch.cuda.can_device_access_peer = lambda *_: True
axolotl.train.cleanup_distributed = lambda: None
answer, how = sys.argv[1:3]
folder = f"{answer}.model.{os.environ['RANK']}"
tiny.qwen3().save_pretrained(folder)
tiny.tokenizer().save_pretrained(folder)
tokens = [tiny.tokenizer()(text)["input_ids"] for text in tiny.TEXTS]
rows = [{"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)} for ids in tokens]

settings = {
    "base_model": folder,
    "datasets": [{"path": folder, "type": "completion"}],  # asked for, not read
    "output_dir": answer + ".out",
    "sequence_len": 64,
    "micro_batch_size": 1 if "tiled" in how else 2,  # axolotl's tiles are of one sequence
    "gradient_accumulation_steps": 2,
    "max_steps": 8,
    "save_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler": "constant",
    "optimizer": "adamw_torch",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "fsdp_version": 2,
    "fsdp_config": {
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": how == "meta",
    },
}
if how == "lora":
    settings |= {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
if how == "tiled":
    ulysses = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    sys.modules[ulysses] = types.SimpleNamespace(TiledMLP=None)
    settings |= {"tiled_mlp": True, "tiled_mlp_num_shards": 2, "tiled_mlp_use_original_mlp": True}


def train(**changes):
    with open(folder + ".yaml", "w") as file:
        yaml.safe_dump(settings | changes, file)
    data = TrainDatasetMeta(train_dataset=datasets.Dataset.from_list(rows), total_num_steps=8)
    _, _, trainer = axolotl.train.train(cfg=load_cfg(folder + ".yaml"), dataset_meta=data)
    history = trainer.state.log_history
    return trainer, [entry[name] for entry in history for name in ("loss", "grad_norm") if name in entry]


trainer, values = train()
_, again = train(output_dir=answer + ".again", resume_from_checkpoint=answer + ".out/checkpoint-4")
assert len(values) == 16 and again == values, (values, again)
values += [param.full_tensor().double().sum().item() for param in trainer.model_wrapped.parameters()]
report.write(values, trainer.model_wrapped)
