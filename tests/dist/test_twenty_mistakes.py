"""Twenty common mistakes, each made: what is raised on every rank is a row of the page of troubleshooting."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from fsdp2x.train import parse_config
from fsdp2x.train.load_config import translate
from harness import distributed
from models import Stack
from reference import only_fsdp2x
from training import shared_folder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"


def rows() -> list[str]:
    """The messages that the page quotes, as patterns: what it leaves out with dots may be anything."""
    quoted = re.findall(r"^\| `(.*?)` \|", PAGE.read_text(), flags=re.MULTILINE)
    return [".*".join(map(re.escape, message.split("…"))) for message in quoted]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model of three units whose first step is done, and its optimizer."""
    model = fsdp2x.fully_shard(Stack(), auto_wrap=["Mlp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(inputs(model)).square().mean().backward()


def inputs(model: nn.Module) -> torch.Tensor:
    return torch.ones(2, model.norm.weight.numel())


def optimizer_before_sharding(ctx):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2x.fully_shard(model)
    backward(model)
    optimizer.step()


def optimizer_in_unsharded(ctx):
    model, _ = trained()
    with fsdp2x.unsharded(model):
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    backward(model)
    optimizer.step()


def weight_outside_of_its_forward(ctx):
    class Borrows(Stack):
        def forward(self, x):
            return super().forward(x).sum() * nn.functional.linear(x, self.blocks[0].up.weight).sum()

    backward(fsdp2x.fully_shard(Borrows(), auto_wrap=["Mlp"]))


def weights_on_meta(ctx):
    with torch.device("meta"):
        model = Stack()
    fsdp2x.fully_shard(model)
    model(torch.ones(2, model.norm.weight.numel()))


def a_module_list(ctx):
    fsdp2x.fully_shard(Stack().blocks)


def a_scalar(ctx):
    model = Stack()
    model.scale = nn.Parameter(torch.tensor(1.0))
    fsdp2x.fully_shard(model)


def tied_weights_in_two_units(ctx):
    model = Stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    for block in model.blocks:
        fsdp2x.fully_shard(block)
    fsdp2x.fully_shard(model)
    backward(model)


def integers_that_train(ctx):
    model = Stack()
    model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().to(torch.float8_e4m3fn))
    fsdp2x.fully_shard(model)


def a_model_in_ddp(ctx):
    fsdp2x.fully_shard(nn.parallel.DistributedDataParallel(Stack()))


def a_conversion_before_backward(ctx):
    model, _ = trained()
    loss = model(inputs(model)).sum()
    model.half()
    loss.backward()


def models_of_two_sizes(ctx):
    backward(fsdp2x.fully_shard(Stack(num=2 + dist.get_rank())))


def another_tensor_in_place_of_a_weight(ctx):
    model, _ = trained()
    with torch.no_grad():
        values = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, values, (inputs(model),))


def pinned_memory_without_a_device(ctx):
    if torch.accelerator.is_available():
        pytest.skip("memory is pinned where there is an accelerator")
    fsdp2x.fully_shard(Stack(), offload_policy=fsdp2x.CPUOffloadPolicy())


def lbfgs_over_shards(ctx):
    model, _ = trained()
    fsdp2x.local_optimizer(torch.optim.LBFGS(model.parameters()))


def gradients_that_are_not_finite(ctx):
    model, _ = trained()
    (model(inputs(model)) * float("nan")).sum().backward()
    fsdp2x.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def a_checkpoint_that_is_not_there(ctx):
    model, _ = trained()
    with shared_folder(ctx) as folder:
        fsdp2x.checkpoint.load(folder / "missing", model)


def a_folder_of_something_else(ctx):
    model, _ = trained()
    with shared_folder(ctx) as folder:
        if ctx.rank == 0:
            (folder / "other").mkdir()
        dist.barrier()
        fsdp2x.checkpoint.load(folder / "other", model)


def a_key_with_a_slip(ctx):
    parse_config({"optimiser": {"lr": 1e-3}})


def keys_of_two_spellings(ctx):
    translate({"training_args": {"seed": 3}, "parallel": {"offload": "all"}})


def a_class_that_the_model_has_not(ctx):
    fsdp2x.fully_shard(Stack(), auto_wrap=["Block"])


MISTAKES = (
    optimizer_before_sharding, optimizer_in_unsharded, weight_outside_of_its_forward, weights_on_meta, a_module_list,
    a_scalar, tied_weights_in_two_units, integers_that_train, a_model_in_ddp, a_conversion_before_backward,
    models_of_two_sizes, another_tensor_in_place_of_a_weight, pinned_memory_without_a_device, lbfgs_over_shards,
    gradients_that_are_not_finite, a_checkpoint_that_is_not_there, a_folder_of_something_else, a_key_with_a_slip,
    keys_of_two_spellings, a_class_that_the_model_has_not,
)  # fmt: skip


@distributed(world_sizes=(2,), timeout=60)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_its_message_is_a_row_of_the_page(ctx, mistake):
    only_fsdp2x(ctx)
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as error:
        mistake(ctx)
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert any(re.search(row, said, flags=re.DOTALL) for row in rows()), said
