"""Published models on the meta device, in their full sizes: for counts and steps that are foretold, not run."""

from __future__ import annotations

import torch
from torch import nn

_LLAMA = {"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192}
_QWEN3 = {"vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8}
SIZES = {
    "llama-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8},
    "llama-70b": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                  "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3-30b": {**_QWEN3, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "qwen3-235b": {**_QWEN3, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
                   "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
}  # fmt: skip


class _Expert(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


def build(name: str, *, lists_experts: bool = False, lora: bool = False) -> nn.Module:
    """fp32, without weights. ``lists_experts``: a module each in place of fused weights, as transformers 4 had them.

    ``lora``: rank 16 on all linear layers, fp32, over bf16.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES[name]
    is_moe = name.startswith("qwen3")
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)) if is_moe else LlamaForCausalLM(LlamaConfig(**sizes))
        if lists_experts:
            for layer in model.model.layers:
                experts = (_Expert(sizes["hidden_size"], sizes["moe_intermediate_size"]) for _ in range(128))
                layer.mlp.experts = nn.ModuleList(experts)
        if lora:
            import fsdp2x

            return fsdp2x.add_lora(model.bfloat16(), {"r": 16, "target_modules": "all-linear"})
    return model
