"""`fsdp2x selftest`: five checks of a sharded model against an unsharded twin, on whatever machine this is."""

from fsdp2x.train.selftest.suite import run_suite, shard_layers

__all__ = ["run_suite", "shard_layers"]
