"""Tiny models for tests: HuggingFace ones from a config, and plain modules with awkward shapes. All are deterministic.

`build(name)` returns the model; `batch(name, seed)` a dict of keyword arguments whose forward has a loss.
Dropout is off everywhere; widths of 3, 5 and 7 leave shards uneven or empty.
"""

import importlib

import torch
from torch import nn

VOCAB = 37
_ATTENTION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 32}
_DENSE = {**_ATTENTION, **_TOKENS, "vocab_size": VOCAB, "intermediate_size": 24, "head_dim": 8}
_MOE = {**_DENSE, "num_experts_per_tok": 2, "output_router_logits": False}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_BERT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}

# name -> (module below transformers.models, model class, config class, config arguments)
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM", "LlamaConfig", {**_DENSE, "tie_word_embeddings": False}),
    "llama_base": ("llama", "LlamaModel", "LlamaConfig", _DENSE),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_DENSE, "tie_word_embeddings": True}),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_GPT2, "attn_pdrop": 0.0, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mixtral": ("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_MOE, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 12, "decoder_sparse_step": 1, "tie_word_embeddings": False},
    ),
    # Its files hold fused matrices that transformers splits while it loads.
    "hrm_text": ("hrm_text", "HrmTextForCausalLM", "HrmTextConfig", {**_DENSE, "num_key_value_heads": 2}),
    "t5": ("t5", "T5ForConditionalGeneration", "T5Config", {**_T5, "vocab_size": VOCAB, "decoder_start_token_id": 0}),
    "bert": (
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        {**_BERT, "vocab_size": VOCAB, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
NAMES = tuple(_MODELS)


def tiny_vlm() -> nn.Module:
    """Qwen2-VL with a vision tower and a tied language model."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

    text = {**_ATTENTION, **_TOKENS, "vocab_size": VOCAB, "intermediate_size": 24, "tie_word_embeddings": True}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    )


def tiny_lora(name: str = "llama") -> nn.Module:
    """A PEFT model: LoRA on the attention of a tiny model. Needs peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(build(name), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> nn.Module:
    """The tiny HuggingFace model of that name with weights drawn from `seed`."""
    package, model_class, config_class, arguments = _MODELS[name]
    base = f"transformers.models.{package}"
    config_module = importlib.import_module(f"{base}.configuration_{package}")
    model_module = importlib.import_module(f"{base}.modeling_{package}")
    config = getattr(config_module, config_class)(**{**arguments, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return getattr(model_module, model_class)(config).to(dtype)


def batch(name: str, seed: int, size: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Token ids and labels; every rank passes another seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(3, VOCAB, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class Mlp(nn.Module):
    """Linear, GELU, Linear with a residual; `width` x `hidden` weights and biases."""

    def __init__(self, width: int = 6, hidden: int = 7):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """`num` Mlp blocks and a head of 3 rows: over 4 ranks some shards are short and one is empty."""

    def __init__(self, num: int = 3, width: int = 6, hidden: int = 7, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Mlp(width, hidden) for _ in range(num))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


STACK_UNITS = ("blocks.0", "blocks.1", "blocks.2")


def mixed_stack() -> Stack:
    """Returns a model with two dtypes and a frozen parameter of bytes."""
    model = Stack()
    model.blocks[0].bfloat16()
    model.head.codes = nn.Parameter(torch.arange(35, dtype=torch.uint8).view(5, 7), requires_grad=False)
    return model


class Branches(nn.Module):
    """Five layers, of which a step uses some."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for i in chosen:
            x = self.layers[i](x)
        return x


def step(ctx, model: nn.Module, optimizer=None, number: int = 0) -> torch.Tensor:
    """The loss of a step on this rank's inputs, which ``optimizer`` follows, if there is one."""
    loss = model(inputs(ctx.rank, number).to(next(model.parameters()).dtype)).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train(ctx, model: nn.Module, optimizer, numbers=range(3)) -> list[torch.Tensor]:
    """The losses of these steps."""
    return [step(ctx, model, optimizer, number) for number in numbers]


def inputs(rank: int, step: int = 0, rows: int = 4, width: int = 6) -> torch.Tensor:
    """Another input for each rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randn(rows, width, generator=generator)
