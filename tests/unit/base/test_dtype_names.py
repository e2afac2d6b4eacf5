"""A dtype goes by its names wherever the public interface takes one."""

import importlib
import inspect
import typing

import pytest
import torch

import fsdp2x
from fsdp2x.base.arguments import checked
from harness import distributed
from models import Stack, build
from reference import same

MODULES = ("", ".checkpoint", ".convert", ".export", ".memory", ".moe", ".optim", ".rl", ".rollout", ".sequence",
           ".sync", ".train")  # fmt: skip


def takers():
    """Public functions and methods with an argument that may be a dtype, by name."""
    found = {}
    for module in (importlib.import_module(f"fsdp2x{name}") for name in MODULES):
        for name in getattr(module, "__all__", vars(module)):
            public = getattr(module, name)
            methods = vars(public).items() if isinstance(public, type) and public.__module__[:6] == "fsdp2x" else ()
            for key, function in ((name, public), *((f"{name}.{key}", method) for key, method in methods)):
                if inspect.isfunction(function) and (key[0] != "_") and "._" not in key.replace("__init__", ""):
                    hints = typing.get_type_hints(inspect.unwrap(function))
                    if any("torch.dtype" in str(hint) and "return" != one for one, hint in hints.items()):
                        found[key] = function
    return found


def test_whatever_takes_a_dtype_is_checked():
    assert len(found := takers()) > 10
    assert [name for name, function in found.items() if not hasattr(function, "__wrapped__")] == []


@checked
def example(dtype: torch.dtype | str | None, other: int = 0, *, keep: typing.Any = None, late: torch.dtype = None):
    return dtype, late


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_every_name_by_place_and_keyword(name):
    assert example(name, 3, late=name) == (torch.bfloat16, torch.bfloat16) == example(late=name, dtype=name)
    assert example("int8") == ("int8", None)  # of moments, which is no dtype of torch
    with pytest.raises(TypeError, match="late must be dtype .*got 'bf17'"):
        example(None, late="bf17")


@distributed(world_sizes=(1,))
def test_names_reach_models_policies_and_optimizers(ctx):
    model = fsdp2x.fully_shard(Stack(), mp_policy=fsdp2x.MixedPrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32"))
    other = fsdp2x.fully_shard(Stack(), mp_policy=fsdp2x.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    inputs = torch.linspace(0, 1, 8 * Stack().blocks[0].up.in_features).view(8, -1)
    same(model(inputs), other(inputs))
    assert fsdp2x.optim.AdamW(Stack().parameters(), moments_dtype="torch.bfloat16").moments_dtype is torch.bfloat16
    whole = dict(fsdp2x.full_tensors(fsdp2x.fully_shard(build("llama")), dtype="half"))
    assert {value.dtype for value in whole.values()} == {torch.float16}
    with pytest.raises(TypeError, match="MixedPrecisionPolicy: param_dtype must be a dtype"):
        fsdp2x.fully_shard(Stack(), mp_policy=fsdp2x.MixedPrecisionPolicy(param_dtype="b16"))
