"""Precision policies beyond the dtype of a whole unit: parameters that keep their dtype, buffers, gradient dtypes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
from checkpoints import on_first, shared_folder
from fsdp2x.memory import plan_memory
from harness import distributed
from models import Stack, inputs
from reference import TORCH_MINOR, only_fsdp2x, params, same, shard, trained


def train(ctx, model):
    return trained(model, lambda m, step: m(inputs(ctx.rank, step)).float().square().mean()), params(model)


@pytest.mark.skipif(TORCH_MINOR < 15, reason="MixedPrecisionPolicy has no param_dtype_override_fn before torch 2.15")
@distributed(world_sizes=(1,))
def test_an_override_must_be_one_of_two_dtypes(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, match="must return None, param_dtype"):
        shard(ctx, Stack(), mp_policy=policy)


_SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_MOE = {**_SIZES, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8,
        "first_k_dense_replace": 0, "pad_token_id": 0, "use_cache": False}  # fmt: skip
_HY = {**_MOE, "q_lora_rank": 16, "qk_rope_head_dim": 8}
_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
# A transformers model, its config, its compute dtype, and the end of a name that transformers keeps in float32.
KEPT = {
    "router": ("Glm4MoeForCausalLM", "Glm4MoeConfig", _MOE, torch.bfloat16, "mlp.gate.weight"),
    "head": ("HYV4ForCausalLM", "HYV4Config", _HY, torch.bfloat16, "lm_head.weight"),
    "float16": ("T5ForConditionalGeneration", "T5Config", _T5, torch.float16, "wo.weight"),
    "only float16": ("T5ForConditionalGeneration", "T5Config", _T5, torch.bfloat16, None),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("stored", ["float32", "as loaded"])
@pytest.mark.parametrize("call", ["once", "by layer"])
@pytest.mark.parametrize("name", KEPT)
def test_parameters_that_transformers_keeps_in_float32(ctx, name, call, stored):
    """The outputs are those of the model that transformers loads in the compute dtype, bit for bit."""
    transformers = pytest.importorskip("transformers")
    only_fsdp2x(ctx)
    cls, config, sizes, dtype, kept = KEPT[name]
    cls = getattr(transformers, cls)
    with shared_folder() as folder:
        on_first(lambda: cls(getattr(transformers, config)(**sizes)).save_pretrained(folder))
        reference = cls.from_pretrained(folder, dtype=dtype).eval()
        model = cls.from_pretrained(folder, dtype=torch.float32 if stored == "float32" else dtype).eval()
    in_float32 = [name for name, param in reference.named_parameters() if param.dtype == torch.float32]
    assert any(name.endswith(kept) for name in in_float32) if kept else not in_float32
    # After its `wo` T5 adds in float32. A layer would convert the sum.
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=cls.__name__[:2] != "T5")
    plan = plan_memory(model, 2, transport="shm", mp_policy=policy)
    if call == "by layer":
        for layer in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
            fsdp2x.fully_shard(layer, mp_policy=policy)
    fsdp2x.fully_shard(model, mp_policy=policy)
    ids = torch.arange(3, 27).view(2, 12)
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if "T5" in cls.__name__ else {"input_ids": ids}
    before = fsdp2x.memory_report(model)
    same(model(**inputs).logits, reference(**inputs).logits, "logits", rtol=0, atol=0)
    assert fsdp2x.memory_report(model).traffic == before.traffic
    assert call == "by layer" or ctx.rank or plan.traffic == before.traffic


@pytest.mark.skipif(TORCH_MINOR < 15, reason="MixedPrecisionPolicy has no param_dtype_override_fn before torch 2.15")
@distributed(world_sizes=(1,))
@pytest.mark.parametrize("way", ["model", "policy"])
def test_a_user_chooses_the_dtype_of_what_transformers_keeps_in_float32(ctx, way):
    transformers = pytest.importorskip("transformers")
    only_fsdp2x(ctx)
    model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**_MOE))
    options = {"param_dtype_override_fn": lambda param: None} if way == "policy" else {}
    if way == "model":
        model._keep_in_fp32_modules_strict = None
    fsdp2x.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options))
    with fsdp2x.unsharded(model):
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


@distributed(world_sizes=(2,))
def test_buffer_dtype(ctx):
    """Floating-point buffers are converted, counters are not."""
    only_fsdp2x(ctx)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("scale", torch.full((6,), 0.1))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return self.linear(x) * self.scale

    model = shard(ctx, Counted(), buffer_dtype=torch.bfloat16)
    assert model.scale.dtype == torch.bfloat16 and model.count.dtype == torch.long
    assert torch.equal(model.scale, torch.full((6,), 0.1).bfloat16())
    model(inputs(ctx.rank)).sum().backward()
    assert model.linear.weight.grad is not None
