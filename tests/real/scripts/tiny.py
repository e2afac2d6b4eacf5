"""A tokenizer and a Qwen3 of two layers, the same in every process, and texts."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = [f"w{i}" for i in range(60)]
TABLE = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
TEXTS = [" ".join(WORDS[(3 * i + 7 * j) % 60] for j in range(8 + i % 5)) for i in range(32)]


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel(TABLE, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 8, "intermediate_size": 24, "vocab_size": len(TABLE), "max_position_embeddings": 64}
SIZES |= {"eos_token_id": 1}
# Additional settings of MoE models. DeepSeek's first layer is dense, and its attention has its own ranks.
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
OF_EXPERTS = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2,
        "head_dim": 4,
    },
}  # fmt: skip


def qwen3(**changes) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes))


def of_experts(kind: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | OF_EXPERTS[kind]))


def trainer_settings(kind, **changes):
    """Those of ``kind``, ``TrainingArguments`` or a class made from it: by default eight steps of two micro-batches."""
    settings = {"output_dir": sys.argv[1] + ".out", "max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return kind(**settings | changes)


def batches(num: int, rows: int, rank: int) -> list[torch.Tensor]:
    """``num`` tensors of token ids ``[rows, 12]``, other ones on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(3, len(TABLE), (rows, 12), generator=generator) for _ in range(num)]
