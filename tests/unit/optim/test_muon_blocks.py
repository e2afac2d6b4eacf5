"""Which blocks of fused matrices Muon orthogonalizes, by family and by setting, and the Gram iteration."""

import importlib

import pytest
import torch
from torch import nn

from fsdp2x.optim import Muon, muon_param_groups
from fsdp2x.optim.muon.newton_schulz import flops, orthogonalize, uses_gram
from fsdp2x.optim.muon.split import Split, split_of
from models import build

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11,
         "pad_token_id": None}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**GQA, "num_experts_per_tok": 2, "head_dim": 4}
MLA = {"n_routed_experts": 4, "kv_lora_rank": 6, "q_lora_rank": None, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4,
       "v_head_dim": 6, "first_k_dense_replace": 2}  # fmt: skip
# Family -> (classes begin with, config, end of a name -> its blocks with split="blocks", its heads with "heads").
FAMILIES = {
    "phi3": ("Phi3", GQA, {
        "qkv_proj.weight": ("rows 16 + 8 + 8", "4 + 2 + 2"), "gate_up_proj.weight": ("rows 24 + 24", ""),
        "o_proj.weight": ("rows 16", "")}),
    "llama": ("Llama", GQA, {"q_proj.weight": ("rows 16", "4"), "k_proj.weight": ("rows 8", "2")}),
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 11}, {
        "c_attn.weight": ("columns 16 + 16 + 16", "4 + 4 + 4"), "c_fc.weight": ("rows 16", "")}),
    "gpt_neox": ("GPTNeoX", SIZES, {"query_key_value.weight": ("rows 4 + 4 + 4, 4 times", "4 + 4 + 4")}),
    "falcon": ("Falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}, {
        "query_key_value.weight": ("rows 8 + 4 + 4, 2 times", "4 + 2 + 2")}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 12}, {
        "experts.gate_up_proj": ("rows 12 + 12", ""), "experts.down_proj": ("rows 16", "")}),
    "gpt_oss": ("GptOss", {**EXPERTS, "num_local_experts": 4}, {
        "experts.gate_up_proj": ("columns 1 + 1, 24 times", ""), "q_proj.weight": ("rows 16", "4")}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **MLA}, {
        "kv_b_proj.weight": ("rows 4 + 6, 4 times", "4 + 4"), "q_proj.weight": ("rows 24", "4")}),
    "mimo_v2_flash": ("MiMoV2Flash", {**EXPERTS, "head_dim": 16, "v_head_dim": 8, "layer_types": ["full_attention"] * 2,
            "n_routed_experts": 2, "moe_intermediate_size": 8}, {
        "k_proj.weight": ("rows 32", "2"), "v_proj.weight": ("rows 16", "2")}),
}  # fmt: skip


def family(name):
    prefix, arguments, expected = FAMILIES[name]
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    kind = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    return getattr(models, prefix + kind)(getattr(configs, f"{prefix}Config")(**arguments)), expected


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_families(name):
    model, expected = family(name)
    found = {}
    for way in ("none", "blocks", "heads"):
        for group in Muon(muon_param_groups(model, split=way)).param_groups:
            for end, param in zip(group["param_names"], group["params"], strict=True) if group["use_muon"] else ():
                found[way, end] = split_of(group, param.shape, end)
    for end, (blocks, heads) in expected.items():
        names = [one for way, one in found if way == "none" and one.endswith(end)]
        assert names, f"no parameter {end}"
        assert all(found["none", one].is_whole for one in names)
        assert {str(found["blocks", one]) for one in names} == {blocks}
        assert {str(found["heads", one]) for one in names} == {f"{blocks}, heads {heads}" if heads else blocks}


def test_blocks_are_those_that_the_model_reads():
    """Rows of GPT-NeoX's heads, columns of gpt-oss's experts: indexed as their forwards do."""
    rows, columns = torch.arange(24.0).view(1, 24, 1).expand(1, 24, 5), torch.arange(12.0).expand(2, 5, 12)
    seen = []

    def record(matrices):
        seen.append(matrices.clone())
        return -matrices

    result = Split((2, 2, 2), (1, 1, 2), repeats=4).orthogonalize(rows.clone(), record)
    torch.testing.assert_close(result, -rows)
    by_head = rows.view(4, 3, 2, 5)
    for index, matrices in enumerate(seen):
        expected = by_head[:, index].reshape(2 if index == 2 else 1, -1, 5)
        torch.testing.assert_close(matrices, expected)
    seen.clear()
    torch.testing.assert_close(Split((1, 1), (1, 1), -1, 6).orthogonalize(columns.clone(), record), -columns)
    torch.testing.assert_close(seen, [columns[..., ::2], columns[..., 1::2]])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"split_sizes": (8, 4)}, "qkv has 16 rows, but split_sizes=.8, 4. .* cover 12. Pass sizes that cover 16"),
        ({"split_sizes": (4, 4, 4), "split_repeats": 2}, "split_repeats=2 cover 24"),
        ({"split_sizes": (8, 8), "split_dim": -1}, "has 6 columns"),
        ({"split_sizes": (8, 8), "split_dim": 0}, "split_dim=0. Pass -2"),
        ({"split_sizes": (8, 8), "num_heads": (2,)}, "for 2 blocks"),
        ({"split_sizes": (8, 8), "num_heads": (4, 3)}, "a block of 8 rows, which num_heads=3 does not divide"),
        ({"num_heads": 5}, "a block of 16 rows"),
        ({"split_sizes": (16, 0)}, "Pass positive integers"),
        ({"split_sizes": (8.0, 8.0)}, "Pass positive integers"),
        ({"ns_method": "graham"}, "ns_method is 'graham'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Muon([{"params": [("qkv", nn.Parameter(torch.zeros(16, 6)))], **settings}])


def test_other_refusals():
    with pytest.raises(ValueError, match="split is 'head'"):
        muon_param_groups(build("llama"), split="head")
    model, _ = family("phi3")
    model.model.layers[1].self_attn.qkv_proj = nn.Linear(16, 31)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.qkv_proj.weight has 31 rows"):
        muon_param_groups(model)
    assert muon_param_groups(model, split="none")
    with pytest.raises(ValueError, match="has split_sizes, which only"):
        Muon([{"params": [torch.zeros(3, requires_grad=True)], "use_muon": False, "split_sizes": (1, 2)}])


def test_a_state_without_blocks_leaves_them():
    weight = nn.Parameter(torch.randn(16, 6))
    weight.grad = torch.ones_like(weight)
    optimizer = Muon([{"params": [weight], "split_sizes": (8, 8)}], ns_method="gram")
    plain = torch.optim.Muon([weight])
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["split_sizes"] == (8, 8) and optimizer.param_groups[0]["ns_method"] == "gram"
    optimizer.load_state_dict(Muon([{"params": [weight], "split_sizes": (4, 12)}]).state_dict())
    assert optimizer.param_groups[0]["split_sizes"] == (4, 12)


# Optimizer of a matrix and a bias -> whether Muon takes its groups over.
KINDS = {
    "Muon": (lambda w, b: Muon([{"params": [w]}, {"params": [b], "use_muon": False}]), True),
    "Muon, AdamW for both": (lambda w, b: Muon([{"params": [p], "use_muon": False} for p in (w, b)]), False),
    "AdamW": (lambda w, b: torch.optim.AdamW([{"params": [w]}, {"params": [b]}]), False),
    "SGD": (lambda w, b: torch.optim.SGD([{"params": [w]}, {"params": [b]}], momentum=0.9), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_take_states_of_their_kind(kind):
    make, fits = KINDS[kind]
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    weight.grad, bias.grad = torch.ones(4, 4), torch.ones(4)
    saved, optimizer = make(weight, bias), KINDS["Muon"][0](weight, bias)
    saved.step()
    if fits:
        optimizer.load_state_dict(saved.state_dict())
    else:
        with pytest.raises(ValueError, match="group 0 has use_muon=True, but "):
            optimizer.load_state_dict(saved.state_dict())
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    optimizer.step()


def test_groups_of_torchs_optimizers_load():
    """torch's Muon and AdamW, whose groups have no use_muon, together."""
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    weight.grad, bias.grad = torch.ones(4, 4), torch.ones(4)
    parts = [torch.optim.Muon([weight], lr=0.5), torch.optim.AdamW([bias], lr=0.25)]
    for part in parts:
        part.step()
    groups = [{**part.state_dict()["param_groups"][0], "params": [index]} for index, part in enumerate(parts)]
    states = {index: part.state_dict()["state"][0] for index, part in enumerate(parts)}
    optimizer = Muon([{"params": [weight]}, {"params": [bias], "use_muon": False}])
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [(True, 0.5), (False, 0.25)]
    optimizer.step()
    assert optimizer.state[weight].keys() == {"momentum_buffer"} and optimizer.state[bias]["step"] == 2


def steep(*shape):
    """Matrices whose singular values fall from 1 to 1e-4."""
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64), full_matrices=False)
    return left * torch.logspace(0, -4, values.size(-1), dtype=torch.float64) @ right


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(64, 256), (160, 64), (3, 64, 192)])
def test_gram_is_the_same_polynomial(shape, steps):
    """Exact in float64 up to rounding. In fewer bits, its error stays near that of the plain iteration."""
    coefficients = [(3.4445, -4.7750, 2.0315)] * steps
    matrices = steep(*shape)
    exact = orthogonalize(matrices.clone(), coefficients, 1e-7)
    assert uses_gram(*shape[-2:], steps) == (steps > 1)
    torch.testing.assert_close(orthogonalize(matrices.clone(), coefficients, 1e-7, "gram"), exact, rtol=0, atol=1e-10)
    single = orthogonalize(matrices.float(), coefficients, 1e-7, "gram")
    assert (single - exact).norm() / exact.norm() < 1e-3
    given = matrices.bfloat16()
    exact = orthogonalize(given.double(), coefficients, 1e-7)
    rounded = orthogonalize(given, coefficients, 1e-7, "gram")
    assert rounded.dtype is torch.bfloat16 and (rounded - exact).norm() / exact.norm() < (1e-2 if steps > 1 else 2e-2)


def test_gram_falls_back_where_it_gains_nothing():
    torch.manual_seed(0)
    coefficients = [(3.4445, -4.7750, 2.0315)] * 5
    for shape in ((256, 256), (256, 300), (16, 512)):
        assert not uses_gram(*shape, 5) and flops(1, *shape, 5, "gram") == flops(1, *shape, 5, "standard")
        matrix = torch.randn(shape)
        results = [orthogonalize(matrix.clone(), coefficients, 1e-7, method) for method in ("standard", "gram")]
        assert torch.equal(*results)
    # Plain: 5 (2 n + m) m m. Gram: 4 n m m for X, and 5 + 9 products on G.
    assert flops(3, 128, 512, 5, "gram") == 3 * 128 * 128 * (4 * 512 + 14 * 128)
