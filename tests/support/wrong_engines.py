"""Engines that the conformance suite must find wrong."""

import os

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def does_nothing(module, **options):
    return module


def dies(module, **options):
    """On the last rank, if the module is a list."""
    if isinstance(module, list) and dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    return fully_shard(module, **options)


def forgets_the_mean(module, **options):
    """Adds up the gradients of all ranks."""
    fully_shard(module, **options)
    if isinstance(module, nn.Module):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return module
