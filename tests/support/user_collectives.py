"""Collectives of a user's, in memory of their own, for ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

import torch
import torch.distributed as dist


class UserCollective:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class UserGather(UserCollective):
    """``raises``: the gathers do."""

    raises = False

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if self.raises:
            raise RuntimeError("refused")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class UserScatter(UserCollective):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
