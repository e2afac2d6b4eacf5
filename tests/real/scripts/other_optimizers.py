"""Training with the optimizers of the packages that are here, bitsandbytes or muon-optimizer. No change for a CPU.

muon-optimizer's ``Muon`` and ``MuonWithAuxAdam`` are left out: each of their ranks steps other parameters than the
others, which must be whole.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp2x
import report

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def bitsandbytes_kinds() -> list[tuple[Make, bool]]:
    """Over DTensors, and over their shards by ``local_optimizer``, also in 8 bits."""
    from bitsandbytes import optim

    def make(name: str) -> Make:
        return lambda params: getattr(optim, name)(params, lr=1e-2, min_8bit_size=1)

    over, local = ("AdamW", "AdamW8bit", "Lion8bit"), ("AdamW", "Lion", "Adagrad", "AdamW8bit")
    return [(make(name), False) for name in over] + [(make(name), True) for name in local]


def muon_kinds() -> list[tuple[Make, bool]]:
    import muon

    def both(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = {uses: [param for param in params if (param.ndim == 2) == uses] for uses in (False, True)}
        return muon.SingleDeviceMuonWithAuxAdam([{"params": groups[uses], "use_muon": uses} for uses in groups])

    def matrices(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return muon.SingleDeviceMuon([param for param in params if param.ndim == 2])

    return [(matrices, False), (both, False)]


def run(make: Make, is_local: bool) -> tuple[list[float], nn.Module]:
    """Losses and sums of parameters; NaN where the optimizer raises.

    With ``is_local`` also how far parameters end from those of the same optimizer over plain tensors: the shards.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    params = list(model.parameters())
    plain = [nn.Parameter(param.to_local().detach().clone()) for param in params]
    values = []
    try:
        optimizer, twin = make(params), make(plain)
        if is_local:
            fsdp2x.local_optimizer(optimizer, elementwise=True)
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(16, 64)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            for param, shard in zip(params, plain, strict=True):
                shard.grad = param.grad.to_local().clone()
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.item(), *(param.full_tensor().sum().item() for param in params)]
            if is_local:
                twin.step()
                values.append(max((a.to_local() - b).abs().max().item() for a, b in zip(params, plain, strict=True)))
    except (RuntimeError, NotImplementedError) as error:
        print(f"{type(optimizer).__name__}: {error}", flush=True)
        return [float("nan")], model
    return values, model


dist.init_process_group("gloo")
values = []
for make, is_local in bitsandbytes_kinds() if importlib.util.find_spec("bitsandbytes") else muon_kinds():
    found, model = run(make, is_local)
    values += [float(len(found)), *found]
report.write(values, model)
dist.destroy_process_group()
