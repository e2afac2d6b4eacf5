"""`fsdp2x compare` on programs that it did not come from: both sides agree."""

import os
import subprocess

import pytest
from environments import HERE, python_with

UNSHARDED, ENGINES = ("--against", "unsharded"), ("--engine", "fsdp2x", "--against", "fsdp2")
# Program -> package, script with its words, and what to compare.
RUNS = {
    "Trainer on FSDP2": ("huggingface", "trainer_fsdp2 all", UNSHARDED),
    "Trainer under install": ("huggingface", "trainer_fsdp2 all", ENGINES),
    "Trainer with LoRA": ("huggingface", "trainer_fsdp2 lora", UNSHARDED),
    "accelerate": ("huggingface", "accelerate_fsdp2 plain", UNSHARDED),
    "transformers": ("huggingface", "transformers_native loop tied", UNSHARDED),
    "TRL SFT": ("trl", "trl_sft all kept", UNSHARDED),
    "Lightning Trainer": ("lightning", "lightning_run trainer", UNSHARDED),
    "Lightning Fabric": ("lightning", "lightning_run fabric", UNSHARDED),
    "torchtitan": ("torchtitan", "torchtitan_trainer llama3", ENGINES),
}


def compare(folder, package, script, *words):
    name, *arguments = script.split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python_with(package), "-m", "fsdp2x", "compare", "--nproc", "2", "--steps", "2", *words]
    command += [str(HERE / "scripts" / f"{name}.py"), str(folder / "out.json"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("program", RUNS)
def test_engines_agree(tmp_path, program):
    package, script, words = RUNS[program]
    done = compare(tmp_path, package, script, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no difference: a and b agree in all" in done.stdout
