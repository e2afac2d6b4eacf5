"""Collectives of a user's, in memory of their own, for ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

import torch
import torch.distributed as dist


class UserCollective:
    """``memory`` holds what was allocated last, and ``used`` whether each call got memory of this object."""

    def __init__(self):
        self.memory, self.used = [], []

    def allocate(self, size, *, dtype, device):
        made = torch.empty(*size, dtype=dtype, device=device)
        self.memory = [*self.memory[-1:], made]
        return made

    def note(self, *tensors):
        own = {made.untyped_storage().data_ptr() for made in self.memory}
        self.used.append(all(one.untyped_storage().data_ptr() in own for one in tensors))


class UserGather(UserCollective):
    """``raises``: the gathers do."""

    raises = False

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if self.raises:
            raise RuntimeError("refused")
        self.note(output_tensor, input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class UserScatter(UserCollective):
    """``raises``: the next reduction does."""

    raises = False

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if self.raises:
            self.raises = False
            raise RuntimeError("refused")
        self.note(output_tensor, input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
