"""bitsandbytes and muon-optimizer: which of their optimizers step sharded parameters, over FSDP2 and over ours."""

import math

import pytest
from environments import same_as_stock

# By kind, in the order of the script: what docs/optimizers-of-others.md says. "local": by `local_optimizer`.
SAID = {
    "bitsandbytes": [*["raises"] * 3, *["local"] * 3, "raises"],
    "muon_optimizer": ["as on stock"] * 2,
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
        assert num == 4 * of_step and all(map(math.isfinite, of_kind))
        assert of_kind[0] > of_kind[3 * of_step], "it trains"
        assert said != "local" or of_kind[9::10] == [0.0] * 4, "and the shards are stepped as plain tensors are"
    assert not values
