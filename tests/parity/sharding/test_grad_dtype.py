"""`param.grad_dtype`: random programs compute the same values in the same dtypes unsharded, under FSDP2, and here."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp as stock
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import fsdp2x
from drawn import explore
from fsdp2x.memory import plan_memory
from reference import TORCH_MINOR, TRANSPORTS, full, install_streams, only_fsdp2x, same

pytestmark = pytest.mark.skipif(TORCH_MINOR < 15, reason="FSDP2 ignores grad_dtype before torch 2.15")

# Ranks -> examples; more ranks than cores are slow.
NUM_EXAMPLES = {1: 12, 2: 16, 3: 3, 4: 3}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
GRADS = ((), (), (F32,), (BF16,), (F64,), (None,))  # () leaves it unset
POLICIES = ((None, None), (None, None), (BF16, None), (BF16, F32), (None, BF16))
UNITS = {"layers": (("a",), ("b",), ("c",)), "pair": (("a", "b"),), "root": ()}
EDITS = ("early", "forward", "convert", "assign")


@dataclass(frozen=True)
class Case:
    """`ops`: name and argument. `edit`: the first parameter's last grad_dtype, before the ops or refused after them."""

    dtype: torch.dtype
    grads: list
    policy: tuple
    units: str
    tied: bool
    offload: str | None
    ops: list
    edit: tuple

    @property
    def is_tied(self) -> bool:
        return self.tied and self.units != "layers"


_NAMES = st.sampled_from(["backward", "backward", "hold", "look", "zero", "sgd", "adamw", "assign"])
_CONVERSIONS = st.tuples(st.just("to"), st.sampled_from([F32, BF16, F64]))
CASES = st.builds(
    Case,
    dtype=st.sampled_from([F32, F32, BF16]),
    grads=st.lists(st.sampled_from(GRADS), min_size=6, max_size=6),
    policy=st.sampled_from(POLICIES),
    units=st.sampled_from(sorted(UNITS)),
    tied=st.booleans(),
    offload=st.sampled_from([None, "optimizer", "gradients", "all"]),
    ops=st.lists(st.one_of(st.tuples(_NAMES, st.integers(0, 3)), _CONVERSIONS), min_size=3, max_size=8),
    edit=st.tuples(st.sampled_from(GRADS[2:]), st.sampled_from(EDITS)),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def build(case: Case) -> Net:
    torch.manual_seed(0)
    model = Net().to(case.dtype)
    if case.is_tied:
        model.b.weight = model.a.weight
    for param, grad_dtype in zip(model.parameters(), case.grads, strict=False):
        for dtype in grad_dtype:
            param.grad_dtype = dtype
    return model


def loss_of(model, batch, rank):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * batch + rank))
    return model(x.to(next(model.parameters()).dtype)).double().square().mean()


class Side:
    """The unsharded model, whose gradients are means over the ranks, or a sharded one. `held`: its unreduced ones."""

    def __init__(self, model: Net, ctx, kind: str = "plain") -> None:
        self.model, self.ctx, self.kind, self.held = model, ctx, kind, {}

    def run(self, name, argument) -> None:
        if name in ("backward", "hold"):
            (self.mean if self.kind == "plain" else self.backward)(argument, name == "backward")
        elif name == "zero":
            self.model.zero_grad()
            self.held = {}
        elif name == "to":
            kept = {param: param.grad for param in self.model.parameters() if set_of(param) and self.kind == "plain"}
            for param in kept:
                param.grad = None
            self.model.to(argument)
            for param, grad in kept.items():  # which torch converts and FSDP2 keeps
                param.grad = grad
        elif name == "assign":
            state = {key: value.clone() for key, value in self.model.state_dict().items()}
            self.model.load_state_dict(state, assign=self.kind != "plain")
            if self.kind != "ours":  # FSDP2 keeps the gradients of the parameters of before
                self.model.zero_grad()
        elif name == "sgd":
            torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        elif name == "adamw":
            self.adamw()
        elif self.kind == "ours":
            self.look()

    def mean(self, batch, sync) -> None:
        params = list(self.model.parameters())
        before = [param.grad for param in params]
        self.model.zero_grad()
        for rank in range(self.ctx.world):
            (loss_of(self.model, batch, rank) / self.ctx.world).backward()
        for param, old in zip(params, before, strict=True):
            found = [one for one in (self.held.pop(param, None), param.grad, old if sync else None) if one is not None]
            param.grad, self.held[param] = old, sum(found[1:], found[0])
            if sync:
                param.grad = self.held.pop(param)

    def backward(self, batch, sync) -> None:
        self.model.set_requires_gradient_sync(sync)
        loss_of(self.model, batch, self.ctx.rank).backward()

    @torch.no_grad()
    def adamw(self) -> None:
        params = list(self.model.parameters())
        settings = {"lr": 1e-2, "eps": 1e-2}  # a small eps would round signs of tiny gradients
        if self.kind != "plain":
            return fsdp2x.optim.AdamW(params, **settings).step()
        twins = [nn.Parameter(param.detach().double()) for param in params]
        for twin, param in zip(twins, params, strict=True):
            twin.grad = None if param.grad is None else param.grad.double()
        torch.optim.AdamW(twins, **settings).step()
        for twin, param in zip(twins, params, strict=True):
            param.copy_(twin)

    def look(self) -> None:
        """Pending gradients stay the same objects over backwards, `reshard()`, and conversions to the same dtype."""
        dtype = next(self.model.parameters()).dtype
        for _ in range(2):
            found = {param: whole for param, (whole, _) in self.model.get_pending_gradients().items()}
            assert all(self.held.setdefault(param, whole) is whole for param, whole in found.items())
            self.held = found
            grads = [param.grad for param in self.model.parameters()]
            self.model.to(dtype)
            self.model.reshard()
            own = [
                (param.grad, old) for param, old in zip(self.model.parameters(), grads, strict=True) if set_of(param)
            ]
            assert all(new is old for new, old in own)


def set_of(param) -> tuple:
    return (param.grad_dtype,) if param._has_grad_dtype_override else ()


def facts(model) -> dict:
    return {
        name: (param.dtype, set_of(param), None if param.grad is None else param.grad.dtype)
        for name, param in model.named_parameters()
    }


def values(model) -> list:
    named = list(model.named_parameters())
    found = full([dict(named), {name: param.grad for name, param in named}])
    return [{name: None if value is None else value.double() for name, value in one.items()} for one in found]


def sharded(case: Case, side: str, ctx) -> Side:
    model = build(case)
    policy = MixedPrecisionPolicy(param_dtype=case.policy[0], reduce_dtype=case.policy[1])
    offload = fsdp2x.HostOffloadPolicy(case.offload, pin_memory=False) if case.offload else OffloadPolicy()
    for names in (*UNITS[case.units], ("",)):
        target = [model.get_submodule(name) for name in names]
        target = target[0] if len(target) == 1 else target
        if side == "stock":
            stock.fully_shard(target, mp_policy=policy)
        else:
            options = {"offload_policy": offload} if side == "streams" else {}
            fsdp2x.fully_shard(target, mp_policy=policy, transport=side, auto_wrap=False, **options)
    edit_early(case, model)
    return Side(model, ctx, side if side == "stock" else "ours")


def gradient_bytes(model, world: int, dtypes) -> int:
    """Each gradient takes the rows of the rank with most of them, in cache lines."""
    rows = [-(-param.shape[0] // world) * param[:1].numel() for param in model.parameters()]
    return sum(-(-num * dtype.itemsize // 64) * 64 for num, dtype in zip(rows, dtypes, strict=True))


def edit_early(case: Case, model) -> None:
    if case.edit[1] == "early":
        next(model.parameters()).grad_dtype = case.edit[0][0]


def check_edit(case: Case, model) -> None:
    param, (new, where) = next(model.parameters()), case.edit
    if where == "early" or new == set_of(param):
        return
    model.zero_grad()  # torch refuses an edit that contradicts `.grad`
    with torch.no_grad():
        loss_of(model, 0, 0)  # the first forward, if there was none since a conversion
    state = dict(model.state_dict())
    param.grad_dtype = new[0]
    calls = {"forward": lambda: loss_of(model, 0, 0), "convert": lambda: model.to(F64)}
    with pytest.raises(RuntimeError, match="grad_dtype.*fully_shard"):
        calls.get(where, lambda: model.load_state_dict(state, assign=True))()


def record(case: Case, ctx) -> list[tuple]:
    """Returns each operation, whether it is refused, whether FSDP2 supports it, and what the unsharded model has."""
    plain, steps, has_run, supported = Side(build(case), ctx), [], False, True
    edit_early(case, plain.model)
    if all(param.grad_dtype for param in plain.model.parameters()):
        plan = plan_memory(plain.model, ctx.world, device="cpu", auto_wrap=False)
        dtypes = [param.grad_dtype for param in plain.model.parameters()]
        assert plan.gradient_bytes == gradient_bytes(plain.model, ctx.world, dtypes)
    for name, argument in case.ops:
        converts = name == "to" and argument != next(plain.model.parameters()).dtype
        is_held = bool(plain.held)
        refused = is_held and converts
        if not refused:
            plain.run(name, argument)
        # No conversion after the first forward. A load that assigns unties, and zero_grad leaves unreduced gradients.
        differs = (has_run and converts) or (case.is_tied and name == "assign") or (name == "zero" and is_held)
        supported = supported and not differs
        has_run = has_run or name in ("backward", "hold")
        steps.append((name, argument, refused, supported, values(plain.model), facts(plain.model)))
    return steps


def check(ctx, case: Case) -> None:
    """Body: every side runs the program."""
    only_fsdp2x(ctx)
    steps = record(case, ctx)
    tolerance = {"rtol": 6e-2, "atol": 3e-2} if "bfloat16" in repr(case) else {"rtol": 1e-5, "atol": 1e-6}
    # With grad_dtype=None, gradients have the dtype of the computation or reduction, which a policy changes.
    casts = case.policy != (None, None) or any(one not in ((), (None,)) for one in (*case.grads, case.edit[0]))
    stock_facts: dict[int, dict] = {}
    for side in ("stock", *TRANSPORTS, "streams"):
        if side == "streams":
            install_streams()
        one = sharded(case, side, ctx)
        for index, (name, argument, refused, supported, expected, known) in enumerate(steps):
            what = f"{side}: {name} {argument}"
            if side == "stock" and not supported:
                break
            before = facts(one.model)
            if not refused:
                one.run(name, argument)
            elif side != "stock":
                with pytest.raises(RuntimeError, match=re.escape("zero_grad(set_to_none=True)")):
                    one.model.to(argument)
                assert facts(one.model) == before, what
            same(values(one.model), expected, what, **tolerance)
            mine = facts(one.model)
            for param, (dtype, own, grad) in known.items():
                assert mine[param][:2] == (dtype, own), (what, param, mine[param])
                assert (own == (None,) and casts) or mine[param][2] == grad, (what, param, mine[param], grad)
            if side == "stock":
                stock_facts[index] = mine
                continue
            assert stock_facts.get(index, mine) == mine, (what, mine, stock_facts[index])
            if name == "backward":
                planned = fsdp2x.memory_report(one.model).gradient_bytes
                sizes = gradient_bytes(one.model, ctx.world, [param.grad.dtype for param in one.model.parameters()])
                assert planned == sizes or (side == "streams" and planned > sizes), (what, planned, sizes)
        if side != "stock":
            check_edit(case, one.model)


@pytest.mark.parametrize("world", NUM_EXAMPLES)
def test_random_programs(request, world):
    explore(request, world, check, NUM_EXAMPLES[world], shrink=False, cases=CASES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", NUM_EXAMPLES)
def test_many_random_programs(request, world):
    explore(request, world, check, 200, shrink=True, cases=CASES)
