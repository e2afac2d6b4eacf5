"""Packages that drive FSDP2, run untouched: on fsdp2x, over both transports, each computes what it does on FSDP2."""

import math

import pytest
from environments import ENGINES, results_of, same_as_stock, same_with_example

# Package -> its script, and for each run: words of the script, number of ranks. A script that starts its ranks itself
# has None ranks.
RUNS = {
    "axolotl": ("axolotl_sft", ["full", "meta", "lora"]),
    "huggingface": ("accelerate_fsdp2", ["plain", "cpu_ram_efficient", "no_reshard_checkpointing"]),
    "huggingface Trainer": ("trainer_fsdp2", ["all", "lora", "dora"]),
    "huggingface loader": ("transformers_native", ["loop untied", ("loop tied", 4), "trainer tied"]),
    "huggingface state dicts": ("state_dict_helpers", ["full", "dcp"]),
    "lightning": ("lightning_run", ["trainer", "bf16", "meta", "resume", "fabric"]),
    "llamafactory": ("llamafactory_v1_sft", ["meta", "lora"]),
    "ms_swift": ("ms_swift_sft", ["full", "lora"]),
    "nemo_automodel": ("nemo_automodel_recipe", [""]),
    "olmo_core": ("olmo_core_trainer", ["fp32", "bf16"]),
    # Two workers, which fail once and are started again from a checkpoint.
    "ray": ("ray_train", [("", None)]),
    # Annotated plain parameters are sharded, annotated again where modules see them, and reduced.
    "spmd_types": ("spmd_types_units", ["fsdp", ("hsdp", 4)]),
    # A replica group dies during training and comes back, while the other continues.
    "torchft": ("torchft_hsdp", [("", None)]),
    "torchtitan": (
        "torchtitan_trainer",
        [
            "llama3",
            'llama3 parallelism.spmd_backend="full_dtensor"',
            ("llama3 parallelism.data_parallel_replicate_degree=2 parallelism.data_parallel_shard_degree=2", 4),
            ("llama3 parallelism.tensor_parallel_degree=2", 4),
            ("llama3 parallelism.pipeline_parallel_degree=2", 4),
            "llama3 activation_checkpoint=FullAC",
            "deepseek_v3 parallelism.expert_parallel_degree=2",
        ],
    ),
    "trl": (
        "trl_sft",
        [
            *(f"{what} kept" for what in ("all", "lora", "qlora")),
            *(
                f"{what} {how}"
                for what in ("all", "qwen3_moe", "deepseek_v3")
                for how in ("reentrant", "not_reentrant")
            ),
        ],
    ),
    "trl rewards": ("trl_reward", [""]),
    "verl": ("verl_sft", ["fsdp", "lora", "no_reshard", "ulysses"]),
    # Actor and critic in Ray's workers.
    "verl PPO": ("verl_ppo", [("", None)]),
}
CASES = [
    (name.split()[0], script, *(run if isinstance(run, tuple) else (run, 2)))
    for name, (script, runs) in RUNS.items()
    for run in runs
]
IDS = ["-".join(str(part) for part in case if part).replace(" ", "_") for case in CASES]


@pytest.mark.parametrize(("package", "script", "words", "ranks"), CASES, ids=IDS)
def test_computes_what_it_computes_on_fsdp2(tmp_path, package, script, words, ranks):
    same_as_stock(package, script, tmp_path, *words.split(), ranks=ranks or 2, torchrun=ranks is not None)


@pytest.mark.parametrize("scales", ["dynamic", "precomputed"])
def test_torchao_float8_all_gather(tmp_path, scales):
    found = same_as_stock("torchao", "torchao_float8", tmp_path, scales)
    assert len(set(found["shm"][0]["values"])) > 20  # it trains


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_axolotl_tiled_mlp(tmp_path, engine):
    """It runs a backward for each tile inside of one backward; on stock and CPUs that is a segmentation fault."""
    tiled, untiled = (results_of("axolotl", "axolotl_sft", engine, tmp_path, how) for how in ("tiled", "untiled"))
    for ours, expected in zip(tiled, untiled, strict=True):
        assert ours["is_ours"] and expected["is_ours"]
        values = [[float.fromhex(value) for value in rank["values"]] for rank in (ours, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("writer", ["stock", "shm"])
def test_every_engine_resumes_from_torchtitans_checkpoint(tmp_path, writer):
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


# ---- optimizers of others: what docs/works-with.md says, by kind, in the order of the scripts

SAID = {
    "bitsandbytes": [*["raises"] * 3, *["local"] * 3, "raises"],  # "local": by `local_optimizer`
    "muon_optimizer": ["as on stock"] * 2,
    "torchao": [*["as on stock"] * 4, "raises"],
}


@pytest.mark.parametrize("package", SAID)
def test_optimizers(tmp_path, package):
    """Equal to the bit, by kind: how many numbers, and they; a kind that raises has one, NaN."""
    found = same_as_stock(package, "other_optimizers", tmp_path)
    values = [float.fromhex(text) for text in found["shm"][0]["values"]]
    for said in SAID[package]:
        num = int(values[0])
        of_kind, values = values[1 : 1 + num], values[1 + num :]
        if said == "raises":
            assert num == 1 and math.isnan(of_kind[0]), "it runs: compare it"
            continue
        of_step = 9 + (said == "local")  # the loss, eight parameters, how far they are from plain tensors
        assert all(map(math.isfinite, of_kind)) and (package == "torchao" or num == 4 * of_step)
        assert of_kind[0] > of_kind[3 * of_step], "it trains"
        assert said != "local" or of_kind[9::10] == [0.0] * 4, "and the shards are stepped as plain tensors are"
    assert not values


# ---- examples/integrations: each computes what the package computes without it


@pytest.mark.parametrize(
    ("package", "script", "words", "without"),
    [
        ("huggingface", "accelerate_fsdp2", [], "plain"),
        ("torchtitan", "torchtitan_trainer", ["llama3"], None),
        ("trl", "trl_sync_weights", [], "plain"),
        ("verl", "verl_update_weights", [], "plain"),
    ],
)
def test_integrations(tmp_path, package, script, words, without):
    same_with_example(package, script, tmp_path, *words, without=without)
