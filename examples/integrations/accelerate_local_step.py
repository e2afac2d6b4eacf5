"""accelerate: the optimizer of ``prepare`` steps over local shards, to the same bits, without DTensor's dispatch.

model, optimizer = accelerator.prepare(model, optimizer)
step_locally(optimizer)
"""

import fsdp2x


def step_locally(optimizer) -> None:
    fsdp2x.local_optimizer(optimizer.optimizer)
