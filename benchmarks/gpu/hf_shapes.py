"""Builds HuggingFace models from configs, in the shapes of published models, with as many layers as memory holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `numel` counts its parameters as transformers builds them."""

    family: str  # llama, qwen3 or qwen3_moe
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    experts: int = 0  # of `intermediate` each, eight for a token

    @property
    def block_numel(self) -> int:
        """Number of parameters of one layer: attention, MLP or experts and their router, and norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.family != "llama" else 0)
        mlps = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        return attention + mlps + norms

    @property
    def numel(self) -> int:
        """Number of parameters of all layers, embeddings, and head."""
        tables = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layers * self.block_numel + tables + self.hidden

    def with_layers(self, layers: int) -> Shape:
        return replace(self, layers=layers)

    def fitting(self, free_bytes: int, bytes_per_element: float) -> Shape:
        """With as many of the layers as fit, at least one.

        Raises:
            MemoryError: not even one layer does.
        """
        rest = self.with_layers(0).numel
        layers = int((free_bytes / bytes_per_element - rest) // self.block_numel)
        if layers < 1:
            needed = bytes_per_element * self.with_layers(1).numel
            raise MemoryError(f"one layer needs {needed / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free")
        return self.with_layers(min(layers, self.layers))


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-30b-a3b": Shape("qwen3_moe", 2048, 768, 12, 32, 4, 128, 151936, False, 128),
}
TINY = {
    "qwen3-tiny": Shape("qwen3", 16, 24, 2, 2, 1, 8, 64, True),
    "llama-tiny": Shape("llama", 16, 24, 2, 2, 1, 8, 64, False),
    "qwen3-moe-tiny": Shape("qwen3_moe", 16, 24, 2, 2, 1, 8, 64, False, 8),
}


def build(shape: Shape, device: str) -> nn.Module:
    """The model in fp32 on `device`, with the same weights whenever it is built there."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.is_tied,
        "use_cache": False,
    }
    torch.manual_seed(0)
    with torch.device(device):
        if shape.family == "qwen3_moe":
            from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

            few = {"num_experts": shape.experts, "num_experts_per_tok": 8, "moe_intermediate_size": shape.intermediate}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **few))
        if shape.family == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**sizes))
        return LlamaForCausalLM(LlamaConfig(**sizes))


def batch(shape: Shape, tokens: int, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """One sequence, its labels the tokens themselves."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}
