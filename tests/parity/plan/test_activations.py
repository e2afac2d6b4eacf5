"""The estimated activations of a step are what a real step allocates, for blocks as in Llama."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import memory
from fsdp2x.plan.activations import KNOWN, estimate_activations
from fsdp2x.rl import causal_lm_loss
from fsdp2x.rl.head import CPU_TILE

TOKENS, ROWS = 2048, 2


def make(kind: str, dtype: torch.dtype, recomputes: bool, rank: int, **sizes) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(kind, head_dim=16, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.to(dtype)
    if recomputes:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def measured(model: torch.nn.Module, vocabulary: int, tiles: bool) -> int:
    """Bytes that forward and backward allocate at most, next to parameters and gradients."""
    tokens = torch.arange(TOKENS).remainder(vocabulary).view(ROWS, -1)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    def step() -> None:
        (causal_lm_loss(model, inputs) if tiles else model(**inputs).loss).backward()

    step()
    model.zero_grad(set_to_none=False)
    return memory.peak_of(memory.allocations(step))


def check(kind: str, dtype: torch.dtype, recomputes: bool, tiles: bool, rank: int = 0, **sizes) -> None:
    model = make(kind, dtype, recomputes, rank, **sizes)
    tile = CPU_TILE if tiles else None
    found = estimate_activations(model, TOKENS, dtype.itemsize, recomputes=recomputes, tile=tile)
    assert found is not None and found.tokens == TOKENS
    peak = measured(model, sizes["vocab_size"], tiles)
    assert abs(found.peak_bytes - peak) <= 0.15 * peak, (found, peak)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(KNOWN),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    recomputes=st.booleans(),
    tiles=st.booleans(),
    hidden_size=st.sampled_from([32, 64, 96]),
    intermediate_size=st.integers(64, 256),
    num_hidden_layers=st.integers(1, 6),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    vocab_size=st.integers(50, 3000),
)
def test_a_step_allocates_what_is_estimated(kind, dtype, recomputes, tiles, heads, **sizes):
    heads_of = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    check(kind, dtype, recomputes, tiles, **heads_of, **sizes)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_adapters(kind, recomputes):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    check(kind, torch.bfloat16, recomputes, False, rank=2, **sizes, **heads)


def test_models_with_other_blocks_have_no_estimate():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    with torch.device("meta"):
        for kind, options in (("gpt2", {}), ("llama", {"attn_implementation": "eager"})):
            config = transformers.AutoConfig.for_model(kind, **sizes)
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
            assert estimate_activations(model, 8, 4) is None
    assert estimate_activations(torch.nn.Linear(2, 2), 8, 4) is None
