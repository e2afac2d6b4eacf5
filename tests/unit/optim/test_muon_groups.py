"""Which parameters Muon takes, what AdamW gets, and what is refused."""

import pytest
import torch
from torch import nn

import fsdp2x
from fsdp2x.optim import Muon, muon_param_groups
from models import build


def names_of(groups) -> dict[bool, list[str]]:
    return {group["use_muon"]: [name for name, _ in group["params"]] for group in groups}


def test_matrices_of_a_transformer():
    names = names_of(muon_param_groups(build("llama"), lr=3e-4))
    assert len(names[True]) == 2 * 7 and all(name.startswith("model.layers.") for name in names[True])
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(names[False])


def test_fused_experts_are_stacks_and_tied_heads_are_embeddings():
    names = names_of(muon_param_groups(build("qwen3_moe")))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[True]
    tied = names_of(muon_param_groups(build("qwen3")))
    assert "model.embed_tokens.weight" in tied[False]


def test_excluded_and_frozen_parameters():
    model = build("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    names = names_of(muon_param_groups(model, exclude=["*.q_proj.weight"]))
    assert "model.layers.0.self_attn.q_proj.weight" in names[False]
    assert not any(".0.mlp." in name for name in [*names[True], *names[False]])


def test_convolutions_belong_to_adamw():
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Linear(4, 4))
    assert names_of(muon_param_groups(model, exclude=[])) == {
        True: ["1.weight"],
        False: ["0.weight", "0.bias", "1.bias"],
    }


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: muon_param_groups(model), "has no get_output_embeddings"),
        (lambda model: muon_param_groups(model, exclude=["haed.*"]), "'haed.*'.* name no parameter"),
        (lambda model: muon_param_groups(model.requires_grad_(False), exclude=[]), "no parameter has requires_grad"),
        (lambda model: Muon(model.parameters()), r"has shape \(4,\), expected a matrix"),
        (lambda model: Muon([model.weight], ns_dtype=torch.float16), "ns_dtype is torch.float16"),
        (lambda model: Muon([model.weight], lr=-1.0), "lr is -1.0"),
        (lambda model: Muon([model.weight], ns_steps=0), "ns_steps is 0"),
        (lambda model: Muon([model.weight], adjust_lr_fn="moonlight"), "adjust_lr_fn is 'moonlight'"),
        (lambda model: Muon([model.weight], ns_coefficients=[(1.0, 2.0, 3.0)]), "three for each of ns_steps"),
        (lambda model: Muon([{"params": [model.weight], "betas": (0.9, 0.9)}]), "has betas, which only"),
        (lambda model: Muon([{"params": [model.bias], "use_muon": False, "ns_steps": 3}]), "has ns_steps, which only"),
        (lambda model: Muon([{"params": [model.bias], "use_muon": False, "betas": (2.0, 0.9)}]), "beta"),
        (lambda model: Muon([model.weight], max_grad_norm=0.0), "max_grad_norm is 0.0"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(nn.Linear(4, 4))


def test_complex_matrices_are_refused():
    with pytest.raises(NotImplementedError, match="is complex"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    layer = nn.Linear(4, 4)
    optimizer = Muon([layer.weight])
    with pytest.raises(ValueError, match="expected a matrix"):
        optimizer.add_param_group({"params": [layer.bias]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [layer.bias], "use_muon": False, "lr": 1e-4})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999) and optimizer.param_groups[1]["eps"] == 1e-8
    assert optimizer.param_groups[1]["weight_decay"] == 0.1 and optimizer.param_groups[0]["eps"] == 1e-7


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
def test_iterations_move_singular_values_to_one(ns_dtype):
    """Of a matrix, of its transpose, and of a stack of both's size, of which one is zero."""
    from fsdp2x.optim.muon import orthogonalize

    torch.manual_seed(0)
    # Coefficients that converge, in place of Muon's, which stay within 0.7 to 1.2.
    coefficients = [(15 / 8, -10 / 8, 3 / 8)] * 25
    matrix = torch.randn(12, 30)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    tolerance = 1e-4 if ns_dtype is torch.float32 else 0.05
    for case in (matrix, matrix.mT.contiguous()):
        expected = left @ right if case is matrix else (left @ right).mT
        result = orthogonalize(case.to(ns_dtype, copy=True), coefficients, 1e-7)
        torch.testing.assert_close(result.float(), expected, rtol=0, atol=tolerance)
    stack = torch.stack([matrix, torch.zeros(12, 30), 3 * matrix])
    result = orthogonalize(stack.to(ns_dtype), coefficients, 1e-7).float()
    torch.testing.assert_close(result[0], left @ right, rtol=0, atol=tolerance)
    assert not result[1].any()
    torch.testing.assert_close(result[2], result[0], rtol=0, atol=tolerance)


def test_each_step_may_have_coefficients_of_its_own():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    triples = [(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]
    for weight, coefficients in zip(weights, (triples, triples[0]), strict=True):
        weight.grad = torch.ones(6, 4).triu()
        Muon([weight], ns_coefficients=coefficients, ns_steps=2).step()
    assert not torch.equal(*weights)
    assert fsdp2x.optim.Muon is Muon
