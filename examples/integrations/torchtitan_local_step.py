"""torchtitan: its optimizers step over local shards, to the same bits, without DTensor's dispatch for every parameter.

trainer = config.build()
step_locally(trainer)
trainer.train()
"""

import fsdp2x


def step_locally(trainer) -> None:
    for optimizer in trainer.optimizers:
        fsdp2x.local_optimizer(optimizer)
