"""A few training steps of awkward shapes on one GPU, for compute-sanitizer: `python train_steps.py [cpu]`.

Uneven rows, a parameter of one element, fp32 and bf16, accumulation and both optimizers of fsdp2x.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(67, 131), nn.Linear(131, 67, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    for policy in (MixedPrecisionPolicy(), MIXED):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3))).to(device)
        for block in model:
            fsdp2x.fully_shard(block, mesh=mesh, auto_wrap=False, mp_policy=policy)
        fsdp2x.fully_shard(model, mesh=mesh, auto_wrap=False, mp_policy=policy)
        optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(8, 67, device=device)
        losses = []
        for _ in range(3):
            for _ in range(2):  # the second backward adds to the gradients of the first
                loss = model(x).float().square().mean()
                loss.backward()
            fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not losses[-1] < losses[0]:
            raise SystemExit(f"losses do not fall: {losses}")
    dist.destroy_process_group()
    print("trained")


if __name__ == "__main__":
    main()
