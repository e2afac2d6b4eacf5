"""examples/integrations: each computes what the package computes without it."""

from environments import same_with_example


def test_accelerate(tmp_path):
    same_with_example("huggingface", "accelerate_fsdp2", tmp_path, without="plain")


def test_torchtitan(tmp_path):
    same_with_example("torchtitan", "torchtitan_trainer", tmp_path, "llama3")


def test_trl(tmp_path):
    same_with_example("trl", "trl_sync_weights", tmp_path, without="plain")


def test_verl(tmp_path):
    same_with_example("verl", "verl_update_weights", tmp_path, without="plain")
