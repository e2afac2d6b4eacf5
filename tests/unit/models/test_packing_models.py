"""Which HuggingFace models attention over layouts takes, what it refuses and why, and how a model is given back."""

import copy
import importlib

import pytest
import torch
from torch import nn

import sequences
from fsdp2x.models.sequence.attention import IMPLEMENTATION
from fsdp2x.models.sequence.layout import KEYWORD
from fsdp2x.sequence import SequenceLayout, pack_samples, use_varlen_attention
from models import build as build_simple

IDS = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))


def tiny(package, prefix, suffix="ForCausalLM", **arguments):
    configs = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 37}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    found = getattr(configs, f"{prefix}TextConfig", None) or getattr(configs, f"{prefix}Config")
    with torch.device("meta"):
        return getattr(module, f"{prefix}{suffix}")(found(**{**sizes, **heads, **arguments}))


LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
LLAMA4 = {"layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2, "intermediate_size_mlp": 24}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: with_kinds(["linear_attention", "full_attention"]), "layers of type linear_attention"),
        (lambda: tiny("qwen3_next", "Qwen3Next", num_experts=4, **LINEAR), "does not use|linear_attention"),
        (lambda: tiny("llama4", "Llama4", **LLAMA4), "layers of type chunked_attention"),
        (lambda: tiny("mamba", "Mamba"), "does not use transformers' attention interface"),
        (lambda: build_simple("t5"), "encoder-decoder|attention interface"),
        (lambda: tiny("llama", "Llama", is_causal=False), "is_causal is False"),
        (lambda: with_convolution(sequences.build("llama")), r"layers.1.mix \(Conv1d\) carries information"),
    ],
    ids=["linear", "qwen3_next", "chunked", "mamba", "t5", "bidirectional", "convolution"],
)
def test_models_that_mix_tokens_otherwise_are_refused(make, said):
    model = make()
    before = getattr(model.config, "_attn_implementation", None)
    with pytest.raises(NotImplementedError, match=said):
        use_varlen_attention(model)
    assert getattr(model.config, "_attn_implementation", None) == before


def with_kinds(kinds):
    model = sequences.build("llama")
    model.config.layer_types = kinds
    return model


def with_convolution(model):
    model.model.layers[1].mix = nn.Conv1d(16, 16, 3)
    return model


def test_encoders_are_refused_at_their_first_forward():
    model = build_simple("bert")
    use_varlen_attention(model)
    with pytest.raises(NotImplementedError, match="built with bidirectional_mask_function|not causal"):
        model(input_ids=IDS)


def test_not_a_transformers_model():
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        use_varlen_attention(nn.Linear(2, 2))


def test_twice_is_an_error_and_remove_gives_the_model_back():
    model = sequences.build("qwen3")
    expected = model(input_ids=IDS).logits
    handle = use_varlen_attention(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    with pytest.raises(ValueError, match="Qwen3ForCausalLM already runs"):
        use_varlen_attention(model)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    handle.remove()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(input_ids=IDS).logits, expected)
    use_varlen_attention(model).remove()


@pytest.mark.parametrize("name", ["qwen3", "qwen2_vl"])
def test_models_that_share_a_config(name):
    """Such as policy and reference. One may have it, or both, and each keeps its own."""
    first = sequences.build(name)
    second = type(first)(first.config)
    second.load_state_dict(first.state_dict())
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    run = lambda model: model(input_ids=IDS[:1], position_ids=positions).logits  # noqa: E731
    expected = run(first)
    handles = [use_varlen_attention(first)]
    assert torch.equal(run(second), expected) and first.config.get_text_config() is first.get_decoder().config
    handles.append(use_varlen_attention(second))
    with handles[0].disabled():
        packed = run(second)
        assert torch.equal(run(first), expected) and not torch.equal(packed, expected)
    handles[0].remove()
    assert torch.equal(run(second), packed)
    assert second.get_decoder().config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3"])
def test_autocast(name):
    """Rotary embeddings give fp32 queries and keys, and bf16 values."""

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        grads = [param.grad for param in model.parameters()]
        model.zero_grad()
        return loss.detach(), grads

    model = sequences.build(name)
    expected, grads = step()
    use_varlen_attention(model)
    loss, found = step()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for one, other in zip(found, grads, strict=True):
        assert (one - other).norm() < 0.05 * norm


def test_a_vision_tower_keeps_its_own_attention():
    model = sequences.build("qwen2_vl")
    use_varlen_attention(model)
    assert model.model.visual.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == IMPLEMENTATION


# ---- where samples come from


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_restarting_positions_are_enough(name):
    """As transformers' own masks do it: the same logits from the unchanged model."""
    model = sequences.build(name)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    expected = model(input_ids=IDS, position_ids=positions).logits
    use_varlen_attention(model)
    torch.testing.assert_close(model(input_ids=IDS, position_ids=positions).logits, expected, rtol=1e-5, atol=1e-5)
    assert (model(input_ids=IDS).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("sides", [(0, 0), (3, 0), (0, 2), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl"])
def test_a_mask_does_not_undo_packing(name, dtype, sides):
    model = sequences.build(name)
    alone = [model(input_ids=IDS[:1, part]).logits for part in (slice(0, 4), slice(4, 9))]
    use_varlen_attention(model)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], range(9)])
    rows, positions, mask = (nn.functional.pad(x, sides) for x in (IDS, positions, torch.ones(2, 9, dtype=dtype)))
    if name == "qwen2_vl":
        positions = positions.expand(4, -1, -1)
    got = model(input_ids=rows, position_ids=positions, attention_mask=mask).logits[:1, sides[0] :][:, :9]
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen2_vl"])
def test_padding_masks(name, left):
    model = sequences.build(name)
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 3) if left else slice(6, 9)] = 0
    expected = model(input_ids=IDS, attention_mask=mask).logits
    use_varlen_attention(model)
    got = model(input_ids=IDS, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_generation_runs_what_the_model_ran_before():
    model = sequences.build("mistral").eval()
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=True)
    handle = use_varlen_attention(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=True), expected)
    with handle.disabled():
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=True), expected)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_an_error_in_a_forward_leaves_the_next_one_right():
    model = sequences.build("llama")
    use_varlen_attention(model)
    expected = model(input_ids=IDS).logits
    hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=IDS)
    hook.remove()
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_peft_models():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(sequences.build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    expected = model(input_ids=IDS).logits
    use_varlen_attention(model)
    row = pack_samples([{"input_ids": row} for row in IDS])
    logits = model(**row.inputs).logits
    torch.testing.assert_close(torch.stack(row.unpack(logits)), expected, rtol=1e-5, atol=1e-5)


# ---- what a forward must not ask for


def test_a_layout_of_other_tokens():
    model = sequences.build("llama")
    use_varlen_attention(model)
    layout = SequenceLayout(1, 8, [(0, 0, 8)])
    with pytest.raises(ValueError, match=r"expects tokens of shape \[1, 8\], got \[2, 9\]"):
        model(input_ids=IDS, **{KEYWORD: layout})


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, NotImplementedError, "padding masks of shape"),
        ({"attention_mask": torch.tensor([[1, 0, 1] * 3] * 2)}, ValueError, "padding between tokens"),
        ({"attention_mask": torch.tensor([[1] * 5 + [2] * 4] * 2)}, ValueError, "expected 1 for tokens and 0 for"),
        ({"attention_mask": torch.full((2, 9), 0.5)}, ValueError, "expected 1 for tokens and 0 for padding"),
        ({"attention_mask": {"full_attention": None}}, NotImplementedError, r"attention_mask \(dict\)"),
        (
            {"attention_mask": torch.ones(2, 9), "position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])},
            ValueError,
            "row 0 goes from 2 to 5 at column 3, next to an attention_mask",
        ),
        ({"position_ids": torch.arange(8)[None]}, ValueError, r"position_ids of shape \(1, 8\) for tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, ValueError, "Pass position_ids that restart at each sample"),
        (
            {"cu_seq_lens_k": torch.tensor([0, 4, 9]), "attention_mask": torch.ones(2, 9)},
            ValueError,
            "Pass position_ids that restart at each sample",
        ),
        ({"seq_idx": torch.tensor([[0] * 4 + [1] * 5] * 2)}, ValueError, "Pass position_ids that restart"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions=True has no weights"),
    ],
)
def test_wrong_inputs(inputs, error, said):
    model = sequences.build("llama")
    use_varlen_attention(model)
    with pytest.raises(error, match=said):
        model(input_ids=IDS, **inputs)


def test_a_layer_that_escapes_is_noticed():
    model = sequences.build("llama")
    use_varlen_attention(model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(NotImplementedError, match="1 attention calls in 2 layers"):
        model(input_ids=IDS)


def test_a_window_that_attention_is_not_told_of_is_noticed():
    model = sequences.build("qwen2_window")
    use_varlen_attention(model)
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(NotImplementedError, match="1 layers have a sliding window .* 0"):
        model(input_ids=IDS)


def test_a_layer_called_on_its_own():
    model = sequences.build("llama")
    use_varlen_attention(model)
    hidden = torch.randn(1, 3, 16)
    positions = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with pytest.raises(RuntimeError, match="LlamaAttention was called without a layout"):
        model.model.layers[0](hidden, position_embeddings=positions)


def test_rope_that_depends_on_the_length_of_the_call():
    """Short samples are fine; beyond the original length packing would give them other frequencies."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = sequences.build("llama", rope_parameters=rope, max_position_embeddings=8)
    samples = sequences.make_samples(model, [5, 8, 6])
    expected = sequences.reference_step(copy.deepcopy(model), samples)
    use_varlen_attention(model)
    row = pack_samples(samples)
    parts = row.unpack(model(**row.inputs).logits)
    alone = [sample["labels"][1:] for sample in samples]
    losses = [nn.functional.cross_entropy(p[:-1], t, reduction="sum") for p, t in zip(parts, alone, strict=True)]
    num = sum(int((labels != -100).sum()) for labels in alone)
    torch.testing.assert_close(sum(losses).detach() / num, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="9 tokens exceeds .* 8"):
        model(input_ids=IDS)
