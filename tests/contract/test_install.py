"""install() and uninstall(): which names change, where, and that upstream's own engine stays usable."""

import importlib
import inspect
import logging
import pickle
import sys
import types

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, build, inputs


class Stock:
    """Keeps FSDP2's function where install() does not look. It would also rebind a global of this file."""

    fully_shard = staticmethod(torch_fsdp.fully_shard)


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    fsdp2x.uninstall()


def _module(name: str, **names) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def test_every_public_place_is_rebound_and_given_back():
    import torch.distributed._composable.fsdp as composable
    import torch.distributed.fsdp._fully_shard as package
    import torch.distributed.fsdp._fully_shard._fully_shard as module

    places = (torch_fsdp, composable, package, module)
    before = [place.fully_shard for place in places]
    assert before == [Stock.fully_shard] * 4
    names = ("get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")
    clipping = [getattr(nn.utils, name) for name in names]
    with fsdp2x.install() as handle:
        ours = torch_fsdp.fully_shard
        assert ours is not Stock.fully_shard and all(place.fully_shard is ours for place in places)
        assert torch_fsdp.register_fsdp_forward_method is module.register_fsdp_forward_method
        assert f"{module.__name__}.fully_shard" in handle.places
        assert "auto_wrap" in inspect.signature(ours).parameters
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert not set(clipping) & {getattr(nn.utils, name) for name in names}
    assert [getattr(nn.utils, name) for name in names] == clipping
    assert [place.fully_shard for place in places] == before
    assert torch_fsdp.register_fsdp_forward_method.__module__ == "torch.distributed.fsdp"


def test_classes_stay_upstreams_own():
    names = ("FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy")
    before = [getattr(torch_fsdp, name) for name in names]
    with fsdp2x.install():
        assert [getattr(torch_fsdp, name) for name in names] == before
    assert issubclass(fsdp2x.FSDPModule, torch_fsdp.FSDPModule)
    assert issubclass(fsdp2x.UnshardHandle, torch_fsdp.UnshardHandle)


def test_names_imported_before_and_after_under_any_name():
    early = _module("early_framework", shard_it=Stock.fully_shard, unrelated=Stock.fully_shard.state)
    lazy = type("Lazy", (types.ModuleType,), {"__getattr__": lambda self, name: pytest.fail(f"loaded {name}")})
    sys.modules["lazy_framework"] = lazy("lazy_framework")
    try:
        with fsdp2x.install():
            late = _module("late_framework", fully_shard=torch_fsdp.fully_shard)
            assert early.shard_it is torch_fsdp.fully_shard is late.fully_shard
            assert early.unrelated == Stock.fully_shard.state
        assert early.shard_it is Stock.fully_shard is late.fully_shard
    finally:
        for name in ("early_framework", "late_framework", "lazy_framework"):
            sys.modules.pop(name, None)


def test_install_is_idempotent_and_logs_once(caplog):
    caplog.set_level(logging.INFO, logger="fsdp2x")
    first, second = fsdp2x.install(), fsdp2x.install()
    assert first is second and first.active
    (record,) = caplog.records
    assert record.getMessage().startswith("fsdp2x: installed in ")
    first.uninstall()
    first.uninstall()
    assert not first.active and torch_fsdp.fully_shard is Stock.fully_shard
    again = fsdp2x.install()
    assert again is not first and again.active
    first.uninstall()
    assert again.active and torch_fsdp.fully_shard is not Stock.fully_shard, (
        "an old handle must not end a later installation"
    )


@distributed(world_sizes=(2,))
def test_installed_name_shards_with_our_engine(ctx):
    with fsdp2x.install():
        model = Stack()
        for name in STACK_UNITS:
            torch_fsdp.fully_shard(model.get_submodule(name))
        torch_fsdp.fully_shard(model)
        assert isinstance(model, fsdp2x.FSDPModule) and isinstance(model, torch_fsdp.FSDPModule)
        assert torch_fsdp.fully_shard.state(model) is fsdp2x.fully_shard.state(model) is model._get_fsdp_state()
        with pytest.raises(AssertionError, match="module once"):
            torch_fsdp.fully_shard(model)
    # Sharded models stay ours.
    model(inputs(ctx.rank)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(world_sizes=(2,))
def test_upstream_works_while_installed(ctx):
    """Upstream's function and forward methods look names up in the globals that install() changes."""
    reference = Stack()
    expected = Stock.fully_shard(Stack())(inputs(ctx.rank))
    with fsdp2x.install():
        model = Stock.fully_shard(Stack())
        assert not isinstance(model, fsdp2x.FSDPModule)
        assert torch_fsdp.fully_shard.state(model) is Stock.fully_shard.state(model) is model._get_fsdp_state()
        assert fsdp2x.fully_shard.state(model) is None
        assert torch.equal(model(inputs(ctx.rank)), expected)
        assert torch.equal(reference(inputs(ctx.rank)), expected)
        handle = model.unshard(async_op=True)
        assert isinstance(handle, torch_fsdp.UnshardHandle)
        handle.wait()


class _WithEncode(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def encode(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.encode(x)


@distributed(world_sizes=(2,))
def test_forward_methods_of_both_kinds(ctx):
    torch.manual_seed(0)
    plain = _WithEncode()
    x = inputs(ctx.rank)
    with fsdp2x.install():
        for fully_shard in (Stock.fully_shard, torch_fsdp.fully_shard):
            torch.manual_seed(0)
            model = fully_shard(_WithEncode())
            torch_fsdp.register_fsdp_forward_method(model, "encode")
            assert torch.equal(model.encode(x), plain.encode(x))
        torch_fsdp.register_fsdp_forward_method(plain, "encode")


def num_units(model) -> int:
    return sum(isinstance(module, fsdp2x.FSDPModule) for module in model.modules())


@distributed(world_sizes=(1,))
def test_auto_wrap_splits_what_is_sharded_by_one_call_for_the_root(ctx):
    """Parts, other modules and models with sharded parts are left to the caller; so is everything by default."""
    with fsdp2x.install():
        assert num_units(torch_fsdp.fully_shard(build("llama"))) == 1
    with fsdp2x.install(auto_wrap=True) as handle:
        assert fsdp2x.install(auto_wrap=True) is handle
        assert num_units(torch_fsdp.fully_shard(build("llama"))) > 2
        assert num_units(torch_fsdp.fully_shard(build("llama"), auto_wrap=False)) == 1
        assert num_units(torch_fsdp.fully_shard(Stack())) == 1
        model = build("llama")
        torch_fsdp.fully_shard(model.model.layers[0])
        assert num_units(torch_fsdp.fully_shard(model)) == 2
        with pytest.raises(ValueError, match=r"installed with auto_wrap=True.*fsdp2x\.uninstall\(\)"):
            fsdp2x.install()
    with fsdp2x.install():
        assert num_units(torch_fsdp.fully_shard(build("llama"))) == 1


@distributed(world_sizes=(2,))
def test_trl_generates_with_gathered_weights(ctx):
    """Ranks then generate different numbers of tokens. Its setting for models that do not fit keeps them sharded."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    before = trainer.unwrap_model_for_generation
    state = types.SimpleNamespace(deepspeed_plugin=None)
    accelerator = types.SimpleNamespace(unwrap_model=lambda model: model, state=state)
    with fsdp2x.install():
        assert trainer.unwrap_model_for_generation is not before
        model = build("qwen3")
        for layer in model.model.layers:
            torch_fsdp.fully_shard(layer)
        model = torch_fsdp.fully_shard(model).eval()
        ids = torch.arange(3, 8)[None]
        tokens = {"max_new_tokens": 2 + 4 * ctx.rank, "do_sample": False, "eos_token_id": None}
        with trainer.unwrap_model_for_generation(model, accelerator) as unwrapped, torch.no_grad():
            assert {unit.param_state for unit in fsdp2x.describe(model).units} == {"UNSHARDED"}
            assert unwrapped.generate(ids, **tokens).shape[1] == 7 + 4 * ctx.rank
        with trainer.unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=False) as unwrapped:
            assert {unit.param_state for unit in fsdp2x.describe(model).units} == {"SHARDED"}
            assert unwrapped._is_fsdp_managed_module, "so ranks run equal numbers of forwards"
    assert trainer.unwrap_model_for_generation is before


@distributed(world_sizes=(1,))
def test_a_trl_that_comes_later_is_followed(ctx):
    name = "trl.models.utils"
    pytest.importorskip(name)
    loaded = sys.modules.pop(name)
    try:
        with fsdp2x.install():
            fresh = importlib.import_module(name)
            followed = fresh.unwrap_model_for_generation
        assert fresh is not loaded and fresh.unwrap_model_for_generation is not followed
    finally:
        sys.modules[name] = sys.modules["trl.models"].utils = loaded
