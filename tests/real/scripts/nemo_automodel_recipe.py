# ruff: noqa: E402 - code for the CPU comes before the imports.
"""NeMo Automodel's recipe for fine-tuning with its FSDP2 strategy: accumulation, clipping, a resume from step 4.

Changes for a CPU: the current CUDA device is the CPU, and peaks of memory are 0. Changes for this torch: no guard
around an FSDP2 method that no longer exists. Changes for its triton: no kernel tuning, because triton refuses one
kernel.
"""

import os
import sys

import torch
import triton

triton.autotune = lambda *_, **__: lambda kernel: kernel
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.max_memory_allocated = lambda *_: 0
torch.cuda.reset_peak_memory_stats = lambda *_: None

import nemo_automodel._transformers.auto_model as auto_model
import nemo_automodel.components.distributed.parallelizer as parallelizer
import tiny
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

import report


class Torch:
    """torch for the module that asks for a device by "cuda" and a number."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(*_):
        return make_device("cpu")


make_device = torch.device
auto_model.torch = Torch()
parallelizer._patch_fsdp_accumulated_grad_guard = lambda: None
answer = sys.argv[1]
folder = f"{answer}.model.{os.environ['RANK']}"
tiny.qwen3().save_pretrained(folder)
tiny.tokenizer().save_pretrained(folder)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = tiny.batches(1, 1, index)[0][0].tolist()
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}


class Recorded(TrainFinetuneRecipeForNextTokenPrediction):
    values = []

    def log_train_metrics(self, log_data):
        self.values += [log_data.metrics[name] for name in ("loss", "grad_norm")]
        return super().log_train_metrics(log_data)


settings = {
    "seed": 7,
    "step_scheduler": {"global_batch_size": 8, "local_batch_size": 2, "max_steps": 8, "ckpt_every_steps": 4},
    "dist_env": {"backend": "gloo", "timeout_minutes": 2},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": folder,
        "torch_dtype": "float32",
    },
    "distributed": {"strategy": "fsdp2", "dp_size": None, "tp_size": 1, "cp_size": 1},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {"_target_": f"{__name__}.Rows"},
    "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": False},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    "checkpoint": {"enabled": True, "checkpoint_dir": answer + ".saved", "model_save_format": "safetensors"},
    "clip_grad_norm": {"max_norm": 1.0},
}


def run(**changes) -> Recorded:
    recipe = Recorded(ConfigNode(settings | changes))
    recipe.values = []
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe


recipe = run()
saved = {"checkpoint_dir": answer + ".again", "restore_from": f"{answer}.saved/epoch_0_step_3"}
again = run(checkpoint=settings["checkpoint"] | saved)
assert len(recipe.values) == 16 and again.values == recipe.values[8:], (recipe.values, again.values)
(model,) = recipe.model_parts
report.write([*recipe.values, *(param.full_tensor().double().sum().item() for param in model.parameters())], model)
