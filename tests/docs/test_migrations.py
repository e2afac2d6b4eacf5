"""Every row of the pages of migration, tried: what stands on our side runs, and does what theirs did.

Rows are read from the pages, so that a new one is tried, too, or fails here until it has a trial.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2x
from fsdp2x.train import parse_config
from harness import distributed
from models import Mlp, Stack, inputs
from pages import ROOT, code_in, tables
from reference import full, only_fsdp2x, same
from training import shared_folder

FOLDER = ROOT / "docs" / "migrate"


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """``pages.tables`` of a page of migration, where no row may be there twice."""
    found = tables((FOLDER / f"{page}.md").read_text())
    for rows in found.values():
        firsts = [row[0] for row in rows if row[0] != "–"]
        assert len(firsts) == len(set(firsts)), f"{page}: a row is there twice: {firsts}"
    return found


# ---- FSDP1: each argument on their side and on ours; what they train is the same


def train(model: nn.Module, ctx) -> list[float]:
    """Losses of three steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        loss = model(inputs(ctx.rank, step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def theirs(model: nn.Module, **options) -> nn.Module:
    defaults = {
        "auto_wrap_policy": ModuleWrapPolicy({Mlp}),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    return FullyShardedDataParallel(model, **{**defaults, **options})


def ours(model: nn.Module, **options) -> nn.Module:
    return fsdp2x.fully_shard(model, **{"auto_wrap": ["Mlp"], **options})


def meshes() -> dict:
    """The page's words for meshes."""
    world = dist.get_world_size()
    return {
        "1-D": init_device_mesh("cpu", (world,)),
        "2-D": init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")),
        "2-D, a shard axis of one rank": init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard")),
    }


@distributed(world_sizes=(4,))
def test_strategies_of_fsdp1_train_the_same(ctx):
    only_fsdp2x(ctx)
    rows, of = tables_of("fsdp1")["strategy | `reshard_after_forward`"], meshes()
    assert code_in(row[0] for row in rows) == {strategy.name for strategy in ShardingStrategy}
    for row, reshard, mesh, _ in rows:
        strategy = ShardingStrategy[row.strip("`")]
        # Of the groups that theirs makes for a hybrid strategy each is a whole host.
        where = {"device_mesh": of["2-D"]} if "HYBRID" in row else {}
        expected = train(theirs(Stack(), sharding_strategy=strategy, **where), ctx)
        found = train(ours(Stack(), mesh=of[mesh], reshard_after_forward=eval(reshard.strip("`"))), ctx)
        same(torch.tensor(found), torch.tensor(expected), row, rtol=1e-5, atol=1e-7)


def on_meta() -> Stack:
    with torch.device("meta"):
        return Stack()


def materialized(model: nn.Module) -> nn.Module:
    """Ours of a model that was sharded on the meta device: room for the shards, then the values of a twin."""
    values = Stack().state_dict()
    model.to_empty(device="cpu")
    with torch.no_grad(), fsdp2x.unsharded(model):
        for name, param in model.named_parameters():
            param.copy_(values[name])
    return model


def constant(module: nn.Module) -> None:
    """What FSDP1 calls for each module whose parameters are on the meta device."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.fill_(0.25)


def filled() -> nn.Module:
    model = ours(on_meta())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.25)
    return model


def with_buffer() -> Stack:
    model = Stack()
    model.register_buffer("scale", torch.full((3,), 1.0 + 2**-12))
    return model


def arguments_of_fsdp1(ctx) -> dict:
    """Argument of theirs -> a model of theirs and one of ours; both are made when they are trained."""
    mesh, group = init_device_mesh("cpu", (ctx.world,)), dist.new_group(list(range(ctx.world)))
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def ignoring(option):
        model, twin = Stack(), Stack()
        for module in (model, twin):
            module.head.requires_grad_(False)  # what is ignored is not reduced either
        ignored = [model.head] if option == "ignored_modules" else list(model.head.parameters())
        return theirs(model, **{option: ignored}), ours(twin, ignored_params=set(twin.head.parameters()))

    def prefetching():
        model = ours(Stack())
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        return model

    return {
        "module": lambda: (theirs(Stack()), ours(Stack())),
        "process_group": lambda: (theirs(Stack(), process_group=group), ours(Stack(), mesh=mesh)),
        "device_mesh": lambda: (theirs(Stack(), device_mesh=mesh), ours(Stack(), mesh=mesh)),
        "sharding_strategy": lambda: (
            theirs(Stack(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
            ours(Stack(), reshard_after_forward=False),
        ),
        "cpu_offload": lambda: (
            theirs(Stack()),  # its offload pins memory, which needs a device
            ours(Stack(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        ),
        "auto_wrap_policy": lambda: (
            theirs(Stack(), auto_wrap_policy=ModuleWrapPolicy({Mlp})),
            ours(Stack(), auto_wrap=lambda name, module: isinstance(module, Mlp)),
        ),
        "backward_prefetch": lambda: (theirs(Stack(), backward_prefetch=BackwardPrefetch.BACKWARD_POST), prefetching()),
        "forward_prefetch": lambda: (theirs(Stack(), forward_prefetch=True), prefetching()),
        "mixed_precision": lambda: (
            theirs(Stack(), mixed_precision=MixedPrecision(**bf16, keep_low_precision_grads=False)),
            ours(Stack(), mp_policy=MixedPrecisionPolicy(**bf16)),
        ),
        "mixed_precision.buffer_dtype": lambda: (
            theirs(with_buffer(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)),
            ours(with_buffer(), buffer_dtype=torch.bfloat16),
        ),
        "ignored_modules": lambda: ignoring("ignored_modules"),
        "ignored_states": lambda: ignoring("ignored_states"),
        "param_init_fn": lambda: (theirs(on_meta(), param_init_fn=constant), filled()),
        "device_id": lambda: (theirs(Stack(), device_id=torch.device("cpu")), ours(Stack(), mesh=mesh)),
        # Theirs broadcasts on a device alone.
        "sync_module_states": lambda: (theirs(Stack()), ours(Stack(seed=0))),
        "limit_all_gathers": lambda: (theirs(Stack(), limit_all_gathers=False), ours(Stack())),
        "use_orig_params": lambda: (theirs(Stack(), use_orig_params=False), ours(Stack())),
    }


@distributed(world_sizes=(2,))
def test_arguments_of_fsdp1_have_ours(ctx):
    only_fsdp2x(ctx)
    trials = arguments_of_fsdp1(ctx)
    assert set(trials) == code_in(row[0] for row in tables_of("fsdp1")["theirs | ours"])
    for name, make in trials.items():
        one, other = make()
        exact = {} if "mixed" in name else {"rtol": 1e-5, "atol": 1e-7}
        same(torch.tensor(train(other, ctx)), torch.tensor(train(one, ctx)), name, **exact or {"rtol": 0.02, "atol": 0})
        if "buffer" in name:
            same(other.scale, one.module.scale, name)  # theirs is cast by the first forward
        assert list(other.state_dict()) == list((with_buffer if "buffer" in name else Stack)().state_dict()), name


@distributed(world_sizes=(2,))
def test_calls_of_fsdp1_have_ours(ctx):
    only_fsdp2x(ctx)
    rows = tables_of("fsdp1")["was | is"]
    one, model = theirs(Stack()), ours(Stack())
    # Of one tensor a parameter: of Adam's two, theirs returns the second one twice on a CPU.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (one, model)]

    def backward(each, number):
        each(inputs(ctx.rank, number)).square().mean().backward()

    tried = {}
    with one.no_sync():
        backward(one, 0)
    backward(one, 1)
    for number, last in ((0, False), (1, True)):
        with fsdp2x.accumulate(model, last=last):
            backward(model, number)
    tried["no_sync"] = one.clip_grad_norm_(0.01), full(fsdp2x.clip_grad_norm_(model.parameters(), 0.01))
    tried["clip_grad_norm_"] = tried["no_sync"]
    for optimizer in optimizers:
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(one):
        values = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in one.module.named_parameters()}
    with fsdp2x.unsharded(model), torch.no_grad():
        tried["summon_full_params"] = values, {name: param.clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.zero_()  # dropped
    same(dict(fsdp2x.full_tensors(model)), values, "full_tensors", rtol=1e-5, atol=1e-6)
    with FullyShardedDataParallel.state_dict_type(one, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        whole = one.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(one, optimizers[0])["state"]
    with shared_folder(ctx) as folder:
        fsdp2x.checkpoint.save(folder / "full", model, step=1, form="full")
        twin = ours(Stack(seed=1))
        fsdp2x.checkpoint.load(folder / "full", twin)
    tried["state_dict_type"] = whole, full(twin.state_dict())
    state = full(optimizers[1].state_dict())["state"]
    by_name = {name: state[number] for number, (name, _) in enumerate(model.named_parameters())}
    tried["optim_state_dict"] = tuple(
        {name: of[name]["momentum_buffer"] for name in by_name} for of in (states, by_name)
    )
    assert set(tried) == {re.findall(r"\.(\w+)\(", row[0])[0] for row in rows}
    for name, (expected, found) in tried.items():
        same(found, expected, name, rtol=1e-5, atol=1e-6)


# ---- what stands in the cells of our side: code runs, keys of a YAML are accepted

SETTINGS = {"model": {"config": {"model_type": "qwen3"}}, "data": {"files": ["text"]}}
KEY = re.compile(r"((?:train|parallel|scaler|optimizer|schedule|logging)\.\w+)(?:: (\S+))?")
# Of keys that the pages name without a value.
VALUES = {
    "train.batch_size": 2,
    "train.global_batch_size": 8,
    "train.accumulation": 2,
    "train.clip": 1.0,
    "train.activation_checkpointing": True,
    "scaler.init_scale": 1024.0,
    "parallel.reduce_dtype": "float32",
    "parallel.sequence_parallel": 2,
    "parallel.fsdp_size": 2,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "schedule.kind": "linear",
    "logging.profile_start": 3,
}


def codes(heads: dict[str, tuple[str, ...]]) -> set[str]:
    """What stands in backticks in the columns of our side."""
    found = set()
    for page, columns in heads.items():
        for head, rows in tables_of(page).items():
            if head.split(" | ")[1] in columns:
                found |= code_in(cell for row in rows for cell in row[1:])
    return found


OUR_COLUMNS = {
    "accelerate": ("ours", "what becomes of it"),
    "deepspeed": ("is", "in a program"),
    "fsdp1": ("ours", "is"),
    "fsdp2": ("ours", "may become", "what you write"),
}


@pytest.mark.parametrize("code", sorted(code for code in codes(OUR_COLUMNS) if KEY.fullmatch(code)))
def test_keys_of_the_pages_are_accepted(code):
    key, value = KEY.fullmatch(code).groups()
    section, name = key.split(".")
    value = VALUES[key] if value is None else {"true": True}.get(value, value)
    config = parse_config({**SETTINGS, section: {name: value}})
    got = getattr(getattr(config, section), name)
    assert str(got).removeprefix("torch.") == str(value).removeprefix("torch.")


def trials(folder) -> dict:
    """Code of a page -> what runs it, on a model that is sharded and has gradients."""
    from transformers import AutoModelForCausalLM

    import training

    if dist.get_rank() == 0:
        training.write_model(folder / "hf", tokenizer=False)
    dist.barrier()
    model = ours(Stack())
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
    x = inputs(dist.get_rank())

    def backward(of=model):
        loss = of(x).square().mean()
        loss.backward()
        return loss

    def under(context):
        with context:
            return backward()

    def loaded(**options):
        return fsdp2x.from_pretrained(folder / "hf", **options)

    def saved(form="sharded"):
        fsdp2x.checkpoint.save(folder / form, model, optimizer, step=1, form=form)
        return fsdp2x.checkpoint.load(folder / form, model, optimizer)

    def written():
        fsdp2x.save_hf(loaded(), folder / "out", dtype=torch.bfloat16)
        dist.barrier()
        assert AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto").dtype == torch.bfloat16

    def on_wire(**options):
        found = fsdp2x.fully_shard(Stack(), auto_wrap=["Mlp"], transport="process_group")
        found.set_wire_dtype(**options)
        return backward(found)

    def gathered():
        with fsdp2x.unsharded(model):
            assert all(type(param.data) is torch.Tensor for param in model.parameters())

    def profiled():
        with fsdp2x.profile(folder / "profile"):
            backward()
        assert list((folder / "profile").iterdir())

    def scaled():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    def exported():
        found = [name for bucket in fsdp2x.export.stream(model) for name, _ in bucket.items()]
        assert found == [name for name, _ in model.named_parameters()]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "fsdp2x.accumulate": lambda: under(fsdp2x.accumulate(model, last=True)),
        "fsdp2x.accumulate(model, last=...)": lambda: under(fsdp2x.accumulate(model, last=False)),
        "fsdp2x.checkpoint.save": saved,
        "fsdp2x.checkpoint.load": saved,
        'fsdp2x.checkpoint.save(..., form="full")': lambda: saved("full"),
        "fsdp2x.clip_grad_norm_": lambda: fsdp2x.clip_grad_norm_(model.parameters(), 1.0),
        "fsdp2x.clip_grad_norm_(model.parameters(), 1.0)": lambda: fsdp2x.clip_grad_norm_(model.parameters(), 1.0),
        "fsdp2x.export.stream": exported,
        "fsdp2x.from_pretrained": loaded,
        "fsdp2x.from_pretrained(folder)": loaded,
        'mode="broadcast"': lambda: loaded(mode="broadcast"),
        "fsdp2x.full_tensors(model)": lambda: dict(fsdp2x.full_tensors(model)),
        "fsdp2x.fully_shard(model)": lambda: fsdp2x.fully_shard(Stack()),
        "fully_shard(model)": lambda: fsdp2x.fully_shard(Stack()),
        "fully_shard(model, reshard_after_forward=False)": lambda: backward(
            fsdp2x.fully_shard(Stack(), reshard_after_forward=False)
        ),
        "fsdp2x.CPUOffloadPolicy": lambda: backward(ours(Stack(), offload_policy=fsdp2x.CPUOffloadPolicy(False))),
        "offload_policy=CPUOffloadPolicy()": lambda: fsdp2x.CPUOffloadPolicy(),
        "fsdp2x.HostOffloadPolicy": lambda: fsdp2x.HostOffloadPolicy(),
        'fsdp2x.HostOffloadPolicy("all")': lambda: fsdp2x.HostOffloadPolicy("all"),
        'fsdp2x.HostOffloadPolicy("gradients")': lambda: fsdp2x.HostOffloadPolicy("gradients"),
        '"optimizer"': lambda: fsdp2x.HostOffloadPolicy("optimizer"),
        "fsdp2x.optim.AdamW": optimizer.step,
        "fsdp2x.optim.AdamW(..., max_grad_norm=...)": optimizer.step,
        "max_grad_norm": optimizer.step,
        "fsdp2x.profile": profiled,
        "fsdp2x.save_hf(model, folder, dtype=torch.bfloat16)": written,
        "fsdp2x.sequence.apply_ulysses": lambda: fsdp2x.sequence.apply_ulysses(
            loaded(), init_device_mesh("cpu", (dist.get_world_size(),))
        ),
        "fsdp2x.unsharded(model)": gathered,
        "loss.backward()": backward,
        'model.set_wire_dtype(weights="int8")': lambda: on_wire(weights="int8"),
        'model.set_wire_dtype(gradients="int8")': lambda: on_wire(gradients="int8"),
        "MixedPrecisionPolicy": lambda: backward(ours(Stack(), mp_policy=policy)),
        "optimizer.state_dict()": optimizer.state_dict,
        "optimizer.step()": optimizer.step,
        "optimizer.zero_grad()": optimizer.zero_grad,
        "torch.amp.GradScaler": scaled,
        "set_modules_to_forward_prefetch": lambda: model.set_modules_to_forward_prefetch([model.blocks[0]]),
        "to_empty": filled,
        "fsdp2x.install()": lambda: (fsdp2x.install(), fsdp2x.uninstall()),
        "fsdp2x.sync_module_states(model)": lambda: fsdp2x.sync_module_states(fsdp2x.fully_shard(nn.Linear(4, 4))),
    }


# Arguments of `fully_shard`, of which each is a row above or compared with upstream's, and what is no code of ours.
WORDS = set("module mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params".split())
WORDS |= set("dp_mesh_dims auto_wrap buffer_dtype transport timeout check_ranks None".split())
WORDS |= {"auto_wrap=False", "NO_WRAP", "--auto-wrap"}
WORDS |= {'"shm"', '"process_group"', '"auto"', "model.module", "MixedPrecision(param_dtype, reduce_dtype)", "false"}
WORDS |= {"--nproc_per_node", "--nnodes", "FULL_SHARD", "SHARD_GRAD_OP", "fsdp_reshard_after_forward: true"}
# Commands, which other tests run.
WORDS |= {"fsdp2x export CHECKPOINT FOLDER", "torchrun -m fsdp2x.run train.py", "torchrun train.py"}
WORDS |= {"from fsdp2x import fully_shard", "from torch.distributed.fsdp import fully_shard"}


@distributed(world_sizes=(2,))
def test_code_of_the_pages_runs(ctx):
    only_fsdp2x(ctx)
    with shared_folder(ctx) as folder:
        tried = trials(folder)
        named = {code for code in codes(OUR_COLUMNS) if not KEY.fullmatch(code)}
        assert named - WORDS - set(tried) == set(), "without a trial"
        assert set(tried) - named == set(), "no longer on a page"
        for code, trial in tried.items():
            try:
                trial()
            except Exception as error:
                raise AssertionError(f"{code}: {error}") from error
