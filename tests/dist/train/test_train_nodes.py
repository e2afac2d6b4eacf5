"""Two torchrun agents as two nodes: ranks, devices and the hybrid mesh follow LOCAL_RANK and LOCAL_WORLD_SIZE."""

import os

import pytest
import yaml

from agents import run_agents
from training import settings, write_text

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts torchrun itself"),
]


def test_a_hybrid_mesh_shards_inside_nodes_and_copies_across(tmp_path):
    from fsdp2x.train.metrics import read_metrics

    config = settings(write_text(tmp_path / "text"), tmp_path / "run", parallel={"strategy": "HYBRID_SHARD"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run_agents(tmp_path, "-m", "fsdp2x.train", tmp_path / "config.yaml", "train.steps=3")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["strategy"].startswith("HYBRID_SHARD: mesh (2, 2) [ddp, fsdp], 2 copies of 2 shards")
    assert lines[0]["world_size"] == 4 and len({line["step"] for line in lines if line["event"] == "train"}) == 3
