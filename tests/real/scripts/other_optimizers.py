"""Training with the optimizers of the package that is here, bitsandbytes, muon-optimizer, or torchao, and their states.

Change for a CPU: nothing is compiled, because `torch.compile` of one of torchao's steps takes minutes there.
muon-optimizer's ``Muon`` and ``MuonWithAuxAdam`` are left out: each of their ranks steps other parameters than the
others, which must be whole.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp2x
import report

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def bitsandbytes_kinds() -> list[tuple[Make, str]]:
    """Over DTensors, and over their shards by ``local_optimizer`` ("local"), also in 8 bits."""
    from bitsandbytes import optim

    def make(name: str) -> Make:
        return lambda params: getattr(optim, name)(params, lr=1e-2, min_8bit_size=1)

    over, local = ("AdamW", "AdamW8bit", "Lion8bit"), ("AdamW", "Lion", "Adagrad", "AdamW8bit")
    return [(make(name), "") for name in over] + [(make(name), "local") for name in local]


def muon_kinds() -> list[tuple[Make, str]]:
    import muon

    def both(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = {uses: [param for param in params if (param.ndim == 2) == uses] for uses in (False, True)}
        return muon.SingleDeviceMuonWithAuxAdam([{"params": groups[uses], "use_muon": uses} for uses in groups])

    def matrices(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return muon.SingleDeviceMuon([param for param in params if param.ndim == 2])

    return [(matrices, ""), (both, "")]


def torchao_kinds() -> list[tuple[Make, str]]:
    """Of few bits, with their states, one of them over parameters in bf16. The last one refuses to be made."""
    from torchao import optim

    names = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW", "CPUOffloadOptimizer")
    more = {"_AdamW": {"bf16_stochastic_round": True}, "CPUOffloadOptimizer": {"optimizer_class": torch.optim.AdamW}}
    return [
        (partial(getattr(optim, name), lr=1e-2, **more.get(name, {})), "bf16" if name == "_AdamW" else "states")
        for name in names
    ]


def run(make: Make, how: str) -> tuple[list[float], nn.Module]:
    """Losses and sums of parameters, at the end also of first moments; NaN where the optimizer raises.

    With "local" also how far parameters end from those of the same optimizer over plain tensors: the shards.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)))
    model.to(dtype)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    params = list(model.parameters())
    plain = [nn.Parameter(param.to_local().detach().clone()) for param in params]
    values = []
    try:
        optimizer, twin = make(params), make(plain)
        if how == "local":
            fsdp2x.local_optimizer(optimizer, elementwise=True)
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(16, 64, dtype=dtype)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            for param, shard in zip(params, plain, strict=True):
                shard.grad = param.grad.to_local().clone()
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.item(), *(param.full_tensor().sum().item() for param in params)]
            if how == "local":
                twin.step()
                values.append(max((a.to_local() - b).abs().max().item() for a, b in zip(params, plain, strict=True)))
        if how in ("states", "bf16"):
            for state in get_optimizer_state_dict(model, optimizer)["state"].values():
                local = state["exp_avg"].to_local()
                values.append((local.dequantize() if hasattr(local, "dequantize") else local).float().sum().item())
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        print(f"{make}: {error}", flush=True)
        return [float("nan")], model
    return values, model


dist.init_process_group("gloo")
torch.compiler.set_stance("force_eager")
values = []
kinds = {"bitsandbytes": bitsandbytes_kinds, "muon": muon_kinds, "torchao": torchao_kinds}
for make, how in next(of for name, of in kinds.items() if importlib.util.find_spec(name))():
    found, model = run(make, how)
    values += [float(len(found)), *found]
report.write(values, model)
dist.destroy_process_group()
