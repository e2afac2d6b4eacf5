"""ms-swift's sft_main with its FSDP2 preset: full or LoRA, accumulation, sharded checkpoints, a resume from step 4.

For a CPU: as_fsdp.py.
"""

import json
import os
import sys

os.environ |= {"ACCELERATE_USE_CPU": "true"}

import as_fsdp
import tiny
from swift import SftArguments
from swift.pipelines.train.sft import SwiftSft

import report

del as_fsdp
answer, how = sys.argv[1:3]
folder = f"{answer}.model.{os.environ['RANK']}"
tiny.qwen3().save_pretrained(folder)
tiny.tokenizer().save_pretrained(folder)
with open(folder + ".jsonl", "w") as file:
    for text in tiny.TEXTS:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        file.write(json.dumps({"messages": messages}) + "\n")
preset = {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
preset |= {"cpu_ram_efficient_loading": how == "full", "state_dict_type": "SHARDED_STATE_DICT"}
preset |= {"activation_checkpointing": True}


class Sft(SwiftSft):
    def train(self, trainer):
        self.trainer = trainer
        return super().train(trainer)


def train(**changes):
    words = {
        "model": folder,
        "model_type": "qwen3",
        "template": "chatml",
        "dataset": [folder + ".jsonl"],
        "tuner_type": how,
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "output_dir": answer + ".out",
        "add_version": False,
        "use_cpu": True,
        "check_model": False,  # against a hub
        "fp16": False,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "split_dataset_ratio": 0.0,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "fsdp": json.dumps({"fsdp": "full_shard auto_wrap", "fsdp_config": preset}),
    }
    sft = Sft(SftArguments(**words | changes))
    sft.main()
    history = sft.trainer.state.log_history
    return sft.trainer, [entry[name] for entry in history for name in ("loss", "grad_norm") if name in entry]


trainer, values = train()
assert len(values) >= 16, values
if how == "full":  # with LoRA stock does not find its parameters in its own checkpoint
    _, again = train(output_dir=answer + ".again", resume_from_checkpoint=answer + ".out/checkpoint-4")
    assert again[-8:] == values[-8:], (values, again)
report.write(values, trainer.model_wrapped)
