"""Which units automatic wrapping makes, by exact names, and that stock fully_shard accepts and trains each plan."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import models
from fsdp2x.sharding.wrap import UnitPlan, plan_units, should_auto_wrap


def names(model, auto_wrap=None, **options):
    return [unit.names for unit in plan_units(model, auto_wrap, **options)]


def blocks(prefix, num=2):
    return [(f"{prefix}.{i}",) for i in range(num)]


EXPECTED = {
    "llama": [("model.embed_tokens",), *blocks("model.layers"), ("model.norm", "lm_head")],
    "llama_base": [("embed_tokens",), *blocks("layers"), ("norm",)],
    "qwen3": [*blocks("model.layers"), ("model.norm", "model.embed_tokens", "lm_head")],
    "gpt2": [*blocks("transformer.h"), ("transformer.ln_f", "transformer.wte", "lm_head")],
    "mixtral": [("model.embed_tokens",), *blocks("model.layers"), ("model.norm", "lm_head")],
    "qwen3_moe": [("model.embed_tokens",), *blocks("model.layers"), ("model.norm", "lm_head")],
    "hrm_text": [
        ("model.embed_tokens",),
        *blocks("model.L_module.layers"),
        *blocks("model.H_module.layers"),
        ("lm_head",),
    ],
    "t5": [
        *blocks("encoder.block"),
        *blocks("decoder.block"),
        ("decoder.final_layer_norm", "shared", "lm_head", "encoder.embed_tokens", "decoder.embed_tokens"),
    ],
    "bert": [
        *blocks("bert.encoder.layer"),
        ("cls.predictions", "bert.embeddings.word_embeddings"),
        ("bert.embeddings",),
    ],
}


@pytest.fixture
def one_rank():
    """A world of this process alone: enough for stock to check a plan and run it."""
    if dist.is_initialized():
        pytest.skip("needs a process group of its own")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard_by(model, units):
    for unit in units:
        assert isinstance(unit, UnitPlan)
        modules = list(unit.modules)
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=unit.reshard_after_forward)
    return fully_shard(model)


@pytest.mark.parametrize("name", models.NAMES)
def test_units_of_huggingface_models(name):
    model = models.build(name)
    assert names(model) == names(model, True) == EXPECTED[name]
    for unit in plan_units(model):
        assert unit.modules == tuple(model.get_submodule(path) for path in unit.names)
        kept = any(word in path for path in unit.names for word in ("norm", "ln_f", "predictions", "lm_head"))
        assert unit.reshard_after_forward is (False if kept else None)
        assert unit.reason


@pytest.mark.parametrize("name", [name for name in models.NAMES if name != "llama_base"])
def test_stock_accepts_and_trains_the_plan(name, one_rank):
    model = models.build(name)
    reference = copy.deepcopy(model)
    shard_by(model, plan_units(model))
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = each(**models.batch(name, step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if each is reference:
            expected = losses
    assert losses == pytest.approx(expected, rel=1e-6) and len(set(losses)) == 3


def test_vision_language_model():
    expected = [
        *blocks("model.visual.blocks"),
        *blocks("model.language_model.layers"),
        ("model.language_model.norm", "model.language_model.embed_tokens", "lm_head"),
    ]
    assert names(models.tiny_vlm()) == expected


def test_peft_model(one_rank):
    pytest.importorskip("peft")
    model = models.tiny_lora()
    prefix = "base_model.model."
    expected = [tuple(prefix + path for path in unit) for unit in EXPECTED["llama"]]
    assert should_auto_wrap(model, None) and names(model) == expected
    shard_by(model, plan_units(model))
    model(**models.batch("llama", 0)).loss.backward()
    trained = [param for param in model.parameters() if param.grad is not None]
    assert trained and all(param.requires_grad for param in trained)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.inner(x))


class Plain(nn.Module):
    """Two towers of repeated blocks, a tiny run that is not worth a unit, and leftovers for the root."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Block(8) for _ in range(3))})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Block(8) for _ in range(2))})
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x[..., :1]) + x
        for block in [*self.encoder["layers"], *self.decoder["layers"]]:
            x = block(x)
        return self.out(x)


def test_plain_model_by_repeated_blocks():
    model = Plain()
    assert not should_auto_wrap(model, None) and should_auto_wrap(model, True)
    assert names(model, True) == [*blocks("encoder.layers", 3), *blocks("decoder.layers")]
    assert names(nn.Linear(3, 3), True) == names(model, False) == []


def test_repeated_blocks_inside_blocks_stay_with_the_outer_run():
    model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert names(model, True) == [("0",), ("1",), ("2",)]


def test_no_split_modules_may_be_none_absent_or_nested():
    model = models.build("llama")
    model._fsdp_plan = {}
    type(model.config).base_model_fsdp_plan, saved = {}, type(model.config).base_model_fsdp_plan
    try:
        for value in (None, [], ["Absent"], {"Absent"}):
            model._no_split_modules = value
            reasons = {unit.reason for unit in plan_units(model) if "layers" in unit.names[0]}
            assert names(model) == EXPECTED["llama"] and reasons == {
                "repeated block: 2 x LlamaDecoderLayer in model.layers"
            }
        model._no_split_modules = ["LlamaDecoderLayer", "LlamaMLP", "Absent"]
        nested = [(path,) for i in range(2) for path in (f"model.layers.{i}.mlp", f"model.layers.{i}")]
        assert names(model) == [("model.embed_tokens",), *nested, ("model.norm", "lm_head")]
    finally:
        type(model.config).base_model_fsdp_plan = saved


def test_fsdp_plan_with_tuples_and_styles():
    model = models.build("llama")
    model._fsdp_plan = {
        "model.layers.*.mlp": "keep_full_weight",
        ("model.layers.0", "model.layers.1"): "free_full_weight",
    }
    model._no_split_modules = None
    units = {unit.names: unit.reshard_after_forward for unit in plan_units(model)}
    assert units[("model.layers.0.mlp",)] is False and units[("model.layers.1.mlp",)] is False
    model._fsdp_plan = {"model.layers.*": "sometimes"}
    with pytest.raises(ValueError, match="model.layers.*'sometimes'.*free_full_weight"):
        plan_units(model)


class TiedLeaves(nn.Module):
    """Blocks that share one Linear's weight, and a block that shares one with the root's leftovers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[2].inner.weight = self.layers[0].inner.weight
        self.head = nn.Linear(4, 4)
        self.head.bias = self.layers[1].norm.bias

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_twins(reference, model, feed):
    for step in range(3):
        results = []
        for each in (reference, model):
            each.zero_grad()
            loss = each(feed(step)).square().mean()
            loss.backward()
            results.append([loss.detach()] + [_full(param.grad) for param in each.parameters()])
            with torch.no_grad():
                for param in each.parameters():
                    param -= 0.1 * param.grad
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_tied_leaves_are_carved_out(one_rank):
    torch.manual_seed(0)
    model = TiedLeaves()
    reference = copy.deepcopy(model)
    units = plan_units(model, True)
    assert {unit.names for unit in units} == {
        ("layers.0.inner", "layers.2.inner"),
        ("layers.1.norm", "head"),
        *blocks("layers", 3),
    }
    assert [u.reshard_after_forward for u in units if len(u.names) > 1] == [False, False]
    shard_by(model, units)
    train_twins(reference, model, lambda step: torch.randn(2, 4, generator=torch.Generator().manual_seed(step)))


class OwnParam(nn.Module):
    def __init__(self, scale=None):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4)) if scale is None else scale

    def forward(self, x):
        return self.inner(x) * self.scale


def test_tied_blocks_are_joined_and_hopeless_ties_go_to_the_root():
    first = OwnParam()
    layers = nn.Sequential(first, OwnParam(), OwnParam(first.scale))
    assert names(layers, True) == [("1",), ("0", "2")]
    assert plan_units(layers, True)[1].reason == "tied: 0.scale = 2.scale"
    holder = nn.Module()  # no forward, so hooks on it would never run
    holder.scale = first.scale
    model = nn.Sequential()
    model.add_module("layers", layers)
    model.add_module("holder", holder)
    assert names(model, True) == [("layers.1",)]
    model = OwnParam()
    model.layers = nn.ModuleList([OwnParam(), OwnParam(model.scale)])
    assert names(model, True) == [("layers.0",)]


def test_a_module_shared_by_two_blocks_becomes_a_unit():
    layers = nn.ModuleList(Block() for _ in range(3))
    layers[2].inner = layers[0].inner
    assert names(nn.Sequential(layers), True) == [("0.0.inner",), ("0.0",), ("0.1",), ("0.2",)]


def test_attention_output_weights_are_not_carved_out():
    """MultiheadAttention reads out_proj.weight and never calls out_proj."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))
    layers[1].self_attn.out_proj.weight = layers[0].self_attn.out_proj.weight
    assert names(nn.Sequential(layers), True) == [("0.0", "0.1")]


def test_ignored_parameters_neither_tie_nor_make_units():
    model = TiedLeaves()
    ignored = {model.head.bias, model.layers[0].inner.weight}
    assert names(model, True, ignored_params=ignored) == blocks("layers", 3)
    assert names(model, True, ignored_params=set(model.layers[1].parameters()))[-1] == ("layers.2",)
    everything = set(model.layers[1].parameters()) | ignored
    assert names(model, True, ignored_params=everything) == [("layers.0",), ("layers.2",)]


def test_explicit_classes():
    model = Plain()
    assert names(model, ["Block"]) == names(model, Block) == names(model, "Block") == names(model, [Block, "Block"])
    assert names(model, {"Block"}) == [*blocks("encoder.layers", 3), *blocks("decoder.layers")]
    llama = models.build("llama")
    with_mlp = names(llama, ["LlamaMLP"])
    assert with_mlp == [
        ("model.embed_tokens",),
        *[(f"model.layers.{i}.mlp",) for i in range(2)],
        ("model.norm", "lm_head"),
    ]


def test_unknown_class_names_the_nearest():
    with pytest.raises(ValueError, match="class LlamaDecoderlayer .*did you mean LlamaDecoderLayer"):
        plan_units(models.build("llama"), ["LlamaDecoderlayer"])
    with pytest.raises(ValueError, match="class Conv2d.* has: .*Block, LayerNorm, Linear"):
        plan_units(Plain(), [nn.Conv2d])
    for policy in (3, [3], [nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match="auto_wrap must be"):
            plan_units(Plain(), policy)


def test_predicate():
    model = Plain()
    assert names(model, lambda name, module: name.endswith("layers.1")) == [
        ("encoder.layers.1",),
        ("decoder.layers.1",),
    ]
    assert should_auto_wrap(model, lambda name, module: False)
    with pytest.raises(ValueError, match="selected no module of Plain"):
        plan_units(model, lambda name, module: False)
    with pytest.raises(ValueError, match="selected encoder.layers, a ModuleList"):
        plan_units(model, lambda name, module: isinstance(module, nn.ModuleList))


def test_sharded_parts_are_left_alone(one_rank):
    model = models.build("llama")
    assert should_auto_wrap(model, None)
    fully_shard(model.model.layers[0])
    assert not should_auto_wrap(model, None) and should_auto_wrap(model, True)
    assert names(model, True) == [("model.embed_tokens",), ("model.layers.1",), ("model.norm", "lm_head")]
    assert names(model, ["LlamaDecoderLayer"]) == names(model, True)


def test_wrappers_are_seen_through():
    model = models.build("llama")
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    assert names(model) == names(model, ["LlamaDecoderLayer"]) == EXPECTED["llama"]
    plain = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(2))
    assert names(nn.Sequential(plain), True) == [("0.0",), ("0.1",)]
