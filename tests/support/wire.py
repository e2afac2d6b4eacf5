"""Wire formats by their definition, in a few lines of torch; and a model whose rows are blocks and parts of blocks."""

import copy

import torch
import torch.distributed as dist

import fsdp2x
from models import Stack
from reference import shard

BLOCK = 256
TOPS = {"int8": 127.0, "fp8": 448.0}


def coded(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as float32 and scales, one a block of the flat `values`."""
    flat = values.detach().float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / TOPS[name]
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    places = (blocks / scales).clamp(-TOPS[name], TOPS[name])
    return places.round() if name == "int8" else places.to(torch.float8_e4m3fn).float(), scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (codes * scales).flatten()[: like.numel()].view(like.shape).to(like.dtype)


def travelled(values: torch.Tensor, name: str) -> torch.Tensor:
    """Returns one rank's rows as the receivers get them, in float32."""
    if name == "bfloat16":
        return values.bfloat16().float()
    return decoded(*coded(values, name), values.detach().float())


def gathered(whole: torch.Tensor, name: str, world: int, dim: int = 0) -> torch.Tensor:
    """Returns a parameter as every rank gathers it. Vectors, and parameters of one rank, stay unchanged."""
    if whole.dim() < 2 or world == 1:
        return whole.detach().clone()
    return torch.cat([travelled(rows.contiguous(), name) for rows in whole.detach().chunk(world, dim)], dim)


class ErrorFeedback:
    """One rank's gradient of one parameter, step by step."""

    def __init__(self, name: str, world: int) -> None:
        self.name, self.world = name, world
        self.errors: dict[int, torch.Tensor] = {}

    def sent(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient as it arrives at the ranks that own its rows."""
        if gradient.dim() < 2:
            return gradient.clone()
        parts = []
        for rank, rows in enumerate(gradient.chunk(self.world)):
            if self.name == "bfloat16":
                parts.append(travelled(rows, self.name))
                continue
            wanted = rows + self.errors.get(rank, torch.zeros_like(rows))
            codes, scales = coded(wanted, "int8")
            parts.append(decoded(codes, scales, wanted))
            steps = scales / 254
            left = torch.nn.functional.pad((wanted - parts[-1]).flatten(), (0, -wanted.numel() % BLOCK))
            places = (left.view(-1, BLOCK) / steps).nan_to_num().clamp(-127, 127).round()
            self.errors[rank] = decoded(places, steps, wanted)
        return torch.cat(parts)


def mean_of_ranks(sent: torch.Tensor, world: int) -> torch.Tensor:
    """Summed in rank order. Collective."""
    every = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(every, sent.contiguous())
    total = torch.zeros_like(sent)
    for one in every:
        total += one
    return total / world


UNITS = ("blocks.0", "blocks.1")
WIDTH, HIDDEN = 20, 66


def reference() -> Stack:
    """Rows of several blocks of 256, the last one short; one rank of four has none of the head's three rows."""
    return Stack(num=2, width=WIDTH, hidden=HIDDEN)


def sharded(ctx, model, transport="process_group", **options):
    return shard(ctx, copy.deepcopy(model), UNITS, transport=transport, **options)


def loss_of(model, rank, step=0):
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def root_stats(model) -> dict[str, int]:
    return fsdp2x.fully_shard.state(model).root.stats()
