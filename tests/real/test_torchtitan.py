"""torchtitan: its Trainer with debug models; the default setting annotates parameters by spmd_types."""

import pytest
from environments import ENGINES, results_of, same_as_stock

SETTINGS = {
    "default": [],
    "full_dtensor": ['parallelism.spmd_backend="full_dtensor"'],
    "hsdp": ["parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2"],
    "tp": ["parallelism.tensor_parallel_degree=2"],
    "pp": ["parallelism.pipeline_parallel_degree=2"],
    "full_checkpointing": ["activation_checkpoint=FullAC"],
}


@pytest.mark.parametrize("how", SETTINGS)
def test_llama3(tmp_path, how):
    ranks = 4 if how in ("hsdp", "tp", "pp") else 2
    same_as_stock("torchtitan", "torchtitan_trainer", tmp_path, "llama3", *SETTINGS[how], ranks=ranks)


def test_experts_on_several_ranks(tmp_path):
    ep = "parallelism.expert_parallel_degree=2"
    same_as_stock("torchtitan", "torchtitan_trainer", tmp_path, "deepseek_v3", ep)


@pytest.mark.parametrize("writer", ["stock", "shm"])
def test_every_engine_resumes_from_the_checkpoint_of(tmp_path, writer):
    def run(engine, name, *settings):
        place = tmp_path / name
        place.mkdir()
        return results_of("torchtitan", "torchtitan_trainer", engine, place, "llama3", *settings)[0]["values"]

    saved = ["checkpoint.enable=true", f'checkpoint.folder="{tmp_path}/saved"', "checkpoint.interval=3"]
    whole = run(writer, "whole", *saved)
    assert len(whole) == 12
    for engine in ENGINES:
        again = run(engine, engine, *saved, "checkpoint.load_step=3", "checkpoint.interval=100")
        assert again == whole[6:], engine
