"""Tiled MLPs on one process: which modules they are, equal gradients, one gradient a backward, fewer activations."""

import copy

import pytest
import torch
from torch import nn

from fsdp2x.models.tiled_mlp import apply_tiled_mlp, gated_mlps
from models import build, tiny_lora, tiny_vlm


class Gated(nn.Module):
    """silu(gate) * up, with whatever goes between."""

    def __init__(self, width=8, inner=12, bias=True, dropout=0.0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(width, inner, bias=bias, dtype=dtype) for _ in range(2))
        self.c = nn.Linear(inner, width, bias=bias, dtype=dtype)
        self.act_fn = nn.functional.silu
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.c(self.dropout(self.act_fn(self.a(x)) * self.b(x)))


def transformers_model(package, model_class, config_class, **arguments):
    from importlib import import_module

    base = f"transformers.models.{package}"
    config = getattr(import_module(f"{base}.configuration_{package}"), config_class)(**arguments)
    return getattr(import_module(f"{base}.modeling_{package}"), model_class)(config)


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 37}
SIZES |= {"num_key_value_heads": 2}
FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}, 2),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"num_key_value_heads": 1, "head_dim": 8}, 2),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 1}, 2),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"pad_token_id": 0}, 2),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}, 2),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}, 2),
    # A dense layer, and a shared expert in the other one: routed experts are fused and stay as they are.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "mlp_only_layers": [0],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
        2,
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "mlp_only_layers": [1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "head_dim": 8,
        },
        1,
    ),
}


def gradients(model, batch):
    loss = model(**batch).loss
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


@pytest.mark.parametrize("name", FAMILIES)
def test_model_families(name):
    model_class, config_class, extra, count = FAMILIES[name]
    model = transformers_model(name, model_class, config_class, **{**SIZES, **extra})
    ids = torch.randint(3, 37, (2, 10), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    loss, expected = gradients(model, batch)
    assert apply_tiled_mlp(model, 3) == count
    tiled_loss, got = gradients(model, batch)
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=1e-6)
    for key, grad in expected.items():
        torch.testing.assert_close(got[key], grad, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def test_what_is_a_gated_mlp():
    assert [name for name, _ in gated_mlps(build("llama"))] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert len(list(gated_mlps(tiny_lora()))) == 2
    assert [name for name, _ in gated_mlps(tiny_vlm())] == [f"model.language_model.layers.{i}.mlp" for i in (0, 1)]
    gated_t5 = build("t5", feed_forward_proj="gated-gelu")
    assert len(list(gated_mlps(gated_t5))) == 4 and not list(gated_mlps(build("t5")))

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Gated() for _ in range(3))
            self.shared = Gated()

    assert [name for name, _ in gated_mlps(Routed())] == ["shared"]


def test_refusals():
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no gated MLP"):
        apply_tiled_mlp(build("gpt2"))
    for wrong, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_shards"):
            apply_tiled_mlp(build("llama"), wrong)


@pytest.mark.parametrize("shape", [(2, 7, 8), (7, 8), (1, 1, 8), (0, 8), (2, 3, 5, 8), (8,)])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 100])
@pytest.mark.each_pair
def test_any_shape(shape, num_shards):
    plain, tiled = Gated(), Gated()
    assert apply_tiled_mlp(tiled, num_shards) == 1
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outs = [module(x) for module, x in zip((plain, tiled), xs, strict=True)]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-6)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-5, atol=1e-6)
    for a, b in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_double_precision_gradients_and_keyword():
    tiled = Gated(dtype=torch.float64)
    apply_tiled_mlp(tiled, 3)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: tiled(x=x), (x, *tiled.parameters()))


def test_one_gradient_per_parameter_and_backward():
    """Hooks of users and of the engine run once, with the sum over all chunks."""
    tiled, calls = Gated(), []
    apply_tiled_mlp(tiled, 4)
    for name, param in tiled.named_parameters():
        param.register_hook(lambda grad, name=name: calls.append(("tensor", name)))
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append(("accumulated", name)))
    tiled(torch.randn(9, 8)).sum().backward()
    names = [name for name, _ in tiled.named_parameters()]
    assert sorted(calls) == sorted([(kind, name) for kind in ("tensor", "accumulated") for name in names])


def test_kept_activations_are_fewer():
    def kept(module):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {param.untyped_storage().data_ptr() for param in module.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(torch.randn(64, 8))
        del out
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    tiled = Gated(inner=48)
    apply_tiled_mlp(tiled, 8)
    assert kept(tiled) == 64 * 8 * 4 and kept(Gated(inner=48)) > 10 * kept(tiled)


def test_a_copy_is_tiled_and_separate_and_the_number_can_change():
    tiled = Gated()
    apply_tiled_mlp(tiled, 2)
    twin = copy.deepcopy(tiled)
    with torch.no_grad():
        twin.a.weight.zero_()
    x = torch.randn(6, 8)
    assert not torch.equal(tiled(x), twin(x))
    calls = []
    tiled.a.register_forward_hook(lambda *_: calls.append(1))
    for num_shards in (2, 3):
        assert apply_tiled_mlp(tiled, num_shards) == 1
        calls.clear()
        tiled(x)
        assert len(calls) == num_shards
