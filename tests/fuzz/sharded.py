"""The sharded sides: stock's fully_shard, and ours over each transport."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2x
from fuzz.known import STEPS
from fuzz.machine import Machine
from fuzz.observe import SKIPPED, local
from fuzz.parts import build, units_of
from fuzz.program import POLICIES, shard_dim
from reference import full

# Timeout of a wait for a peer over shared memory, so that ranks that diverge end soon.
PATIENCE = timedelta(seconds=10)


class Sharded(Machine):
    """The common part of both implementations. `first`: the parameters as `fully_shard` left them."""

    def fully_shard(self, module, **options):
        raise NotImplementedError

    def shard(self):
        dtypes = [one and getattr(torch, one) for one in POLICIES[self.program.policy]]
        names = ("param_dtype", "reduce_dtype", "output_dtype")
        policy = MixedPrecisionPolicy(**dict(zip(names, dtypes, strict=True)))
        options: dict[str, Any] = {"mp_policy": policy}
        if self.program.mesh == "2d":
            shape = (2, self.world // 2)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        shards = self.world // 2 if self.program.mesh == "2d" else self.world
        if self.program.columns:
            options["shard_placement_fn"] = lambda param: Shard(shard_dim(self.program, param.shape, shards))
        for modules, reshard in units_of(self.program, self.model):
            target = modules[0] if len(modules) == 1 else modules
            self.fully_shard(target, reshard_after_forward=reshard, **options)
        self.first = dict(self.model.named_parameters())
        if self.program.meta:
            self.model.to_empty(device="cpu")
            self._fill()

    def make_model(self):
        return build(self.program, on_meta=self.program.meta)

    @torch.no_grad()
    def _fill(self):
        """The values of the model that was not made on the meta device."""
        whole = build(self.program).state_dict()
        for name, target in self.model.state_dict().items():
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(whole[name], target.device_mesh, target.placements))
            else:
                target.copy_(whole[name])

    def params(self):
        here = dict(self.model.named_parameters())
        for name, param in here.items():
            # Not what is kept in a smaller world between forward and backward.
            if isinstance(param, DTensor) and param.device_mesh == self.first.get(name, param).device_mesh:
                self.first[name] = param
        # A load that assigns unties what is shared, until it is gathered.
        self.first = {name: param for name, param in self.first.items() if name in here}
        return self.first

    def fsdp_modules(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if isinstance(module, stock.FSDPModule)]

    def reshard_all(self):
        for module in self.fsdp_modules():
            module.reshard()

    def state(self):
        names = {
            name: isinstance(param, DTensor) for name, param in self.model.named_parameters(remove_duplicate=False)
        }
        params = self.params()
        return {
            "grads": {name: local(param.grad) for name, param in params.items()},
            "params": {name: local(param) for name, param in params.items()},
            "buffers": {name: local(buffer) for name, buffer in self.model.named_buffers()},
            "requires_grad": {name: param.requires_grad for name, param in params.items()},
            "held": {name: local(grad) for name, grad in self.held.items()},
            "sharded": names,
            "is_root": [module._get_fsdp_state()._is_root for module in self.fsdp_modules()],
        }

    def do_reset(self):
        self.graphs.clear()
        self.model.reset_iter_state()
        self.forget_taint()

    def do_unshard(self, unit=0, asynchronous=False):
        if not self.initialized:
            return SKIPPED
        handle = self._unit(unit).unshard(async_op=asynchronous)
        if handle is not None:
            handle.wait()

    def do_reshard(self, unit=0):
        self._unit(unit).reshard()

    def set(self, module, name, value, keywords):
        getattr(module, name)(value, **keywords)

    def full(self):
        return full(self.params())

    def do_prefetch(self, which="forward", unit=0, targets=()):
        chosen = [self._unit(target) for target in dict.fromkeys(targets)]
        getattr(self._unit(unit), f"set_modules_to_{which}_prefetch")(chosen)

    def do_hook(self, unit=0, factor=0.5):
        self._unit(unit).set_all_reduce_hook(lambda rows: rows.mul_(factor))

    def finalize(self, asynchronous):
        handle = self.model.finalize_backward(async_op=asynchronous)
        if handle is not None:
            handle.wait()

    def do_register(self, part=-1):
        super().do_register(part)
        self.register(self._unit(part))

    def register(self, module: nn.Module) -> None:
        raise NotImplementedError


class Stock(Sharded):
    """Upstream's. After an exception its state is undefined until `reset_iter_state`: it runs nothing else before."""

    def fully_shard(self, module, **options):
        stock.fully_shard(module, **options)

    @contextlib.contextmanager
    def generation(self):
        groups = [group for module in self.fsdp_modules() for group in module._get_fsdp_state()._fsdp_param_groups]
        found = [group for group in groups if group.is_sharded]
        yield
        for group in found:
            group.reshard()

    @contextlib.contextmanager
    def accumulation(self, before_last):
        groups = [group for module in self.fsdp_modules() for group in module._get_fsdp_state()._fsdp_param_groups]
        before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
        for group in groups:
            group.all_reduce_grads = False
            group.reduce_grads = group.reduce_grads and before_last != "nothing"
        try:
            yield
        finally:
            for group, sync, all_reduce in before:
                group.reduce_grads, group.all_reduce_grads = sync, all_reduce

    def register(self, module):
        stock.register_fsdp_forward_method(module, "other")

    def can_go_on(self, one, before):
        return before.raised is None or self.last.kind not in STEPS or one.kind == "reset"


class Ours(Sharded):
    """Ours over one transport."""

    def __init__(self, program, rank, world, transport: str):
        super().__init__(program, rank, world)
        self.transport = transport

    def fully_shard(self, module, **options):
        if self.program.offload:
            options["offload_policy"] = self._offloads(module)
        fsdp2x.fully_shard(module, transport=self.transport, timeout=PATIENCE, auto_wrap=False, **options)

    def _offloads(self, module):
        """A map of the parameters that no unit has yet, or one policy for a list, whose modules share names."""
        modes = itertools.cycle(self.program.offload)
        if isinstance(module, list):
            return fsdp2x.HostOffloadPolicy(next(modes) or "none", pin_memory=False)
        named = ((name, next(modes)) for name, param in module.named_parameters() if not isinstance(param, DTensor))
        return {name: fsdp2x.HostOffloadPolicy(mode, pin_memory=False) for name, mode in named if mode}

    def register(self, module):
        fsdp2x.register_fsdp_forward_method(module, "other")

    def full(self):
        # In the order of the names; each parameter once, without buffers.
        params = self.params()
        return {name: value for name, value in fsdp2x.full_tensors(self.model) if name in params}

    def do_report(self):
        str(fsdp2x.describe(self.model))
        str(fsdp2x.memory_report(self.model, self.optimizer))

    def generation(self):
        return fsdp2x.unsharded(self.model)

    def accumulation(self, before_last):
        return fsdp2x.accumulate(self.model, last=False, before_last=before_last)

    def make_optimizer(self, kind, params):
        if kind == "ours" and not self.program.grads:
            return fsdp2x.optim.AdamW(params, lr=1e-2, eps=1e-2)
        if kind == "local":
            return fsdp2x.local_optimizer(super().make_optimizer("AdamW", params))
        return super().make_optimizer(kind, params)

    def clip(self, params, max_norm):
        return fsdp2x.clip_grad_norm_(params, max_norm)

    def state(self):
        report = fsdp2x.describe(self.model)
        # Modules that ran before the root are roots of their own.
        roots = {module._get_fsdp_state().root for module in self.fsdp_modules()} - {None}
        stats = [root.stats() for root in roots]
        return {
            **super().state(),
            "memory": {
                "slots": sum(one["gather_slots_owned"] for one in stats),
                "scratches": sum(one["scratch_slots_owned"] for one in stats),
                "keeps": any(one.arguments.get("name") == "set_keep_unsharded_storage" for one in self.program.ops),
                "ranks": dist.get_world_size(),
                "parts": max(len(module._get_fsdp_state().groups) for module in self.fsdp_modules()),
                "states": [unit.param_state for unit in report.units if unit.params],
            },
        }
