"""A vision tower beside a language model, and LoRA in the weights of its base, in both servers, bit for bit."""

import pytest
import torch
from test_sync_adapters import make_model, merged
from test_sync_sglang import engines
from test_sync_vllm import engine

import fsdp2x
from engines import wire
from harness import distributed
from models import tiny_vlm
from reference import same


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["vlm", "lora"])
@distributed(world_sizes=(2,))
def test_what_is_pushed_is_what_runs(ctx, name, server):
    if name == "vlm":
        model, options = fsdp2x.fully_shard(tiny_vlm()), {}
        expected = {key: value.bfloat16() for key, value in wire(model).items()}
    else:
        twin, options = make_model("plain"), {"merge_adapters": True}
        expected = merged(twin, torch.bfloat16)
        model = fsdp2x.fully_shard(twin)
    shapes = {key: value.shape for key, value in expected.items()}
    options |= {"dtype": torch.bfloat16, "bucket_bytes": 3000}
    served = engine(ctx, "server", shapes=shapes) if server == "vllm" else engines(ctx, shapes, num_workers=2)
    with served as (target, held), fsdp2x.sync.connect(model, target, **options) as sync:
        for version in range(2):
            sync.push(version=version)
            if server == "vllm" and held is not None:  # it runs in float32
                found = held.workers[0].model.values()
                same(dict(sorted(found.items())), {key: expected[key].float() for key in sorted(expected)})
            for weights in held[0].weights if server == "sglang" and held else ():
                same(dict(sorted(weights.items())), dict(sorted(expected.items())))
