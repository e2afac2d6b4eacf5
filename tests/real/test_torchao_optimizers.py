"""torchao: optimizers of few bits, stochastic rounding, and what needs a GPU."""

import math

from environments import same_as_stock


def test_optimizers(tmp_path):
    """Equal to the bit, by kind: how many numbers, and they; a kind that refuses a CPU has one, NaN."""
    found = same_as_stock("torchao", "torchao_optimizers", tmp_path)
    values = [float.fromhex(text) for text in found["shm"][0]["values"]]
    kinds = []
    while values:
        num = int(values[0])
        kinds.append(values[1 : 1 + num])
        values = values[1 + num :]
    *trained, offloaded = kinds
    assert len(trained) == 4 and all(math.isfinite(value) for kind in trained for value in kind)
    assert all(kind[0] > kind[27] for kind in trained), "it trains"
    assert len(offloaded) == 1 and math.isnan(offloaded[0]), "CPUOffloadOptimizer runs on a CPU: compare it, too"
