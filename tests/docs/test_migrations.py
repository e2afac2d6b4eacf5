"""The pages of migration: FSDP1's strategies train the same under ours, and the configuration keys are accepted."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2x
from fsdp2x.train import parse_config
from harness import distributed
from models import Mlp, Stack, inputs
from pages import CODE, ROOT, tables
from reference import only_fsdp2x, same

FOLDER = ROOT / "docs" / "migrate"


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
    rows, of = tables((FOLDER / "fsdp1.md").read_text())["strategy | `reshard_after_forward`"], meshes()
    assert {row[0].strip("`") for row in rows} == {strategy.name for strategy in ShardingStrategy}
    for row, reshard, mesh, _ in rows:
        # FSDP1 makes groups of whole hosts for a hybrid strategy unless it gets a mesh.
        where = {"device_mesh": of["2-D"]} if "HYBRID" in row else {}
        stock = FullyShardedDataParallel(
            Stack(),
            sharding_strategy=ShardingStrategy[row.strip("`")],
            auto_wrap_policy=ModuleWrapPolicy({Mlp}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            **where,
        )
        model = fsdp2x.fully_shard(
            Stack(), mesh=of[mesh], reshard_after_forward=eval(reshard.strip("`")), auto_wrap=["Mlp"]
        )
        same(torch.tensor(train(model, ctx)), torch.tensor(train(stock, ctx)), row, rtol=1e-5, atol=1e-7)


SETTINGS = {"model": {"config": {"model_type": "qwen3"}}, "data": {"files": ["text"]}}
KEY = re.compile(r"((?:train|parallel|scaler|optimizer|schedule|logging)\.\w+): (\S+)")
SHOWN = {
    code for page in (ROOT / "docs").rglob("*.md") for code in CODE.findall(page.read_text()) if KEY.fullmatch(code)
}


@pytest.mark.parametrize("code", sorted(SHOWN))
def test_settings_of_the_pages_are_accepted(code):
    """With their values; the names of keys are checked on all pages (test_texts.py)."""
    key, value = KEY.fullmatch(code).groups()
    section, name = key.split(".")
    value = {"true": True}.get(value, int(value) if value.isdigit() else value)
    config = parse_config({**SETTINGS, section: {name: value}})
    assert str(getattr(getattr(config, section), name)).removeprefix("torch.") == str(value).removeprefix("torch.")
