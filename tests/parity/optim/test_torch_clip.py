"""torch's own gradient clipping under install(): over several meshes, and over plain tensors among DTensors."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2x
from harness import distributed
from reference import full, only_fsdp2x, same

NORMS = (1.0, 2, 3.0, float("inf"))


def places_of(arrangement: str, world: int) -> list:
    """Mesh and placements of each gradient in turn; None: it is plain."""
    one, two = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    return {
        "plain among sharded": [(one, [Shard(0)]), None],
        "two meshes": [(one, [Shard(0)]), (two, [Replicate(), Shard(0)]), (two, [Shard(0), Shard(1)])],
        "all kinds": [None, (one, [Replicate()]), (two, [Replicate(), Shard(1)]), (one, [Shard(1)])],
        "one mesh": [(two, [Replicate(), Shard(0)]), (two, [Replicate(), Replicate()]), (two, [Shard(0), Shard(1)])],
    }[arrangement]


def parameters(places: list, *, broken: float | None = None) -> tuple[list, list]:
    """With gradients, cut as ``places`` says, and the same ones plain; one parameter has no gradient."""
    generator = torch.Generator().manual_seed(0)
    cut, plain = [], []
    for index, shape in enumerate([(5, 3), (4, 4), (1, 2), (7, 6), (3, 8), (2, 2)]):
        weight, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64 if index == 3 else torch.float32)
        if broken is not None and index == 2:
            grad[0, 1] = broken
        plain.append(nn.Parameter(weight.clone()))
        place = places[index % len(places)]
        cut.append(nn.Parameter(weight if place is None else distribute_tensor(weight, *place)))
        if index != 4:
            plain[-1].grad = grad.clone()
            cut[-1].grad = grad if place is None else distribute_tensor(grad, *place)
    return cut, plain


def numbers(grad: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the full gradient, in which a NaN is a number that equals itself."""
    return None if grad is None else full(grad).nan_to_num(nan=777.0)


def assert_alike(cut: list, plain: list, what) -> None:
    for one, other in zip(cut, plain, strict=True):
        same(numbers(one.grad), numbers(other.grad), what, rtol=1e-5, atol=1e-7)


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("arrangement", ["plain among sharded", "two meshes", "all kinds", "one mesh"])
def test_clips_as_if_unsharded(ctx, arrangement):
    only_fsdp2x(ctx)
    places = places_of(arrangement, ctx.world)
    with fsdp2x.install():
        for norm_type in NORMS:
            for foreach in (None, True, False):
                cut, plain = parameters(places)
                what = f"norm {norm_type}, foreach {foreach}"
                expected = nn.utils.clip_grad_norm_(plain, 0.7, norm_type)
                with CommDebugMode() as comm:
                    norm = nn.utils.clip_grad_norm_((param for param in cut), 0.7, norm_type, foreach=foreach)
                if arrangement == "one mesh" and norm_type == float("inf"):
                    counted = comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
                    assert counted == sum(size > 1 for size in norm.device_mesh.shape), "one for each axis"
                assert isinstance(norm, DTensor), "callers of torch's function ask for full_tensor()"
                if arrangement != "one mesh" or norm_type == float("inf"):  # torch's own is partial there
                    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
                same(norm.full_tensor().double(), expected.double(), what, rtol=1e-5, atol=0.0)
                assert_alike(cut, plain, what)
        # In two calls, with a DTensor or a plain norm between them, as frameworks do.
        for whole in (True, False):
            cut, plain = parameters(places)
            norm = nn.utils.get_total_norm([param.grad for param in cut if param.grad is not None])
            nn.utils.clip_grads_with_norm_(cut, 0.7, norm.full_tensor() if whole else norm)
            nn.utils.clip_grad_norm_(plain, 0.7)
            assert_alike(cut, plain, f"two calls, whole {whole}")
        cut, plain = parameters(places)
        nn.utils.clip_grad_value_(cut, 0.3)
        nn.utils.clip_grad_value_(plain, 0.3)
        assert_alike(cut, plain, "values")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_norms_that_are_not_finite(ctx, broken):
    only_fsdp2x(ctx)
    with fsdp2x.install():
        cut, plain = parameters(places_of("all kinds", ctx.world), broken=broken)
        before = [numbers(param.grad) for param in cut]
        with pytest.raises(RuntimeError, match="pass error_if_nonfinite=False to scale them by it anyway"):
            nn.utils.clip_grad_norm_(cut, 1.0, error_if_nonfinite=True)
        same([numbers(param.grad) for param in cut], before, "gradients")
        nn.utils.clip_grad_norm_(cut, 1.0)
        nn.utils.clip_grad_norm_(plain, 1.0)
        assert_alike(cut, plain, "scaled by it")
        with pytest.raises(ValueError, match="norm_type is 0.0"):
            nn.utils.get_total_norm([param.grad for param in cut if param.grad is not None], 0)
