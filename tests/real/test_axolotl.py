"""axolotl: its own training with its configuration of FSDP version 2 and its patches of accelerate's."""

import pytest
from environments import ENGINES, results_of, same_as_stock


@pytest.mark.parametrize("what", ["full", "meta", "lora"])
def test_sft(tmp_path, what):
    same_as_stock("axolotl", "axolotl_sft", tmp_path, what)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_tiled_mlp(tmp_path, engine):
    """It runs a backward for each tile inside of one backward; on stock and CPUs that is a segmentation fault."""
    tiled, untiled = (results_of("axolotl", "axolotl_sft", engine, tmp_path, how) for how in ("tiled", "untiled"))
    for ours, expected in zip(tiled, untiled, strict=True):
        assert ours["is_ours"] and expected["is_ours"]
        values = [[float.fromhex(value) for value in rank["values"]] for rank in (ours, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-4)
