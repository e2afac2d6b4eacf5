"""Which parameters Muon takes, and which rank orthogonalizes which matrices."""

from collections import Counter

import pytest
import torch
from torch import nn

import fsdp2x
from fsdp2x.optim import Muon, muon_param_groups
from fsdp2x.optim.muon.newton_schulz import orthogonalize
from fsdp2x.optim.muon.plan import Piece, blocks_of, deal
from models import build


def test_owners_share_the_work_in_rounds_of_bounded_size():
    """parity/optim/test_muon.py compares the results with torch's, in rounds of one matrix, few, and all."""
    rows = blocks_of([[Piece((0, rank, 0), (1, 1, 6))] for rank in range(4)])
    loads: dict[int, int] = {}
    dealt = deal(dict.fromkeys(range(20), ((1, 4, 6), rows, 10)), 48, loads)
    assert loads == dict.fromkeys(range(4), 50) and not dealt.local
    for jobs in dealt.rounds:
        taken = Counter(job.owner for job in jobs)
        assert jobs and max(taken.values()) <= 2, "two matrices of 24 elements are a round"
    assert sorted(job.param for jobs in dealt.rounds for job in jobs) == list(range(20))


def names_of(groups) -> dict[bool, list[str]]:
    return {group["use_muon"]: [name for name, _ in group["params"]] for group in groups}


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


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 11, "pad_token_id": 0}
IMAGES = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 5}
# Model of transformers -> its config, ends of names of all matrices, and some parameters of AdamW that have more dims.
LLAMA_MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
TASKS = {
    "LlamaForCausalLM": ("Llama", TEXT, LLAMA_MATRICES,
        {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}),
    "LlamaForSequenceClassification": ("Llama", TEXT, LLAMA_MATRICES, {"score.weight"}),
    "LlamaForQuestionAnswering": ("Llama", TEXT, LLAMA_MATRICES, {"qa_outputs.weight"}),
    "LlamaModel": ("Llama", TEXT, LLAMA_MATRICES, {"embed_tokens.weight"}),
    "GptOssForCausalLM": ("GptOss", {**TEXT, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"q_proj", "k_proj", "v_proj", "o_proj", "router", "gate_up_proj", "down_proj"},
        {f"model.layers.0.mlp.experts.{name}_bias" for name in ("gate_up_proj", "down_proj")}),
    "ViTForImageClassification": ("ViT", IMAGES, {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"},
        {"classifier.weight", "vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}),
    "CLIPForImageClassification": ("CLIP", {"vision_config": IMAGES, "text_config": TEXT},
        {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}, {"classifier.weight"}),
    "MambaForCausalLM": ("Mamba", {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 11},
        {"in_proj", "x_proj", "dt_proj", "out_proj"}, {"backbone.layers.0.mixer.A_log"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_matrices_are_those_of_hidden_layers(name):
    transformers = pytest.importorskip("transformers")
    config, sizes, matrices, others = TASKS[name]
    model = getattr(transformers, name)(getattr(transformers, f"{config}Config")(**sizes))
    names = names_of(muon_param_groups(model, split="none"))
    assert {one.removesuffix(".weight").rpartition(".")[2] for one in names[True]} == matrices
    assert others <= set(names[False])


# Config of PEFT -> its settings, and whether it also trains a matrix of the model itself.
ADAPTERS = {
    "LoraConfig": ({"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}, False),
    "LoHaConfig": ({"target_modules": ["q_proj"]}, False),
    "VeraConfig": ({"target_modules": ["q_proj"]}, False),
    "AdaLoraConfig": ({"target_modules": ["q_proj"], "total_step": 9, "modules_to_save": ["k_proj"]}, True),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_and_heads_belong_to_adamw(name, caplog):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT))
    arguments, saves = ADAPTERS[name]
    model = peft.get_peft_model(model, getattr(peft, name)(task_type="SEQ_CLS", **arguments))
    names = names_of(muon_param_groups(model))
    assert [one for one in names.get(True, ()) if "k_proj.modules_to_save" not in one] == []
    assert bool(names.get(True)) == saves and any("score" in one for one in names[False])
    assert "AdamW steps the" in caplog.text


class ForTest(nn.Linear):
    """A task model, by its name, whose head is not known."""

    def get_output_embeddings(self):
        return None


def test_a_head_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="ForTest has no get_output_embeddings"):
        muon_param_groups(ForTest(4, 4))
    model = nn.Sequential(nn.Conv1d(3, 4, 2), ForTest(4, 4))  # convolutions belong to AdamW
    assert names_of(muon_param_groups(model, exclude=[])) == {
        True: ["1.weight"],
        False: ["0.weight", "0.bias", "1.bias"],
    }


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (muon_param_groups, "has no get_output_embeddings"),
        (lambda model: muon_param_groups(model, exclude=["haed.*"]), "'haed.*'.* name no parameter"),
        (lambda model: muon_param_groups(model.requires_grad_(False), exclude=[]), "no parameter has requires_grad"),
        (lambda model: Muon(model.parameters()), r"has shape \(4,\), expected a matrix"),
        (lambda model: Muon([model.weight], ns_dtype=torch.float16), "torch.float32, got torch.float16"),
        (lambda model: Muon([model.weight], lr=-1.0), "lr is -1.0"),
        (lambda model: Muon([model.weight], ns_steps=0), "ns_steps is 0"),
        (lambda model: Muon([model.weight], adjust_lr_fn="moonlight"), "adjust_lr_fn is 'moonlight'"),
        (lambda model: Muon([model.weight], ns_coefficients=[(1.0, 2.0, 3.0)]), "three for each of ns_steps"),
        (lambda model: Muon([{"params": [model.weight], "betas": (0.9, 0.9)}]), "has betas, which only"),
        (lambda model: Muon([{"params": [model.bias], "use_muon": False, "ns_steps": 3}]), "has ns_steps, which only"),
        (lambda model: Muon([{"params": [model.bias], "use_muon": False, "betas": (2.0, 0.9)}]), "beta"),
        (lambda model: Muon([model.weight], max_grad_norm=0.0), "max_grad_norm must be .*, got 0.0"),
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
    """This holds for a matrix, its transpose, and a stack in which one matrix is zero."""
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
