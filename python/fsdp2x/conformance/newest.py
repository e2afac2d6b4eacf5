"""Behaviors of FSDP2 that PyTorch's newest tests check. ``mirrors`` names the test, without its common prefix."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2x.conformance.behavior import Context, behavior, close, raises, same_gradients

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CLEAR = "zero_grad(set_to_none=True)"


# --- offload_selector: which parameters an offload map names ---


class Sizes(nn.Module):
    """400, 200, twice 80, and 40 bytes."""

    def __init__(self) -> None:
        super().__init__()
        for name, numel in {"d": 20, "small": 10, "big": 100, "c": 20, "mid": 50}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(numel)))


BUDGETS = {0: "", 399: "", 400: "big", 600: "big mid", 680: "big mid c", 759: "big mid c", 760: "big mid c d"}


@behavior(
    rows=list(BUDGETS),
    newer="cpu_offload_by_budget",
    mirrors="offload_selector: boundaries, tie_break, map",
)
def budgets_choose_the_largest(t: Context, budget: int) -> None:
    """cpu_offload_by_budget names the largest parameters first, ties by name, and stops before it overshoots."""
    found = t.find("cpu_offload_by_budget")(Sizes(), budget)
    assert set(found) == set(BUDGETS[budget].split())
    assert all(isinstance(policy, CPUOffloadPolicy) and policy.pin_memory for policy in found.values())


@behavior(
    newer="cpu_offload_by_budget",
    mirrors="offload_selector: never_overshoots, monotonic_superset, deterministic",
)
def budgets_are_monotonic(t: Context) -> None:
    """A larger budget offloads no less, and never more bytes than the budget."""
    choose, sizes = t.find("cpu_offload_by_budget"), {n: p.nbytes for n, p in Sizes().named_parameters()}
    before: set[str] = set()
    for budget in range(0, 900, 7):
        found = set(choose(Sizes(), budget, pin_memory=False))
        assert before <= found and sum(sizes[name] for name in found) <= budget
        before = found
    assert before == set(sizes)


@behavior(newer="cpu_offload_by_budget", mirrors="offload_selector: pin_memory, rejects_negative")
def budgets_check_arguments(t: Context) -> None:
    """pin_memory is passed on to the policies, and a negative budget raises ValueError."""
    choose = t.find("cpu_offload_by_budget")
    assert not any(policy.pin_memory for policy in choose(Sizes(), 10**9, pin_memory=False).values())
    raises(ValueError, lambda: choose(Sizes(), -1), "non-negative")


@behavior(newer="offload maps", mirrors="offload_selector")
def offload_maps_train(t: Context) -> None:
    """offload_policy takes a map from parameter names to policies; training computes the same."""
    policies = {"0.weight": CPUOffloadPolicy(pin_memory=False)}
    t.compare(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), offload_policy=policies)


# --- conversion: grad_dtype, .to(), and pending gradients ---

GRAD_DTYPES = ("default", F32, None)


def _set(modules: tuple[nn.Module, ...], grad_dtype: Any) -> None:
    for module in modules:
        for param in module.parameters():
            if grad_dtype != "default":
                param.grad_dtype = grad_dtype


def _pair(grad_dtype: Any, dtype: torch.dtype = F32) -> tuple[nn.Linear, nn.Linear]:
    """Two equal layers with a frozen bias."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4, dtype=dtype)
    plain.bias.requires_grad_(False)
    pair = copy.deepcopy(plain), plain
    _set(pair, grad_dtype)
    return pair


def _x(value: float = 1.0, dtype: torch.dtype = BF16, width: int = 4) -> torch.Tensor:
    return torch.full((2, width), value, dtype=dtype)


def _agree(model: nn.Module, plain: nn.Module) -> None:
    """Values, dtypes, and grad_dtype of parameters and gradients are those of the plain module."""
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor) and param.dtype == expected.dtype
        assert param.grad_dtype == expected.grad_dtype, f"grad_dtype {param.grad_dtype}, not {expected.grad_dtype}"
        close(param, expected, "parameter", rtol=0, atol=0)
        if expected.grad is not None:
            assert param.grad is not None, "the gradient is gone"
            assert param.grad.dtype == expected.grad.dtype, f"{param.grad.dtype}, not {expected.grad.dtype}"
    same_gradients(model, plain, rtol=1e-2, atol=1e-2)


@behavior(torch=(2, 15), rows=GRAD_DTYPES, mirrors="conversion: to_matches_plain_module")
def conversions_match_plain_modules(t: Context, grad_dtype: Any) -> None:
    """.to(dtype), SGD, and AdamW leave parameters, gradients, and their dtypes as on a plain module."""
    model, plain = _pair(grad_dtype)
    t.shard(model)
    for one in (model, plain):
        one.to(BF16)
    _agree(model, plain)
    for step in range(2):
        for one in (model, plain):
            if step:
                one.zero_grad(set_to_none=True)
            one(_x()).sum().backward()
        _agree(model, plain)
        kinds = (torch.optim.SGD,) if plain.weight.grad.dtype != BF16 else (torch.optim.SGD, torch.optim.AdamW)
        for kind in kinds:
            for one in (model, plain):
                kind([one.weight], lr=0.01).step()
        _agree(model, plain)


@behavior(torch=(2, 15), newer="get_pending_gradients", rows=("default", None), mirrors="conversion: pending_grad")
def conversions_check_pending_gradients(t: Context, grad_dtype: Any) -> None:
    """Gradients that are not reduced yet hinder a conversion, which keeps them and gathered parameters."""
    model = nn.Linear(4, 4, bias=False)
    _set((model,), grad_dtype)
    t.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    param = model.weight
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model(_x()).sum().backward()
    pending, partial = model.get_pending_gradients()[param]
    assert partial is None and pending.dtype == F32 and not isinstance(pending, DTensor)
    value = pending.clone()
    raises(RuntimeError, lambda: model.to(BF16), CLEAR)
    assert not isinstance(model.weight, DTensor) and param.dtype == F32
    assert model.get_pending_gradients()[param][0] is pending and torch.equal(pending, value)
    model.zero_grad(set_to_none=True)
    model.to(BF16)
    model.set_requires_gradient_sync(True)
    model(_x()).sum().backward()
    model.reshard()
    assert model.weight.dtype == BF16 and model.weight.grad is not None


@behavior(torch=(2, 15), newer="get_pending_gradients", mirrors="conversion: no_op_conversion_preserves_pending_grad")
def no_op_conversions_keep_pending_gradients(t: Context) -> None:
    """A conversion to the same dtype keeps the tensors of pending gradients."""
    model = nn.Linear(4, 4, bias=False)
    t.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    param = model.weight
    model.set_requires_gradient_sync(False)
    model(_x()).sum().backward()
    pending, _ = model.get_pending_gradients()[param]
    model.float()
    assert model.weight is param and model.get_pending_gradients()[param][0] is pending and pending.dtype == BF16
    model.set_requires_gradient_sync(True)
    model(_x()).sum().backward()
    close(param.grad, torch.full((4, 4), 4.0), "gradient")


@behavior(torch=(2, 15), newer="check of grad_dtype", mirrors="conversion: grad_dtype_change_rejected, after_warmup")
def changes_of_grad_dtype_are_refused(t: Context) -> None:
    """A grad_dtype that changes after the first forward raises at the next one."""
    model = t.shard(nn.Linear(4, 4, bias=False))
    model(_x(dtype=F32)).sum().backward()
    model.zero_grad()
    model.weight.grad_dtype = BF16
    raises(RuntimeError, lambda: model(_x(dtype=F32)), "grad_dtype")


# --- pending_grad: gradients that wait for their reduction ---


class Two(nn.Module):
    def __init__(self, width: int = 4, rows: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, rows, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


@behavior(torch=(2, 15), newer="get_pending_gradients", rows=(False, True), mirrors="pending_grad: storage_mutations")
def pending_gradients_keep_their_tensor(t: Context, reshard: bool) -> None:
    """Writes to a pending gradient count, and its tensor stays the same through backwards and reshard()."""
    model = nn.Linear(2, 4, bias=False)
    t.shard(model, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(reshard)
    param, expected, saved = model.weight, torch.zeros(4, 2, dtype=BF16), None
    for step, value in enumerate((2, 1, 1)):
        model(_x(value, width=2)[:1]).sum().backward()
        expected.add_(value)
        pending = model.get_pending_gradients()[param][0]
        assert saved is None or pending is saved
        saved = pending
        if step == 0:
            pending.square_()
            expected.square_()
        assert param.grad is None and torch.equal(pending, expected)
        model.reshard()
        assert model.get_pending_gradients()[param][0] is saved
    model.synchronize_gradients()
    assert model.get_pending_gradients() == {}
    close(param.grad, expected, "gradient")


@behavior(
    torch=(2, 15),
    newer="get_pending_gradients",
    rows=[(set_to_none, root) for set_to_none in (False, True) for root in (False, True)],
    mirrors="pending_grad: grouped_clear_after_forward",
)
def zero_grad_clears_pending_gradients(t: Context, set_to_none: bool, root: bool) -> None:
    """zero_grad clears pending gradients of the modules below it only, also between forward and backward."""
    model = Two()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    t.shard(model, ("first+second",), reshard_after_forward=False, mp_policy=policy)
    model.set_reshard_after_backward(False)
    for unit in (model.first, model):
        unit.reshard()
    first, second = model.first.weight, model.second.weight
    for sync, value in ((True, 4.0), (False, 2.0)):
        model.set_requires_gradient_sync(sync)
        model(_x(value)[:1]).sum().backward()
    output = model.first(_x()[:1].requires_grad_())
    assert set(model.get_pending_gradients()) == {first, second}
    (model if root else model.first).zero_grad(set_to_none=set_to_none)
    pending = model.get_pending_gradients()
    assert (first in pending) != set_to_none and (second in pending) != (set_to_none and root)
    output.sum().backward()
    model.synchronize_gradients()
    close(first.grad, torch.ones(4, 4), "first")
    if set_to_none and root:
        assert second.grad is None
    else:
        close(second.grad, torch.full((4, 4), 0.0 if root else 6.0), "second")


@behavior(torch=(2, 15), newer="get_pending_gradients", ranks=2, mirrors="pending_grad: dtensor_pending_owner")
def pending_gradients_of_dtensors(t: Context) -> None:
    """With tensor parallelism, a pending gradient is a DTensor on the other mesh dim."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = t.mesh(1, -1, names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(4, 4, bias=False)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel())
    t.shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    param = model.weight
    for value in (1.0, 2.0):
        for one in (plain, model):
            one(_x(value, F32)).sum().backward()
        pending, _ = model.get_pending_gradients()[param]
        assert isinstance(pending, DTensor) and pending.device_mesh == mesh["tp"] and pending.placements == (Shard(0),)
        close(pending, plain.weight.grad, "pending")
    model.synchronize_gradients()
    close(param.grad, plain.weight.grad, "gradient")


@behavior(torch=(2, 15), newer="synchronize_gradients", mirrors="pending_grad: explicit_sync_divide_factor")
def synchronizing_divides(t: Context) -> None:
    """synchronize_gradients() obeys the divide factor, and does nothing the second time."""
    model = nn.Linear(1, 2, bias=False)
    t.shard(model)
    model.set_gradient_divide_factor(3)
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        model(torch.full((1, 1), 3.0)).sum().backward()
    for expected, call in ((1, lambda: None), (2, model.synchronize_gradients), (2, model.synchronize_gradients)):
        call()
        close(model.weight.grad, torch.full((2, 1), float(expected * t.world)), "gradient")


@behavior(
    torch=(2, 15),
    newer="get_pending_gradients",
    ranks=2,
    rows={"kept": None, "zeroed": False, "cleared": True},
    mirrors="pending_grad: native_partial_ownership",
)
def partial_gradients_wait_for_the_all_reduce(t: Context, clear: bool | None) -> None:
    """On replicas without all-reduce, the second pending tensor is this rank's reduced shard."""
    model = Two(1, 5)
    options = {"mesh": t.mesh(2, -1, names=("replicate", "shard")), "reshard_after_forward": False}
    t.shard(model, ("first+second",), mp_policy=MixedPrecisionPolicy(param_dtype=BF16), **options)
    x = torch.ones(1, 1, dtype=BF16)
    first, second = model.first.weight, model.second.weight
    model(4 * x).sum().backward()
    model.set_requires_all_reduce(False)
    for module, value in ((model.first, 2), (model.second, 3)):
        module((value * x).requires_grad_()).sum().backward()
    model.set_requires_gradient_sync(False)
    model.first(x.clone().requires_grad_()).sum().backward()
    pending = model.get_pending_gradients()
    kinds = [[one is not None for one in pending.get(param, ())] for param in (first, second)]
    assert kinds == [[True, True], [False, True]], f"pending: {kinds}"
    for param, (_, partial) in pending.items():
        assert partial.shape == param.to_local().shape, f"{tuple(partial.shape)}"
    if clear is not None:
        model.zero_grad(set_to_none=clear)
        assert (model.get_pending_gradients() == {}) == clear
    model.synchronize_gradients()
    assert model.get_pending_gradients() == {}
    for param in (first, second):
        if clear:
            assert param.grad is None
        else:
            close(param.grad, torch.full((5, 1), 7.0 if clear is None else 0.0), "gradient")


# --- dtensor: parameters that are DTensors on the whole mesh ---

DIMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "shard": ((-1,), {"shard": "a"}),
    "replicate": ((-1,), {"replicate": "a"}),
    "replicate, shard": ((1, -1), {"replicate": "a", "shard": "b"}),
    "two shard dims": ((1, -1), {"shard": ("a", "b")}),
    "two replicate dims": ((1, 1, -1), {"replicate": ("a", "b"), "shard": "c"}),
}


def _linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@behavior(
    torch=(2, 12),
    rows=[(name, reshard) for name in DIMS for reshard in (True, False)],
    mirrors="dtensor: train_parity, sharded_param_correctness_1d",
)
def trains_on_the_whole_mesh(t: Context, name: str, reshard: bool) -> None:
    """DataParallelMeshDims names one or several shard and replicate dims; training computes the same."""
    shape, dims = DIMS[name]
    mesh = t.mesh(*shape, names=("a", "b", "c")[: len(shape)])
    plain, model = _linears(), _linears()
    distribute_module(model, mesh)
    t.shard(model, mesh=mesh, reshard_after_forward=reshard, dp_mesh_dims=t.find("DataParallelMeshDims")(**dims))
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2, foreach=False) for one in (model, plain)]
    for step in range(3):
        inputs = [torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(t.world)]
        sum((plain(x).sum() / t.world for x in inputs), torch.zeros(())).backward()
        x = DTensor.from_local(inputs[t.rank], mesh, [Replicate()] * mesh.ndim, run_check=False)
        model(x).sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(param, expected, "parameter")


@behavior(torch=(2, 13), ranks=2, mirrors="dtensor: reduce_scatter_unused_dtensor_param")
def unused_dtensors_get_zeros(t: Context) -> None:
    """With set_reduce_scatter_unused_params(True), unused expert DTensors get zero DTensor gradients."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("used", "unused"):
                self.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh["ep"], [Shard(0)])))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_parameter("used").to_local().sum() + 0 * x.sum()

    mesh = t.mesh(-1, 2, names=("dp", "ep"))
    model = t.shard(Experts(), mesh=mesh["dp"], reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1)).backward()
    assert isinstance(model.unused.grad, DTensor) and not model.unused.grad.to_local().any()


def _on(mesh: Any, placement: Any = None) -> nn.Linear:
    model = nn.Linear(16, 32)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [placement or Replicate()]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate()]))
    return model


MISTAKES = {
    "not replicated": ("Expected Replicate", "a"),
    "unknown dim": ("not found in mesh.mesh_dim_names", "nonexistent"),
    "other mesh": ("same mesh", "a"),
    "plain parameters": ("must be DTensors", "a"),
}


@behavior(
    torch=(2, 12), ranks=2, rows={name: (name, *row) for name, row in MISTAKES.items()}, mirrors="dtensor: validation"
)
def mistakes_of_mesh_dims(t: Context, what: str, text: str, dim: str) -> None:
    """Mistakes in dp_mesh_dims and in the parameters' placements raise PyTorch's messages."""
    mesh, dims = t.mesh(-1, names=("a",)), t.find("DataParallelMeshDims")
    raises(ValueError, dims, "At least one of shard or replicate")
    model = {
        "not replicated": lambda: _on(mesh, Shard(0)),
        "other mesh": lambda: _on(t.mesh(-1, names=("b",))),
        "plain parameters": lambda: nn.Linear(16, 32),
    }.get(what, lambda: _on(mesh))()
    raises(ValueError, lambda: t.shard(model, mesh=mesh, dp_mesh_dims=dims(shard=dim)), text)


# --- unsharded_views: one rank uses its shard in place ---


@behavior(
    newer="unsharded views",
    lacks={"fsdp2x": "has views of shards on devices, and of subclasses that make them"},
    rows=(True, False),
    mirrors="unsharded_views: survive_reshard, replaced_storage",
)
def frozen_parameters_of_one_rank_are_views(t: Context, reshard: bool) -> None:
    """On a mesh of one rank, frozen parameters compute in the memory of their shard, also after loading."""
    model = nn.Linear(8, 4).requires_grad_(False)
    mesh = t.mesh(-1, 1, names=("other", "one"))["one"]
    t.shard(model, mesh=mesh, reshard_after_forward=reshard)
    for version in (1.0, 2.0):
        state = {name: torch.full_like(value, version) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=version == 2.0)
        local = model.weight.to_local()
        assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 4), 9 * version))
        model.unshard()
        assert model.weight.data_ptr() == local.data_ptr()
        model.reshard()


@behavior(
    newer="fsdp_get_unsharded_view",
    lacks={"fsdp2x, wrong dtype": "asks subclasses for views, not an attribute of a plain shard"},
    rows={"declines": False, "wrong dtype": True},
    mirrors="unsharded_views: decline",
)
def extensions_return_views(t: Context, is_wrong: bool) -> None:
    """fsdp_get_unsharded_view may decline by None, and must keep shape, dtype, and device."""
    model = nn.Linear(8, 4).requires_grad_(False)
    t.shard(model, mesh=t.mesh(-1, 1, names=("other", "one"))["one"])
    with torch.no_grad():
        local = model.weight.to_local()
    local.fsdp_get_unsharded_view = lambda *_: local.double() if is_wrong else None
    if is_wrong:
        raises(ValueError, lambda: model(torch.ones(2, 8)), "local shape, dtype, and device")
    else:
        assert model(torch.ones(2, 8)).shape == (2, 4)


# --- prefix_copy: layouts of shards on several dims in one unit ---

LAYOUTS = {
    "dim 0": ((0, (11, 5)),),
    "dim 1": ((1, (2, 12, 5)),),
    "one prefix": ((1, (1, 12, 5)),),
    "mixed": ((0, (11, 5)), (1, (2, 12, 5)), (2, (2, 3, 8))),
}
NEWER_LAYOUTS = {
    "empty": ((1, (0, 12, 5)), (0, (12, 5))),
    "dtypes": ((0, (12, 5), BF16), (1, (2, 12, 5))),
}


@behavior(rows={name: (layout,) for name, layout in LAYOUTS.items()}, mirrors="prefix_copy: all_gather, reduce_scatter")
def layouts_of_shards(t: Context, layout: tuple) -> None:
    """One unit may shard parameters on several dims; gathers and reductions give the same values bit for bit."""

    class Layout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for index, (_, shape, *dtype) in enumerate(layout):
                self.register_parameter(str(index), nn.Parameter(torch.randn(shape).to(*dtype or (F32,))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(((param.float() * (i + x)).square().sum() for i, param in enumerate(self.parameters())), x)

    plain, model = Layout(), Layout()
    dims = {id(param): dim for param, (dim, *_) in zip(model.parameters(), layout, strict=True)}
    t.shard(model, shard_placement_fn=lambda param: Shard(dims[id(param)]))
    model.unshard()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected)
    model.reshard()
    for one in (model, plain):
        one(torch.ones(())).backward()
    same_gradients(model, plain, rtol=1e-5 if len(layout[0]) == 2 else 1e-2)


@behavior(
    rows={name: (layout,) for name, layout in NEWER_LAYOUTS.items()},
    newer="empty tensors on dim 1, and trainable parameters of several dtypes in a unit",
    mirrors="prefix_copy: zero_prefix, mixed",
)
def newer_layouts_of_shards(t: Context, layout: tuple) -> None:
    """The same with an empty tensor, and with several dtypes."""
    layouts_of_shards(t, layout)
