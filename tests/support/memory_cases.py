"""Ways to train, each with its memory three times: lower bound, plan, and the tensors of FSDP2 after real steps.

`torchrun --nproc_per_node=2 tests/support/memory_cases.py` prints this table, as docs/guides/memory.md says.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2x
import models
from fsdp2x.plan.plan import planned_facts, planned_report
from fsdp2x.plan.report import MemoryReport
from fsdp2x.plan.request import PlanRequest
from fsdp2x.sharding.wrap import plan_units
from memory_bound import MemoryBound, memory_bound
from reference import shard_stock

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TABLE_WIDTH, TABLE_WORLD = 512, 2
LORA = {"rank": 8, "alpha": 16, "target_modules": "all-linear"}


class PackedLinear(nn.Module):
    """A frozen linear layer in 4 bits an element, two to a byte, as QLoRA keeps its base."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape
        packed = torch.randint(0, 256, (linear.weight.numel() // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.cat([self.weight & 15, self.weight >> 4]).to(x.dtype).view(self.shape)
        return nn.functional.linear(x, (codes - 7.5) / 100)


class Seeing(nn.Module):
    """A language model that adds what a frozen tower makes of an image."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = nn.Sequential(*(models.Mlp(width, 4 * width) for _ in range(4))).requires_grad_(False)
        self.language = language(width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        words = self.language.get_input_embeddings()(input_ids)
        return self.language(inputs_embeds=words + self.tower(torch.ones_like(words)), labels=labels)


def language(width: int, name: str = "llama", **options) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "vocab_size": 4 * width}
    return models.build(name, **sizes, **options)


def adapted(width: int) -> nn.Module:
    return fsdp2x.add_lora(language(width).to(torch.bfloat16), LORA)


def packed(width: int) -> nn.Module:
    model = adapted(width)
    for module in list(model.modules()):
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            module.base_layer = PackedLinear(module.base_layer)
    return model


def experts(width: int) -> nn.Module:
    return language(width, "qwen3_moe", moe_intermediate_size=width, use_cache=False)


@dataclass(frozen=True)
class Case:
    build: Callable[[int], nn.Module]
    optimizer: str = "adamw"
    options: dict = field(default_factory=dict)  # more arguments of `plan_memory`

    def plan(self, width: int, world: int, **options) -> tuple[MemoryReport, MemoryBound]:
        """The plan of rank 0, on a device unless `options` say otherwise, and its bound."""
        request = PlanRequest(world, optimizer=self.optimizer, mp_policy=POLICY, **{**self.options, **options})
        facts = planned_facts(self.build(width), request)
        return planned_report(facts, request), memory_bound(facts, self.optimizer, POLICY)

    def stock(self, width: int) -> dict[str, int]:
        """Bytes of FSDP2's tensors on this rank."""
        model = self.build(width)
        shard_stock(model, plan_units(model, self.options.get("auto_wrap")), mp_policy=POLICY)
        return bytes_after_steps(model, torch.optim.AdamW)


CASES = {
    "full training": Case(language),
    "LoRA": Case(adapted),
    "QLoRA": Case(packed),
    "frozen vision tower": Case(Seeing, options={"auto_wrap": ["Mlp", "LlamaDecoderLayer"]}),
    "int8 moments": Case(language, "adamw_int8"),
    **{f"offload {mode}": Case(language, options={"offload": mode}) for mode in ("optimizer", "gradients", "all")},
    "experts over 2 ranks": Case(experts, options={"expert_parallel": 2}),
}


def bytes_after_steps(model: nn.Module, make_optimizer: Callable[[list], torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients, and optimizer states after real steps."""
    params = list(model.parameters())
    optimizer = make_optimizer([param for param in params if param.requires_grad])
    for seed in range(2):
        optimizer.zero_grad()
        model(**models.batch("llama", seed=seed)).loss.backward()
        optimizer.step()
    return {
        "shard_bytes": _local_bytes(params),
        "gradient_bytes": _local_bytes(param.grad for param in params if param.grad is not None),
        "optimizer_bytes": _local_bytes(value for state in optimizer.state.values() for value in state.values()),
    }


def _local_bytes(values: Iterable[torch.Tensor]) -> int:
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return sum(value.numel() * value.itemsize for value in local)


def main() -> None:
    dist.init_process_group("gloo")
    lines = ["| MiB of a rank | bound | plan | FSDP2 | peak bound | peak plan |", "| --- |" + " ---: |" * 5]
    for name, case in CASES.items():
        report, bound = case.plan(TABLE_WIDTH, TABLE_WORLD)
        stock = sum(case.stock(TABLE_WIDTH).values()) + bound.unsharded_bytes
        sizes = (bound.resting_bytes, report.resting_bytes, stock, bound.peak_bytes, report.peak_bytes)
        lines.append(f"| {name} | " + " | ".join(f"{size / 2**20:.2f}" for size in sizes) + " |")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
