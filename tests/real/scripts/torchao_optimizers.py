"""Training with torchao's optimizers of few bits, and saving their states. No change for a CPU but that nothing is
compiled: `torch.compile` of a step takes minutes there.
"""

import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import report

# By name, with the dtype of the parameters.
KINDS = {
    "AdamW8bit": (torchao.optim.AdamW8bit, torch.float32, {}),
    "AdamW4bit": (torchao.optim.AdamW4bit, torch.float32, {}),
    "AdamWFp8": (torchao.optim.AdamWFp8, torch.float32, {}),
    "_AdamW": (torchao.optim._AdamW, torch.bfloat16, {"bf16_stochastic_round": True}),
    "CPUOffloadOptimizer": (torchao.optim.CPUOffloadOptimizer, torch.float32, {"optimizer_class": torch.optim.AdamW}),
}


def run(name: str) -> tuple[list[float], nn.Module]:
    """Losses and sums of parameters and states; NaN where the optimizer refuses to be made."""
    kind, dtype, options = KINDS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)))
    model.to(dtype)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    try:
        optimizer = kind(model.parameters(), lr=1e-2, **options)
    except AssertionError as error:
        print(f"{name}: {error}", flush=True)
        return [float("nan")], model
    values = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(16, 64, dtype=dtype)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.item(), *(param.full_tensor().sum().item() for param in model.parameters())]
    for state in get_optimizer_state_dict(model, optimizer)["state"].values():
        local = state["exp_avg"].to_local()
        values.append((local.dequantize() if hasattr(local, "dequantize") else local).float().sum().item())
    return values, model


dist.init_process_group("gloo")
torch.compiler.set_stance("force_eager")
values = []
for name in KINDS:
    found, model = run(name)
    values += [float(len(found)), *found]
report.write(values, model)
dist.destroy_process_group()
