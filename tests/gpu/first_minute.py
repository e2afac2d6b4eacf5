"""Shows in a first minute on a GPU what torch and fsdp2x can do there, a step, and a trace of it.

On a machine without a GPU, the step runs on the CPU. The trace goes to the folder FSDP2X_OUT.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from fsdp2x.base.native import _C, build_info


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, fsdp2x for {build_info.TORCH_VERSION}, kernels by CUDA {build_info.CUDA}")
    if device == "cuda":
        print(f"{torch.cuda.get_device_name(0)}, NCCL {torch.cuda.nccl.version()}")
        print(f"native handle of a stream: {torch.cuda.Stream().native_handle:#x}")  # every launch takes it
        print(f"our kernels run: {_C.can_run_kernels(torch.device('cuda', 0))}")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
    for layer in model:
        fsdp2x.fully_shard(layer, mesh=init_device_mesh(device, (1,)), auto_wrap=False)
    fsdp2x.fully_shard(model, mesh=init_device_mesh(device, (1,)), auto_wrap=False)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-3)
    x, losses = torch.randn(64, 512, device=device), []

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(3):
        step()
    with torch.profiler.profile() as profiler:
        step()
    profiler.export_chrome_trace(os.path.join(os.environ.get("FSDP2X_OUT", "."), "trace.json"))
    if not losses[-1] < losses[0]:
        raise SystemExit(f"losses do not fall: {losses}")
    dist.destroy_process_group()
    print(f"trained on {device}: losses {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
