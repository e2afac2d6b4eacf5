"""Configs and flags of other trainers of policies, as `fsdp2x grpo` reads them: each key has a meaning or a reason."""

import json

import pytest
import yaml

from fsdp2x.train import ConfigError
from fsdp2x.train.cli import main
from fsdp2x.train.commands.shared import split_words
from fsdp2x.train.explain_config import explain
from fsdp2x.train.grpo.config import GrpoConfig
from fsdp2x.train.grpo.dialects import DIALECTS
from fsdp2x.train.grpo.flags import read_flags
from fsdp2x.train.load_config import config_of, translate, translate_file
from training import MODEL

ROLES = """
seed: 3
pretrain: model
prompt_length: 100
response_length: 200
rollout_batch_size: 8
num_return_sequences_in_group: 4
max_steps: 3
use_kl_loss: true
kl_loss_coef: 0.002
pg_clip: 0.3
dual_clip_loss: true
reward_clip: 10
adv_estimator: grpo
norm_std_type: batch
async_generation_ratio: 1
save_steps: 100
resume_from_checkpoint: false
checkpoint_config: {type: file_system, output_dir: saved}
track_with: tensorboard
tracker_kwargs: {log_dir: events}
rewards: {math: {worker_cls: some.module.MathRuleRewardWorker, tag_included: [math]}}
validation:
  data_args: {template: qwen2_5, file_name: test.jsonl}
  generating_args: {temperature: 0.6, top_p: 0.6, num_return_sequences: 4}
  eval_steps: 10
actor_train:
  data_args: {template: qwen2_5, file_name: [train.jsonl], messages: messages, domain_interleave_probs: {math: 1}}
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args:
    {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 2, gradient_accumulation_steps: 2,
     warmup_steps: 20}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 2, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true}
  device_mapping: list(range(0,4))
actor_infer:
  generating_args: {temperature: 0.9, top_k: -1, max_new_tokens: "${response_length}"}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(4,6))
reference:
  strategy_args: {strategy_name: fsdp2_infer, strategy_config: {fsdp_size: 4, param_dtype: bf16, offload_policy: true}}
  device_mapping: list(range(0,8))
"""
MODELS = """
runtime_args:
  train_backend: fsdp
  colocation: [policy, policy_trainer, ref_policy]
  data_path: train.jsonl
  eval_data_path: test.jsonl
  output_dir: out
  num_episode: 20
  sample_per_episode: 64
  train_micro_batch_size: 8
  train_global_batch_size: 32
  save_episode_interval: 5
  eval_episode_interval: 5
models:
  policy_trainer:
    {optimizer: {lr: 2e-6, clip_grad: 1}, num_gpu: 2, fsdp_size: "${models.policy_trainer.num_gpu}", packing: False,
     load: model, pos_clip_ratio: 0.3, neg_clip_ratio: 0.2, kl_coef: 0.01, meta_init: True}
  ref_policy: {fsdp_size: 2, trainable: False, load: "${models.policy_trainer.load}"}
  policy: {num_inference_per_prompt: 16, temperature: 1.0, top_p: 1.0, seq_length: 50, eval_temperature: 0.6}
  reward: {num_cpu: 2}
"""
FLAGS = """python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 4
  --fsdp-full-params --hf-checkpoint model --ref-load other --prompt-data train.parquet --input-key
  question --label-key label --apply-chat-template --rm-type deepscaler --num-rollout 10
  --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 300 --rollout-temperature 0.8
  --num-steps-per-rollout 2 --global-batch-size 32 --advantage-estimator grpo --use-kl-loss --kl-loss-coef
  0.01 --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --adam-beta2 0.98
  --lr-warmup-iters 5 --use-dynamic-batch-size --max-tokens-per-gpu 4096
  --update-weight-buffer-size=1048576 --sglang-log-level error --use-tis --eval-prompt-data aime aime.jsonl
  gsm gsm.jsonl --eval-interval 5 --save saved --load missing --dynamic-sampling-filter-path
  a.b.check_reward_nonzero_std --rollout-stop-token-ids 7 8"""


def settings_of(given, *overrides):
    settings = (yaml.safe_load(given) or {}) if isinstance(given, str) else given
    return translate(settings, overrides, GrpoConfig, DIALECTS)


def flat(settings):
    return {f"{section}.{name}": value for section, inner in settings.items() for name, value in inner.items()}


def test_roles():
    found = settings_of(ROLES)
    assert flat(found.settings) == {
        "train.seed": 3, "model.path": "model", "data.max_prompt_tokens": 100, "rollout.max_tokens": 200,
        "train.global_batch_size": 8, "rollout.group_size": 4, "train.steps": 3, "algorithm.kl_weight": 0.002,
        "algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3, "algorithm.dual_clip": 1.6, "reward.clip": 10.0,
        "algorithm.name": "grpo", "algorithm.advantage_scale": "batch", "algorithm.kl": "k3", "rollout.ahead": 1,
        "checkpoint.save_every": 100, "checkpoint.resume_from": None, "checkpoint.folder": "saved",
        "logging.tensorboard": True, "logging.tensorboard_dir": "events", "reward.functions": ["math_verify"],
        "data.answer_column": "ground_truth", "data.validation_files": ["test.jsonl"], "evaluation.samples": 4,
        "rollout.eval_temperature": 0.6, "train.eval_every": 10, "data.apply_chat_template": True,
        "data.files": ["train.jsonl"], "data.format": "jsonl", "data.prompt_column": "messages",
        "train.activation_checkpointing": True, "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.0,
        "data.max_tokens": 600, "algorithm.minibatches": 2, "schedule.warmup_steps": 20, "parallel.fsdp_size": 2,
        "parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "float32", "parallel.world_size": 4,
        "parallel.reshard_after_forward": True, "rollout.temperature": 0.9, "rollout.top_k": 0,
        "rollout.engine": "vllm", "reference.dtype": "bfloat16", "reference.offload": True,
    }  # fmt: skip
    (need,) = found.needs
    assert need.startswith("rollout.addresses=[URL]: a running vllm server (or rollout.engine=server")
    assert settings_of(ROLES, "rollout.engine=server").needs == []
    same = {"actor_infer.device_mapping": "list(range(0,4))", "async_generation_ratio": 0}
    found = settings_of(ROLES, *(f"{key}={value}" for key, value in same.items()))
    assert found.settings["rollout"]["engine"] == "colocated" and found.needs == []
    config = config_of(settings_of(ROLES, "rollout.engine=server"), GrpoConfig)
    assert config.algorithm.loss(config.rollout.max_tokens, 0.002).dual_clip == 1.6


def test_models():
    assert flat(settings_of(MODELS, "reward.functions=[number]").settings) == {
        "rollout.engine": "colocated", "data.files": ["train.jsonl"], "data.validation_files": ["test.jsonl"],
        "logging.output": "out", "train.steps": 20, "train.global_batch_size": 4, "data.max_tokens": 400,
        "algorithm.minibatches": 2, "checkpoint.save_every": 5, "train.eval_every": 5, "optimizer.lr": 2e-6,
        "train.clip": 1.0, "parallel.world_size": 2, "parallel.fsdp_size": 2, "model.path": "model",
        "model.load": "rows", "algorithm.clip_high": 0.3, "algorithm.clip_low": 0.2, "algorithm.kl_weight": 0.01,
        "algorithm.kl": "k3", "rollout.group_size": 16, "rollout.temperature": 1.0, "rollout.top_p": 1.0,
        "rollout.max_tokens": 50, "rollout.eval_temperature": 0.6, "parallel.param_dtype": "bfloat16",
        "parallel.reduce_dtype": "float32", "schedule.kind": "constant", "data.apply_chat_template": True,
        "data.format": "jsonl", "reward.functions": ["number"],
    }  # fmt: skip
    assert settings_of(MODELS).needs == ["reward.functions=[NAME or FILE.py:FUNCTION]: the rewards of responses"]
    packed = settings_of(
        MODELS, "models.policy_trainer.packing=True", "models.policy_trainer.max_token_in_packing=900",
        "runtime_args.colocation=[]", "runtime_args.rollout_backend=sglang",
    ).settings  # fmt: skip
    assert packed["data"]["max_tokens"] == 900 and packed["rollout"]["engine"] == "sglang"


def test_flags(tmp_path):
    found = settings_of(read_flags(FLAGS.split()))
    assert flat(found.settings) == {
        "parallel.world_size": 2, "model.path": "model", "reference.path": "other", "data.files": ["train.parquet"],
        "data.format": "parquet", "data.prompt_column": "question", "data.answer_column": "label",
        "data.apply_chat_template": True, "data.shuffle": False, "reward.functions": ["math_verify"],
        "train.steps": 10, "train.global_batch_size": 8, "rollout.group_size": 8, "rollout.max_tokens": 300,
        "rollout.temperature": 0.8, "algorithm.minibatches": 2, "algorithm.name": "grpo",
        "algorithm.kl_weight": 0.01, "algorithm.kl": "k3", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28,
        "optimizer.lr": 1e-6, "optimizer.betas": [0.9, 0.98], "optimizer.weight_decay": 0.0,
        "schedule.warmup_steps": 3, "schedule.kind": "constant", "data.max_tokens": 4096, "rollout.bucket_mib": 1,
        "rollout.engine": "sglang", "rollout.ahead": 1, "algorithm.max_weight": 2.0,
        "data.validation_files": ["aime.jsonl", "gsm.jsonl"], "train.eval_every": 5,
        "rollout.eval_temperature": 0.8, "checkpoint.folder": "saved", "algorithm.dynamic_sampling": 8,
        "rollout.stop_ids": [7, 8], "parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "float32",
    }  # fmt: skip
    ignored = "\n".join(found.without_effect())
    assert all(key in ignored for key in ("rollout-num-gpus", "fsdp-full-params", "sglang-log-level", "load"))
    assert [need.partition("=")[0] for need in found.needs] == ["rollout.addresses"]
    same = {key.replace("-", "_"): value for key, value in read_flags(FLAGS.split()).items()}
    assert settings_of(same).settings == found.settings
    words = ["--colocate", "--load", str(tmp_path)]
    found = settings_of(read_flags(words)).settings
    assert found["rollout"]["engine"] == "colocated" and found["checkpoint"]["resume_from"] == str(tmp_path)


REFUSED = [
    ({"rollout_batchsize": 8, "actor_train": {}}, "unknown key rollout_batchsize. Did you mean rollout_batch_size?"),
    ({"actor_train": {"training_args": {"learnin_rate": 1}}}, "Did you mean actor_train.training_args.learning_rate?"),
    ({"actor_train": {"model_args": {"ulysses_size": 2}}}, "sequences are not cut over ranks here; set it to 1"),
    ({"actor_train": {"model_args": {"model_type": "trl"}}}, "heads for values are not built here"),
    ({"actor_train": {"strategy_args": {"strategy_name": "fsdp2_infer"}}}, "write fsdp2_train"),
    ({"actor_train": {"training_args": {"gradient_accumulation_steps": 4}}}, "only with rollout_batch_size, num_ret"),
    ({"actor_train": {"data_args": {"domain_interleave_probs": {"a": 1, "b": 1}}}}, "all files are drawn alike"),
    ({"actor_infer": {"strategy_args": {"strategy_name": "sglan"}}}, "did you mean sglang?"),
    ({"async_generation_ratio": 2}, "in turns (0) or one step ahead (1)"),
    ({"adv_estimator": "reinforce"}, "adv_estimator: got 'reinforce' (str), expected one of gae, grpo"),
    ({"whiten_advantages": True}, "advantages of groups are not whitened again"),
    ({"max_len_mask": True}, "truncated responses count"),
    ({"seed": "three", "pretrain": "model"}, "seed: got 'three'"),
    ({"models": {"policy": {"topp": 1}}}, "Did you mean models.policy.top_p?"),
    ({"models": {"policy": {"num_inference_per_prompt": 3}}, "runtime_args": {"sample_per_episode": 4}}, "a multiple"),
    (
        {"runtime_args": {"sample_per_episode": 32, "train_global_batch_size": 12}},
        "train_global_batch_size: got 12, which does not divide the 32 samples of a rollout",
    ),
    ({"num_rollout": 3, "fsdp_size": 2}, "unknown key fsdp_size"),
    ({"num_rollout": 3, "advantage_estimator": "reinforce_plus_plus"}, "expected one of ppo, grpo, gspo"),
    ({"num-rollout": 3, "kl-loss-type": "k9"}, "kl-loss-type: got 'k9'"),
    ({"num_rollout": 3, "rm_type": "deepscalr"}, "did you mean deepscaler?"),
    ({"num_rollout": 3, "prompt_data": "a.jsonl@[0:10]"}, "a part of a file cannot be taken"),
    ({"num_rollout": 3, "global_batch_size": 3}, "follow from it only with rollout_batch_size"),
    (
        {"rollout-batch-size": 4, "n-samples-per-prompt": 2, "global-batch-size": 4, "num-steps-per-rollout": 4},
        "num-steps-per-rollout: it means algorithm.minibatches=4, but global-batch-size means algorithm.minibatches=2",
    ),
    ({"num_rollout": 3, "actor_train": {}}, "the file mixes num_rollout of flags of a command line and actor_train of"),
    ({"role": 1, "actor_train": {}}, "unknown key role"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        settings_of(settings)
    assert message in str(error.value)


def test_a_section_of_two_formats():
    """`reference` and `optimizer` are fsdp2x's own sections, and keys of others."""
    own = {"reference": {"dtype": "bfloat16"}, "optimizer": {"lr": 1.0}, "rollout": {"group_size": 2}}
    assert settings_of(own).dialect == "sections"
    assert settings_of({"optimizer": "adam", "lr": 1.0, "rollout_batch_size": 2}).dialect == "flags"
    assert settings_of({"reference": {"device_mapping": [0]}}, "reference.dtype=bfloat16").dialect == "roles"
    found = settings_of("", "reference.strategy_args.strategy_name=fsdp2_infer", "reference.dtype=float16")
    assert found.dialect == "roles" and found.settings["reference"] == {"dtype": "float16"}


def test_a_reward_without_a_counterpart_is_missing():
    for given in ({"num_rollout": 1, "rm_type": "f1"}, {"rewards": {"code": {"worker_cls": "a.CodeRewardWorker"}}}):
        found = settings_of(given)
        assert any(need.startswith("reward.functions=[NAME or FILE.py:FUNCTION]") for need in found.needs)
        assert "write it as a function" in "\n".join(found.without_effect())
        assert "reward.functions" not in str(settings_of(given, "reward.functions=[number]").needs)


def test_errors_name_the_users_key_and_line(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text(ROLES.replace("response_length: 200", "response_length: 0"))
    with pytest.raises(ConfigError, match=r"roles.yaml:5: response_length: got 0, expected at least 1"):
        explain(path, ["rollout.engine=server"], kind=GrpoConfig, dialects=DIALECTS)


# ---- the commands


def test_words_of_a_command():
    assert split_words(["a.yaml", "b=1", "--colocate"]) == ("a.yaml", ["b=1"], ["--colocate"])
    assert split_words(["b=1", "train.py", "--lr", "1"]) == ("", ["b=1"], ["train.py", "--lr", "1"])
    assert split_words([""]) == ("", [], [])
    with pytest.raises(ConfigError, match="expected a flag such as --colocate before it"):
        read_flags(["colocate"])


def test_explain_and_list(tmp_path, capsys):
    model = f"model.config={json.dumps(MODEL)}"
    flags = "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --lr 1e-3 --rm-type f1".split()
    assert main(["config", "explain", "--command", "grpo", model, "data.max_tokens=900", "--", *flags]) == 0
    said = capsys.readouterr().out
    assert "the command line: flags of a command line" in said and "-> train.steps=2" in said
    assert "a step: 4 prompts x 2 responses = 8 samples, in 1 update(s) of the policy" in said
    assert "To run it needs:\n  rollout.addresses=[URL]" in said and "2 x Qwen3DecoderLayer" in said
    path = tmp_path / "flags.yaml"
    path.write_text("num_rollout: 2\nlr: 1e-3\nrollout_batch_size: 3")
    found = translate_file(path, [], GrpoConfig, DIALECTS, read_flags(["--rollout-batch-size", "4"]))
    assert flat(found.settings)["train.global_batch_size"] == 4
    assert main(["grpo", "--", *flags]) == 2
    assert "the command line lacks settings. To run it needs" in capsys.readouterr().err
    assert main(["config", "list", "--command", "grpo", "--dialect", "flags"]) == 0
    assert "num_rollout: int\n    -> train.steps" in capsys.readouterr().out
    assert main(["config", "list", "--command", "grpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout.group_size"]["default"] == 8
    assert main(["config", "list", "--command", "grpo", "--dialect", "nested"]) == 2
    assert "expected one of sections, roles, models, flags, all" in capsys.readouterr().err
