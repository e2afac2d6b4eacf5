"""What people get wrong at first, at `fully_shard` and before any of a run's text is read: one sentence, at once."""

import argparse
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2x
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.cli import main, make_parser
from fsdp2x.train import ConfigError, Trainer, parse_config
from harness import distributed, programs
from models import Stack, inputs
from reference import only_fsdp2x
from training import MODEL, Said, settings, shared_folder, write_model

SCRIPT = "import torch, fsdp2x; fsdp2x.fully_shard(torch.nn.Linear(4, 4))"
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_script_that_torchrun_did_not_start(given):
    done = programs.run("-c", SCRIPT, env=programs.environment(**dict.fromkeys(LAUNCHER[:given], "0")))
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and said.startswith("RuntimeError: fully_shard: there is no process group"), done.stderr
    assert f"({', '.join(LAUNCHER[given:])} not set)" in said and "torchrun --nproc_per_node=N" in said


# ---- other engines' modules


def _stock(module):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)


def _fsdp1(module):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _ddp(module):
    return nn.parallel.DistributedDataParallel(module)


OTHERS = {"FSDPModule": _stock, "FullyShardedDataParallel": _fsdp1, "DistributedDataParallel": _ddp}
PLACES = ("blocks.0", "norm", "")


def _replaced(model: nn.Module, place: str, wrap) -> nn.Module:
    if not place:
        return wrap(model)
    outer, _, name = place.rpartition(".")
    setattr(model.get_submodule(outer), name, wrap(model.get_submodule(place)))
    return model


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("place", PLACES)
def test_parts_that_others_shard(ctx, kind, place):
    """Wherever such a part is, and however the model would be split, nothing of the model is touched."""
    only_fsdp2x(ctx)
    for options in ({}, {"auto_wrap": True}, {"auto_wrap": False}, {"auto_wrap": ["Block"]}):
        model = _replaced(Stack(), place, OTHERS[kind])
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match=f"{re.escape(place) or 'itself'}, which .*{kind} shards or replicates"):
            fsdp2x.fully_shard(model, **options)
        assert {name: type(module) for name, module in model.named_modules()} == before


# ---- meshes


@distributed(world_sizes=(2,))
def test_a_mesh_without_this_rank(ctx):
    """Named on the ranks that it lacks, before anything of the model is touched; the others go on."""
    only_fsdp2x(ctx)
    mesh, model = DeviceMesh("cpu", [0]), Stack()
    if ctx.rank == 0:
        fsdp2x.fully_shard(model, mesh=mesh)(inputs(0)).sum().backward()
        return
    said = "rank 1 is not in the mesh, whose ranks are 0; call fully_shard on ranks of the mesh alone"
    for options in ({}, {"auto_wrap": True}):
        with pytest.raises(ValueError, match=said):
            fsdp2x.fully_shard(model, mesh=mesh, **options)
    assert type(model) is Stack


# ---- which modules become units


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("nothing", [[], (), set(), frozenset()])
def test_no_class_to_wrap(ctx, nothing):
    only_fsdp2x(ctx)
    with pytest.raises(ValueError, match=r"names no class.* auto_wrap=False"):
        fsdp2x.fully_shard(Stack(), auto_wrap=nothing)


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("auto_wrap", [None, True, False])
@pytest.mark.parametrize("kind", [list, set, tuple])
def test_a_plain_model_that_names_its_blocks(ctx, auto_wrap, kind):
    """Split when it is asked for; else one unit, and a word about it unless it is what was said."""
    only_fsdp2x(ctx)
    model = Stack(num=3)
    model._no_split_modules = kind([type(model.blocks[0]).__name__])
    with Said() as said:
        fsdp2x.fully_shard(model, auto_wrap=auto_wrap)
    assert len(fsdp2x.describe(model).units) == (4 if auto_wrap else 1)
    assert bool(said) == (auto_wrap is None) and all("auto_wrap=True makes units" in one for one in said)


@distributed(world_sizes=(1,))
def test_the_hint_for_pinned_memory_is_the_policy_that_was_given(ctx):
    only_fsdp2x(ctx)
    if torch.accelerator.is_available():
        pytest.skip("memory is pinned where there is an accelerator")
    policies = [fsdp2x.CPUOffloadPolicy(), *(fsdp2x.HostOffloadPolicy(mode=mode) for mode in ("gradients", "all"))]
    for policy in policies:
        with pytest.raises(RuntimeError, match="use .*") as error:
            fsdp2x.fully_shard(Stack(), offload_policy=policy)
        advised = eval(str(error.value).rpartition("use ")[2], vars(fsdp2x))
        assert type(advised) is type(policy) and not advised.pin_memory
        assert getattr(advised, "mode", None) == getattr(policy, "mode", None)
        fsdp2x.fully_shard(Stack(), offload_policy=advised)


# ---- before text is read


EARLY = {
    "model.config.model_type": ({"model": {"config": {**MODEL, "model_type": "qwen33"}}}, "qwen33"),
    "model.config.hidden_size": ({"model": {"config": {**MODEL, "hidden_size": "wide"}}}, "model.config"),
    "model.config.hidden": ({"model": {"config": {**MODEL, "hidden": 3}}}, "model.config.hidden"),
    "model.attn_implementation": ({"model": {"attn_implementation": "none such"}}, "none such"),
    "model.path": ({"model": {"config": None, "path": "FOLDER/missing"}}, "model.path"),
    "weights": ({"model": {"config": None, "path": "FOLDER/bare"}}, r"bare has no \*\.safetensors"),
    "data.tokenizer": ({"data": {"tokenizer": "FOLDER/missing"}}, "data.tokenizer"),
    "checkpoint.resume_from": ({"checkpoint": {"resume_from": "FOLDER/missing"}}, "missing: no such checkpoint"),
    "resume from no checkpoint": ({"checkpoint": {"resume_from": "FOLDER/bare"}}, "neither a checkpoint"),
    "logging.output": ({"logging": {"output": "/dev/null/x"}}, "/dev/null"),
    "checkpoint.folder": ({"checkpoint": {"folder": "/dev/null/x"}}, "/dev/null"),
    "logging.tensorboard_dir": ({"logging": {"tensorboard": True, "tensorboard_dir": "/dev/null/x"}}, "/dev/null"),
    "parallel.device": ({"parallel": {"device": "cuda"}}, "no GPU"),
}


def _in(value, folder):
    if isinstance(value, dict):
        return {name: _in(inner, folder) for name, inner in value.items()}
    return value.replace("FOLDER", str(folder)) if isinstance(value, str) else value


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("name", EARLY)
@pytest.mark.each_value
def test_bad_settings_are_found_before_any_text_is_read(ctx, name):
    only_fsdp2x(ctx)
    if name == "parallel.device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    changes, said = EARLY[name]
    from fsdp2x.train import trainer

    def read(*args, **options):
        raise AssertionError("text was read")

    with shared_folder(ctx) as folder, pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            write_model(folder / "bare")
            (folder / "bare/model.safetensors").unlink()
        dist.barrier()
        patch.setattr(trainer, "read_blocks", read)
        config = settings(folder / "text", folder / "run", **_in(changes, folder))
        if name == "parallel.device":
            dist.barrier()
        with pytest.raises((ConfigError, CheckpointError), match=said) as error:
            Trainer(parse_config(config))
        assert "\n" not in str(error.value)


# ---- commands


def _parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


def test_help_names_each_option_once():
    for parser in _parsers(make_parser()):
        for action in parser._actions:
            assert len(set(action.option_strings)) == len(action.option_strings), (parser.prog, action.option_strings)
        parser.format_help()


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and re.fullmatch(r"fsdp2x \d+\.\d+\S*\n", capsys.readouterr().out)
