"""The side without sharding: a plain model whose gradients are averaged over the ranks when sharded ones would be."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from fuzz.machine import Machine
from fuzz.observe import SKIPPED, local
from fuzz.program import shard_dim


class Unsharded(Machine):
    """`pending`: each parameter's gradients on this rank since its last synchronized backward."""

    def __init__(self, program, rank, world):
        super().__init__(program, rank, world)
        self.pending: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Settings that setters change, by unit.
        usual = {"sync": True, "all_reduce": True, "unused": False, "factor": None, "hook": 1.0}
        self.options = [dict(usual) for _ in self.units]
        self._find_owners()

    def _find_owners(self):
        """The unit of each parameter."""
        self.owner: dict[torch.nn.Parameter, int] = {}
        for number, modules in enumerate(self.units):
            for module in modules:
                for param in module.parameters():
                    self.owner.setdefault(param, number)
        self.name_of = {param: name for name, param in self.model.named_parameters()}

    @property
    def shards(self) -> int:
        return self.world // 2 if self.program.mesh == "2d" else self.world

    def params(self):
        return dict(self.model.named_parameters())

    def state(self):
        params = self.params()
        return {
            "grads": self.cut({name: param.grad for name, param in params.items()}),
            "params": self.cut(params),
            "buffers": {name: local(buffer) for name, buffer in self.model.named_buffers()},
            "requires_grad": {name: param.requires_grad for name, param in params.items()},
            "held": self.cut(self.held),
            "pending": bool(self.pending),
        }

    def cut(self, values):
        found = {}
        for name, value in values.items():
            if value is not None:
                dim = shard_dim(self.program, value.shape, self.shards)
                num = -(-value.shape[dim] // self.shards)
                start = min(num * (self.rank % self.shards), value.shape[dim])
                value = local(value.narrow(dim, start, min(num, value.shape[dim] - start)).contiguous())
            found[name] = value
        return found

    def do_state_dict(self, part=0):
        return self._rows(super().do_state_dict(part), self._part(part))

    def do_torch_save(self):
        return self._rows(super().do_torch_save(), self.model)

    def do_dcp_state(self, full=False):
        found = super().do_dcp_state(full)
        return ({} if self.rank else found) if full else self._rows(found, self.model)

    def _rows(self, values, module):
        """Cuts a state dict into this rank's rows. Buffers stay complete on every rank."""
        names = dict(module.named_parameters(remove_duplicate=False))
        return {key: self.cut({key: value})[key] if key in names else value for key, value in values.items()}

    def begin_forward(self, number):
        if number == 0 and "stale" in self.taint:
            self.pending.clear()
        super().begin_forward(number)

    def backward(self, loss, retain):
        params = list(self.owner)
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            super().backward(loss, retain)
            for param in params:
                if param.grad is not None:
                    self.pending[param] = self.pending[param] + param.grad if param in self.pending else param.grad
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def after_backward(self):
        super().after_backward()
        if not self.is_manual:
            self.synchronise()

    def synchronise(self):
        """Averages pending gradients of units that synchronize, and adds them to `.grad`."""
        for param, number in self.owner.items():
            options = self.options[number]
            if not options["sync"] or self.program.mesh == "2d" and not options["all_reduce"]:
                continue
            if options["unused"] and param.requires_grad:
                self.pending.setdefault(param, torch.zeros_like(param, dtype=param.grad_dtype))
            if param not in self.pending:
                continue
            total = self.pending.pop(param).double()
            dist.all_reduce(total)
            mean = (total / (options["factor"] or self.world) * options["hook"]).to(param.grad_dtype or param.dtype)
            if param.grad is None:
                param.grad = mean
            else:
                param.grad.add_(mean)
            if (name := self.name_of[param]) in self.watched and param.requires_grad:
                self.note_accumulated(name, self.cut({name: param.grad})[name])

    def do_reset(self):
        self.graphs.clear()
        self.pending.clear()
        self.forget_taint()
        if self.has_begun:  # before, there is no iteration to drop
            for param in self.owner:
                param.grad = None

    def watch(self, name):
        """Runs where gradients are averaged."""

    def do_apply(self, how="cpu"):
        before = [(param, param.grad) for param in self.params().values() if self.program.grads]
        for param, _ in before:
            param.grad = None
        super().do_apply(how)
        for param, grad in before:
            param.grad = grad  # which torch converts and FSDP2 keeps

    def do_load(self, assign=False):
        before = {name: param.grad_dtype for name, param in self.model.named_parameters(remove_duplicate=False)}
        result = super().do_load(assign)
        if assign and result != SKIPPED:
            self._find_owners()
            for name, param in self.model.named_parameters(remove_duplicate=False) if self.program.grads else ():
                param.grad_dtype = before[name]  # which torch forgets and FSDP2 keeps
        return result

    def do_deepcopy(self):
        raise AssertionError("what sharded models raise")

    def accumulation(self, before_last):
        @contextlib.contextmanager
        def changed():
            before = [dict(options) for options in self.options]
            for options in self.options:
                options.update(all_reduce=False, sync=options["sync"] and before_last != "nothing")
            try:
                yield
            finally:
                self.options = before

        return changed()

    def set(self, module, name, value, keywords):
        is_manual = name == "set_manual_backward_finalization" and module is self.model
        if is_manual and not value and "unfinished" in self.taint:
            raise RuntimeError("set_manual_backward_finalization cannot change mode after backward starts")
        keys = {
            "set_requires_gradient_sync": ("sync", "all_reduce"),
            "set_requires_all_reduce": ("all_reduce",),
            "set_reduce_scatter_unused_params": ("unused",),
            "set_gradient_divide_factor": ("factor",),
        }.get(name, ())
        below = set(module.modules())
        recursive = keywords.get("recurse", True) and name != "set_gradient_divide_factor"
        for modules, options in zip(self.units, self.options, strict=True):
            if module in modules or recursive and any(one in below for one in modules):
                options.update(dict.fromkeys(keys, value))

    def do_hook(self, unit=0, factor=0.5):
        self.options[unit % len(self.units)]["hook"] = factor

    def finalize(self, asynchronous):
        if self.is_manual:
            self.synchronise()
