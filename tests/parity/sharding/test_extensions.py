"""All-gather extensions that keep more than memory: what they write onto ``out`` is what modules compute with."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import streams
from harness import distributed
from models import inputs
from reference import both_transports, full, only_fsdp2x, same, shard, shard_stock

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """The weight that modules compute with: gathered integers and their scale."""

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data, scale, dtype):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, dtype, size, stride):
        return Scaled(inner["data_"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (aten.detach.default, aten.as_strided.default, aten.view.default, aten.t.default):
            held = args[0]
            return Scaled(function(held.data_, *args[1:]), held.scale, held.dtype)
        args, kwargs = pytree.tree_map_only(
            Scaled, lambda held: held.data_.to(held.dtype) * held.scale, (args, kwargs or {})
        )
        return function(*args, **kwargs)


KEEPS_CLASS = {aten.detach.default, aten.clone.default, aten.split.Tensor, aten.view.default, aten.slice.Tensor}
KEEPS_CLASS |= {aten.new_zeros.default, aten.as_strided.default, aten._to_copy.default, aten.empty_like.default}


class Narrow(torch.Tensor):
    """A shard that travels in ``sent``, a dtype of few values, with a scale of its own at each gather."""

    @staticmethod
    def __new__(cls, data, sent):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data, sent):
        self.data_, self.sent = data, sent

    def __tensor_flatten__(self):
        return ["data_"], self.sent

    @staticmethod
    def __tensor_unflatten__(inner, sent, size, stride):
        return Narrow(inner["data_"], sent)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        sent = next(one.sent for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Narrow))
        plain, options = pytree.tree_map_only(Narrow, lambda one: one.data_, (args, kwargs or {}))
        out = function(*plain, **options)
        if function in KEEPS_CLASS:
            return pytree.tree_map_only(torch.Tensor, lambda one: Narrow(one, sent), out)
        return args[0] if function is aten.copy_.default else out

    def fsdp_pre_all_gather(self, mesh):
        largest = self.data_.abs().max().clamp(min=1e-6) if self.data_.numel() else torch.tensor(1e-6)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 100
        return ((self.data_ / scale).add(100).round().to(self.sent),), scale

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is None:
            return Scaled(gathered, scale, param_dtype), (gathered,)
        assert isinstance(out, Scaled)
        out.scale = scale
        return None


class Net(nn.Module):
    """Blocks of a narrow weight, and a frozen fp32 row so that upstream's gathers are of bytes; ours need none."""

    def __init__(self, sent, others=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        for block in self.blocks:
            block.weight = nn.Parameter(Narrow(block.weight.detach(), sent))
            if others:
                block.row = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


UNITS = ("blocks.0", "blocks.1", "blocks.2")
SENT = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16]
SENT += [pytest.param(sent, marks=pytest.mark.full) for sent in (torch.int16, torch.float8_e5m2)]


def train(ctx, model):
    """Each step moves the weights so far that the scale of an earlier one would be seen."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=1.0), []
    for number in range(4):
        loss = model(inputs(ctx.rank, number)).square().sum()
        loss.backward()
        results += [loss.detach(), *(full(block.weight.grad) for block in model.blocks)]
        optimizer.step()
        optimizer.zero_grad()
    return results


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("sent", SENT, ids=str)
def test_a_scale_beside_the_memory_follows_each_gather(ctx, transport, others, sent):
    """For every dtype that is sent, losses and gradients equal FSDP2's, bit for bit."""
    if not others:
        only_fsdp2x(ctx)  # gloo has no such dtypes
    for reshard in (True, False):
        expected = train(ctx, shard_stock(Net(sent), UNITS, reshard_after_forward=reshard))
        sharded = shard(ctx, Net(sent, others), UNITS, transport=transport, reshard_after_forward=reshard)
        same(train(ctx, sharded), expected, f"{reshard=}")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_extensions_overlap_on_a_device(ctx, others, grouped):
    """Bits equal FSDP2's. Inputs, gathers, and what follows them have their own streams, and run ahead of compute."""
    expected = train(ctx, shard_stock(Net(torch.uint8), UNITS))
    recorder = streams.install(grouped=grouped)
    model = shard(ctx, Net(torch.uint8, others), UNITS, transport="streams")
    same(train(ctx, model), expected)
    entries = recorder.entries
    assert streams.races(entries) == []
    lanes = {"pre_all_gather": "copy_in", "all_gather": "gather", "post_all_gather": "compute"}
    for operation, lane in lanes.items():
        assert {entry[1] for entry in entries if entry[0] == operation} == {lane}
    # The second step gathers ahead: a unit's gather is there before the unit in front of it has ended.
    order = [entry[:3] for entry in entries if entry[0] in ("pre_all_gather", "all_gather", "use")]
    begin = [i for i, entry in enumerate(order) if entry[::2] == ("pre_all_gather", "blocks.0")][2]
    ahead = [entry[2] for entry in order[begin:] if entry[0] == "all_gather"]
    used = [i for i, entry in enumerate(order) if i > begin and entry[::2] == ("use", "blocks.0")]
    assert ("all_gather", "gather", "blocks.1") in order[begin : used[1]] and ahead[0] == "blocks.0"
    # A gather that is canceled lets its memory go after it.
    recorder.clear()
    handle = model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()
    del handle
    entries = recorder.entries
    assert streams.races(entries) == []
    streams.every_wait_is_needed(entries, {("compute", "slot"): "outputs are freed while they are gathered"})


@distributed(world_sizes=(2,))
def test_each_wait_of_an_extension_is_needed(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, Net(torch.uint8), UNITS, transport="streams")
    train(ctx, model)
    streams.every_wait_is_needed(
        recorder.entries,
        {
            ("copy_in", "compute"): "inputs are made of shards that an optimizer still writes",
            ("gather", "slot"): "inputs are sent before they are made",
            ("compute", "slot"): "outputs are read before they are gathered",
        },
    )


class Lent(TwoTensor):
    """Two tensors whose shard is what modules compute with."""

    def fsdp_get_unsharded_view(self, mesh, module, mp_policy):
        assert mesh.size() == 1 and isinstance(module, nn.Linear)
        return Lent(self.a, self.b)


class Borrower(nn.Linear):
    """Notes the weight of each forward, and where its parts are."""

    def forward(self, x):
        self.seen = [*getattr(self, "seen", ()), (self.weight, pointers(self.weight))]
        return super().forward(x)


def pointers(tensor) -> list[int]:
    return [tensor.a.data_ptr(), tensor.b.data_ptr()]


def lending(requires_grad=False) -> nn.Linear:
    torch.manual_seed(0)
    model = Borrower(6, 4).requires_grad_(requires_grad)
    weight = model.weight.detach()
    model.weight = nn.Parameter(Lent(weight.clone(), weight * 2), requires_grad=requires_grad)
    return model


@distributed(world_sizes=(1,))
@both_transports
@pytest.mark.parametrize("reshard", [True, False])
def test_a_view_of_the_shard(ctx, transport, reshard):
    """It stays over reshards, follows what is loaded, and is made again for another shard."""
    only_fsdp2x(ctx)
    model = shard(ctx, lending(), transport=transport, reshard_after_forward=reshard)
    x = torch.ones(2, 6)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
            model.load_state_dict(state)
            output = model(x)
            for one in (output.a, output.b):
                same(one, torch.full((2, 4), 7 * value), "output")
            model.reshard()
            assert model.seen[-1][0] is model.seen[0][0] and model.seen[-1][1] == pointers(model.weight.to_local())
        fresh = {name: torch.full_like(tensor, 4.0) for name, tensor in model.state_dict().items()}
        model.load_state_dict(fresh, assign=True)
        same(model(x).b, torch.full((2, 4), 28.0), "output of another shard")
        assert model.seen[-1][1] == pointers(fresh["weight"].to_local())


@distributed(world_sizes=(1, 2))
@both_transports
def test_no_view(ctx, transport):
    """The extension declines, returns something else, or the shard cannot be lent."""
    only_fsdp2x(ctx)
    x = torch.ones(2, 6)
    for get_view in (lambda *_: None, lambda *arguments: torch.empty(4, 6, dtype=torch.float64)):
        model, plain = nn.Linear(6, 4).requires_grad_(False), nn.Linear(6, 4)
        shard(ctx, model, transport=transport)
        plain.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
        model.weight._local_tensor.fsdp_get_unsharded_view = get_view
        if ctx.world > 1 or get_view() is None:
            same(model(x), plain(x).detach(), "output")
        else:
            with pytest.raises(ValueError, match="parameter's local shape, dtype, and device"):
                model(x)
    if ctx.world == 1:
        model = shard(ctx, nn.Linear(6, 4).requires_grad_(False), transport=transport)
        model.weight._local_tensor.fsdp_get_unsharded_view = lambda *_: torch.ones(4, 6)
        with pytest.raises(NotImplementedError, match="plain tensor of .*Linear must return None"):
            model(x)
    for is_trainable in (False, True):
        if ctx.world > 1 or is_trainable:
            model = shard(ctx, lending(is_trainable), transport=transport)
            with pytest.raises(NotImplementedError, match="a frozen parameter on one shard rank"):
                model(x)
    if ctx.world == 1:
        model = shard(ctx, lending(), transport=transport)
        model(x)
        model.reshard()
        model.requires_grad_(True)
        with pytest.raises(NotImplementedError, match="became trainable"):
            model(x)
