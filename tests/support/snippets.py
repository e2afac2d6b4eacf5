"""Configs as documents of other trainers show them, whole and in fragments: what `fsdp2x config explain` must take."""

FLAT_KEYS = """
# 配置: comments may be in any language
fsdp: True
sharding_strategy: FULL_SHARD
world_size: 4
compile: False
"""
FLAT_BATCH = """
train_batch: 64
"""

STRATEGY_TRAIN = """
actor_train:
  model_args:
    disable_gradient_checkpointing: false
    dtype: bf16
    model_type: ~
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 32
    warmup_steps: 20
    num_train_epochs: 50
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 16
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: false
  device_mapping: list(range(0,16))
  infer_batch_size: 4
"""
STRATEGY_INFER = """
reference:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config:
      fsdp_size: 4
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: false
  device_mapping: list(range(0,8))
  infer_batch_size: 1
"""
STRATEGY_ULYSSES = """
actor_train:
  model_args:
    disable_gradient_checkpointing: false
    dtype: bf16
    model_type: ~
    ulysses_size: 2
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 1.0e-2
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 256
    warmup_steps: 0
    num_train_epochs: 50
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 4
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: false
  device_mapping: list(range(0,8))
  infer_batch_size: 1
"""
STRATEGY_ONE_AXIS = """
strategy_config:
  fsdp_size: 16
"""
STRATEGY_TWO_AXES = """
strategy_config:
  fsdp_size: 8
"""
STRATEGY_TWO_AXES_ULYSSES = """
model_args:
  ulysses_size: 2
strategy_config:
  fsdp_size: 4
"""
STRATEGY_TEXT_MODEL = """
strategy_config:
  fsdp_size: 16
  param_dtype: bf16
  reduce_dtype: float32
  wrap_policy:
    transformer_layer_cls_to_wrap: ["Qwen3DecoderLayer"]
"""
STRATEGY_VISION = """
actor_train:
  model_args:
    freeze_module_prefix: vision_model
    ulysses_size: 2
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 4
      param_dtype: bf16
      reduce_dtype: float32
"""
STRATEGY_EXPERTS = """
strategy_config:
  fsdp_size: 16
  param_dtype: bf16
  reduce_dtype: float32
  apply_expert_patch: true
  wrap_policy:
    moe_experts: ["Qwen3MoeMLP"]
"""
# Every key in the document and in the system that it describes.
STRATEGY_ALL = """
seed: 42
actor_train:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
    ulysses_size: 1
    freeze_module_prefix: [model.embed_tokens]
    attn_implementation: sdpa
    lora_rank: 0
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    adam_beta1: 0.9
    adam_beta2: 0.95
    max_grad_norm: 1.0
    lr_scheduler_type: cosine
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 2
    warmup_steps: 1
    num_train_epochs: 1
    max_steps: 3
    save_steps: 2
    logging_steps: 1
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 1
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: ~
      offload_policy: false
      wrap_policy:
        transformer_layer_cls_to_wrap: [Qwen3DecoderLayer]
        wrap_embeddings: true
        wrap_lm_output: false
      apply_expert_patch: false
      apply_tiled_mlp: false
      tiled_num_shards: 4
      async_save_ckpt: false
      save_only_model: false
      reduce_scatter_during_grad_accumulation: true
      efsdp_size: 1
      ep_size: 1
      moe_use_grouped_mm: false
      forward_prefetch: true
      use_batched_model_update: true
  device_mapping: [0, 1]
  infer_batch_size: 4
reference:
  model_args: {dtype: bf16}
  strategy_args: {strategy_name: fsdp2_infer, strategy_config: {fsdp_size: 4}}
"""

# The keys that the nested document names, one by one as overrides.
NESTED_OVERRIDES = (
    "models.policy_trainer.packing=True",
    "models.policy_trainer.max_token_in_packing=4096",
    "models.policy_trainer.groupgemm=True",
    "models.policy_trainer.meta_init=True",
    "models.policy.tensor_model_parallel_size=2",
    "models.policy.enforce_eager=True",
    "runtime_args.train_micro_batch_size=1",
    "models.policy_trainer.ulysses_sequence_parallel_size=2",
    "models.policy.gpu_memory_utilization=0.95",
    "runtime_args.log_args_dict.enable_wandb=True",
    'runtime_args.log_args_dict.wandb_project="Your-Wandb-Project-Name"',
)
# A complete file with the keys of that system.
NESTED_ALL = """
runtime_args:
  train_backend: fsdp
  exp_name: demo
  colocation: [policy, policy_trainer, ref_policy]
  output_dir: some_output_dir
  data_path: some_data_path
  eval_data_path: some_eval_data_path
  data_checkpoint_path: ${runtime_args.output_dir}/data/
  num_episode: 3
  sample_per_episode: 8
  train_micro_batch_size: 2
  train_global_batch_size: 8
  save_episode_interval: 2
  eval_episode_interval: 3
  enable_eval_before_training: False
  data_shuffle: True
  data_rerank: True
  max_replay_episode: 2
  log_args_dict:
    log_dir: ${runtime_args.output_dir}
    enable_wandb: False
    wandb_project: some_project
    wandb_dir: ${runtime_args.output_dir}
    wandb_name: ${runtime_args.exp_name}
    wandb_id: ${runtime_args.exp_name}
    wandb_resume: allow
models:
  policy_trainer:
    use_expandable_segments: False
    free_gpu_memory: {offload_weights: True, offload_optimizer_states: True, free_grad_buffers: True}
    optimizer: {lr: 2e-6, clip_grad: 1}
    trainable: True
    generation_batch_size: 8
    gpu_per_process: 1
    num_gpu: 2
    fsdp_size: ${models.policy_trainer.num_gpu}
    ulysses_sequence_parallel_size: 1
    packing: False
    meta_init: False
    groupgemm: False
    max_token_in_packing: 10000
    load: some_model_path
    gradient_checkpointing: True
    pos_clip_ratio: 0.2
    neg_clip_ratio: 0.2
    entropy_coef: 0.0
    kl_coef: 0.0
    save_hf: True
  ref_policy:
    use_expandable_segments: ${models.policy_trainer.use_expandable_segments}
    free_gpu_memory: {offload_weights: True}
    generation_batch_size: 8
    gpu_per_process: 1
    num_gpu: ${models.policy_trainer.num_gpu}
    fsdp_size: ${models.policy_trainer.num_gpu}
    meta_init: ${models.policy_trainer.meta_init}
    groupgemm: ${models.policy_trainer.groupgemm}
    trainable: False
    load: ${models.policy_trainer.load}
    packing: ${models.policy_trainer.packing}
    max_token_in_packing: ${models.policy_trainer.max_token_in_packing}
  policy:
    free_gpu_memory: {offload_weights: True}
    generation_batch_size: 256
    gpu_per_process: 1
    num_gpu: ${models.policy_trainer.num_gpu}
    enforce_eager: False
    tensor_model_parallel_size: 1
    trainable: False
    load: ${models.policy_trainer.load}
    num_inference_per_prompt: 32
    seq_length: 2048
    max_seq_len_to_capture: 2348
    temperature: 1.0
    top_p: 1.0
    eval_temperature: 0.6
    eval_top_p: 0.95
    eval_top_k: 20
    vllm_prompt_key: prompt
    vllm_input_ids_key: input_ids
    enable_thinking: False
    enable_stage_resume: False
    gpu_memory_utilization: 0.8
  reward: {num_cpu: 2, cpu_per_process: 1, generation_batch_size: 256}
"""
