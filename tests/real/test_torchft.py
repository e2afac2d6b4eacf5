"""torchft: a replica group dies in mid-training and comes back, the other goes on."""

from environments import same_as_stock


def test_killed_replica_group(tmp_path):
    same_as_stock("torchft", "torchft_hsdp", tmp_path, torchrun=False)
