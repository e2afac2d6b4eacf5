"""The loop of the example by the spellings of others: every key becomes a setting, is told, or is an error."""

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))

import grpo_config  # noqa: E402
from grpo_config import ConfigError, read_words, translate  # noqa: E402
from grpo_loop import Settings  # noqa: E402

BY_ROLE = yaml.safe_load("""
seed: 3
rollout_batch_size: 8
num_return_sequences_in_group: 4
max_steps: 3
use_kl_loss: true
kl_loss_coef: 0.002
async_generation_ratio: 1
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, warmup_steps: 20}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 2, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true}
  device_mapping: list(range(0,4))
actor_infer:
  generating_args: {temperature: 0.9, max_new_tokens: 100}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(4,6))
reference:
  strategy_args: {strategy_name: fsdp2_infer, strategy_config: {fsdp_size: 4, param_dtype: bf16}}
  device_mapping: list(range(0,8))
""")
BY_MODEL = yaml.safe_load("""
runtime_args:
  train_backend: fsdp
  colocation: [policy, policy_trainer, ref_policy]
  num_episode: 20
  sample_per_episode: 64
  train_micro_batch_size: 8
  train_global_batch_size: 64
models:
  policy_trainer:
    optimizer: {lr: 2e-6, clip_grad: 1}
    num_gpu: 2
    fsdp_size: ${models.policy_trainer.num_gpu}
    packing: True
    max_token_in_packing: 1000
    pos_clip_ratio: 0.3
    neg_clip_ratio: 0.2
    kl_coef: 0.0
  ref_policy: {fsdp_size: "${models.policy_trainer.num_gpu}", trainable: False}
  policy: {num_inference_per_prompt: 16, temperature: 1.0, top_p: 1.0, gpu_memory_utilization: 0.8}
""")
FLAGS = """--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 4 --fsdp-full-params --rm-type deepscaler
  --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-temperature 0.8 --global-batch-size 64
  --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --eps-clip 0.2 --lr 1e-6
  --eps-clip-high 0.28 --adam-beta2 0.98 --colocate --update-weight-buffer-size=1000000 --sglang-log-level error"""


def test_blocks_by_role():
    found = translate(BY_ROLE)
    assert found.settings == {
        "seed": 3, "prompts": 8, "samples": 4, "steps": 3, "kl_weight": 0.002, "is_async": True, "lr": 1e-6,
        "weight_decay": 0.0, "fsdp_size": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32",
        "reshard_after_forward": True, "processes": 4, "temperature": 0.9, "engine": "vllm", "colocate": False,
        "reference_fsdp_size": 4, "reference_dtype": "bfloat16", "tolerance": grpo_config.LOOSE,
    }  # fmt: skip
    told = "\n".join(found.without_effect())
    for key in ("warmup_steps", "max_new_tokens", "gpu_memory_utilization", "per_device_train_batch_size"):
        assert key in told or "strategy_config" in told, key
    BY_ROLE["actor_infer"]["device_mapping"] = BY_ROLE["actor_train"]["device_mapping"]
    assert translate({**BY_ROLE, "async_generation_ratio": 0}).settings["colocate"] is True


def test_sections_by_model():
    assert translate(BY_MODEL).settings == {
        "colocate": True, "steps": 20, "prompts": 4, "lr": 2e-6, "max_grad_norm": 1.0, "processes": 2, "fsdp_size": 2,
        "max_tokens": 1000, "clip_high": 0.3, "clip_low": 0.2, "kl_weight": 0.0, "reference_fsdp_size": 2,
        "samples": 16, "temperature": 1.0,
    }  # fmt: skip


def test_flags_of_a_command_line():
    found = translate(read_words(FLAGS.split()))
    assert found.settings == {
        "processes": 2, "steps": 10, "prompts": 8, "samples": 8, "temperature": 0.8, "kl_weight": 0.01, "kl": "k3",
        "clip_low": 0.2, "clip_high": 0.28, "lr": 1e-6, "betas": [0.9, 0.98], "colocate": True, "bucket_bytes": 1000000,
    }  # fmt: skip
    told = "\n".join(found.without_effect())
    assert all(key in told for key in ("rollout-num-gpus", "fsdp-full-params", "rm-type", "sglang-log-level"))
    same = {key.replace("-", "_"): value for key, value in read_words(FLAGS.split()).items()}
    assert translate(same).settings == found.settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_batchsize": 8}, "unknown key rollout_batchsize. Did you mean rollout_batch_size"),
        ({"actor_train": {"training_args": {"learnin_rate": 1}}}, "Did you mean actor_train.training_args.l"),
        ({"actor_train": {"model_args": {"lora_rank": 8}}}, "lora_rank: got 8; this loop has only lora.rank=0"),
        ({"actor_train": {"model_args": {"ulysses_size": 2}}}, "has only parallel.sequence_parallel=1"),
        ({"actor_infer": {"strategy_args": {"strategy_name": "sglang"}}}, "got 'sglang', expected one of vllm"),
        ({"actor_infer": {"generating_args": {"top_p": 0.9}}}, "whole distributions are drawn from"),
        ({"actor_train": {"strategy_args": {"strategy_name": "fsdp2_infer"}}}, "write fsdp2_train"),
        ({"ppo_epochs": 2}, "one update of all samples"),
        ({"async_generation_ratio": 2}, "in turns .0. or one step ahead .1."),
        ({"seed": "three"}, "seed: got 'three'"),
        ({"models": {"policy": {"topp": 1}}}, "Did you mean models.policy.top_p"),
        (
            {"runtime_args": {"sample_per_episode": 32, "train_global_batch_size": 16}},
            "set it to sample_per_episode, 32",
        ),
        ({"num_rollout": 3, "n_samples_per_prompt": 8, "fsdp_size": 2}, "unknown key fsdp_size"),
        ({"num_rollout": 3, "advantage_estimator": "ppo"}, 'write "grpo"'),
        ({"num_rollout": 3, "kl_loss_type": "k9"}, "kl_loss_type: got 'k9'"),
    ],
)
def test_what_is_refused(change, message):
    if "rollout_batchsize" in change:
        change = change | {"actor_train": {}}
    with pytest.raises(ConfigError, match=message):
        translate(change)


def test_own_names_and_every_field():
    """Each setting is reached by its own name, and those that a table names are there."""
    own = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert Settings(**translate(own).settings) == Settings()
    known = {*own, "processes", "out"}
    for dialect in grpo_config.DIALECTS:
        for key, row in dialect.rows.items():
            assert set(row.to) <= known, key
            assert row.help, key
    assert {*grpo_config.OF_POLICY.values(), *grpo_config.OF_REFERENCE.values()} <= known


def test_words_that_are_no_flags():
    with pytest.raises(ConfigError, match="expected a flag such as --colocate before it"):
        read_words(["colocate"])
