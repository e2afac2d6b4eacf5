"""Runs a program on one side: operation by operation, each exception caught and recorded, each state observed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fuzz.extras import Extras
from fuzz.observe import SKIPPED, Observation, Raised, describe, local
from fuzz.parts import build, give, parts_of, register_hooks, tensors_in, units_of
from fuzz.program import ROWS, WIDTH, Op, Program

MODES = ("grad", "no_grad", "inference", "autocast")


def inputs(batch: int, rank: int, requires_grad: bool) -> torch.Tensor:
    """Another input for each batch and rank."""
    generator = torch.Generator().manual_seed(100 * batch + rank + 1)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(requires_grad)


def mode(name: str) -> contextlib.AbstractContextManager:
    return {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }[name]()


def loss_of(output: Any) -> torch.Tensor | None:
    """A scalar of all rows in an output; None if there are none."""
    rows = [one for one in tensors_in(output) if one.shape == (ROWS, WIDTH) and not isinstance(one, nn.Parameter)]
    return sum(torch.tanh(one.float()).square().mean() for one in rows) if rows else None


class Machine(Extras):
    """One side. Subclasses shard the model and find its parameters and gradients.

    `taint`: after a backward that raised, "grads" have any value, and "stale" work of it may be left. No gradient is
    compared or used until both are over. With manual finalization, gradients are "unfinished" from a backward on,
    because each side may have added any part of them. Every side keeps its own `taint`, by the same rules.
    """

    def __init__(self, program: Program, rank: int, world: int) -> None:
        self.program, self.rank, self.world = program, rank, world
        self.model = self.make_model()
        self.stage = self.model.stage
        self.parts = parts_of(self.model)
        self.units = [modules for modules, _ in units_of(program, self.model)]
        self.names = [name for name, _ in self.model.named_parameters()]
        self.graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.saved: dict[str, Any] | None = None
        self.saved_optimizer: dict[str, Any] | None = None
        self.held: dict[str, torch.Tensor | None] = {}
        self.watched: set[str] = set()  # Parameters with a hook.
        self.registered: set[int] = set()  # Parts with a second forward method.
        self.has_begun = False  # A forward of the root has begun.
        self.initialized = False  # One has ended.
        self.is_manual = False  # A separate operation finalizes backwards.
        self.last: Op | None = None
        self.taint: set[str] = set()

    # --- what subclasses know ---

    def make_model(self) -> nn.Module:
        return build(self.program)

    def shard(self) -> None:
        """Shards the model, if this side does."""

    def params(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that optimizers step, by name."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Returns the state that the judge compares after each operation."""
        raise NotImplementedError

    def reshard_all(self) -> None:
        """Frees all gathered parameters, before an operation writes to the shards."""

    # --- the loop ---

    def run(self) -> list[Observation]:
        """Returns the observations after `shard` and after each operation, until the side cannot continue."""
        found = [self._observed(self._begin)]
        for one in self.program.ops:
            if not self.can_go_on(one, found[-1]):
                break
            self.last = one
            found.append(self.observe(one))
        return found

    def _begin(self) -> None:
        self.shard()
        if self.program.late_hooks:
            register_hooks(self.model)

    def can_go_on(self, one: Op, before: Observation) -> bool:
        return True

    def observe(self, one: Op) -> Observation:
        return self._observed(partial(getattr(self, f"do_{one.kind}"), **one.arguments))

    def _observed(self, call: Callable[[], Any]) -> Observation:
        seen = Observation()
        try:
            seen.result = call()
        except Exception as error:
            seen.raised = Raised.of(error)
        self.stage.armed = None
        seen.log, self.stage.log = self.stage.log, []
        seen.taint = frozenset(self.taint)
        seen.state = self.state()
        return seen

    def arm(self, fault: tuple[int, str] | None) -> None:
        """Lets a part, or the hook of a watched parameter, raise."""
        if fault is not None:
            number, where = fault
            if where == "accumulated" and self.is_manual:
                return  # each side comes to it in a backward of its choice
            num = len(self.names) if where == "accumulated" else len(self.parts)
            self.stage.armed = (number % num, where)

    def inputs(self, batch: int) -> torch.Tensor:
        return inputs(batch, self.rank, self.program.input_grad)

    def _part(self, number: int) -> nn.Module:
        return self.parts[number % len(self.parts)]

    def _unit(self, number: int) -> nn.Module:
        modules = self.units[number % len(self.units)]
        return modules[0]

    # --- operations ---

    def do_forward(self, batch=0, mode_name="grad", slot=0, part=-1, fault=None, method="forward"):
        module = self._unit(part)
        number = module.number
        if method == "other" and number not in self.registered:
            return SKIPPED
        x = self.inputs(batch)
        torch.default_generator.manual_seed(1000 + 10 * batch + self.rank)
        self.arm(fault)
        self.begin_forward(number)
        with mode(mode_name):
            call = module if method == "forward" else module.other
            output = call(give(module.part.takes, x), flag=batch % 3 != 0)
            loss = loss_of(output)
        if number == 0:
            self.initialized = True
        if loss is not None and loss.requires_grad:
            self.graphs[slot] = (loss, x)
        return describe(output, x), None if loss is None else loss.detach()

    def begin_forward(self, number: int) -> None:
        """A forward of the root drops the work that a failed backward left."""
        if number == 0:
            self.has_begun = True
            self.taint.discard("stale")

    def do_backward(self, slots=(0,), retain=False, again=False, fault=None):
        chosen = {slot: self.graphs[slot] for slot in dict.fromkeys(slots) if slot in self.graphs}
        if not chosen:
            return SKIPPED
        if not retain and not again:
            for slot in chosen:
                del self.graphs[slot]
        self.arm(fault)
        self.before_backward()
        try:
            self.backward(sum(loss for loss, _ in chosen.values()), retain)
            self.after_backward()
        except Exception:
            for slot in chosen:
                self.graphs.pop(slot, None)
            self.taint |= {"grads", "stale"}
            raise
        return [local(x.grad) for _, x in chosen.values()]

    def backward(self, loss: torch.Tensor, retain: bool) -> None:
        loss.backward(retain_graph=retain)

    def forget_taint(self) -> None:
        """Begins anew. Gradients that the user holds may have any value if those of the model had."""
        if self.taint & {"grads", "unfinished"}:
            self.held = {}
        self.taint.clear()

    def do_drop(self, slot=0):
        self.graphs.pop(slot, None)

    def do_optimizer(self, kind="SGD"):
        self.reshard_all()
        trainable = [param for param in self.params().values() if param.requires_grad]
        self.optimizer = self.saved_optimizer = None
        if not trainable:
            return SKIPPED
        self.optimizer = self.make_optimizer(kind, trainable)
        return None

    def make_optimizer(self, kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "SGD" or self.program.grads:  # torch's AdamW steps gradients of the parameter's dtype only
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)
        # A large eps: with the usual one the first step is a sign, which rounding decides where a gradient is zero.
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)

    def do_step(self):
        if self.optimizer is None or self.taint & {"grads", "unfinished"}:
            return SKIPPED
        self.graphs.clear()
        self.reshard_all()
        self.optimizer.step()
        return None

    def do_zero_grad(self, to_none=True):
        if "unfinished" in self.taint:
            return SKIPPED
        for param in self.params().values():
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        if to_none:
            self.taint.discard("grads")
        return None

    def do_clip(self, max_norm=0.1):
        if self.taint & {"grads", "unfinished"}:
            return SKIPPED
        norm = self.clip(list(self.params().values()), max_norm)
        return norm.full_tensor().detach() if isinstance(norm, DTensor) else norm.detach()

    def clip(self, params: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(params, max_norm)

    def do_train(self, training=True):
        self.model.train(training)

    def do_freeze(self, part=0, trainable=False):
        self.graphs.clear()
        self.reshard_all()
        self._part(part).requires_grad_(trainable)

    def do_state_dict(self, part=0):
        return {key: local(value) for key, value in self._part(part).state_dict().items()}

    def do_save(self):
        self.saved = {key: value.detach().clone() for key, value in self.model.state_dict().items()}

    def do_load(self, assign=False):
        if self.saved is None:
            return SKIPPED
        self.graphs.clear()
        values = {key: value.clone() for key, value in self.saved.items()}
        if assign:
            self.optimizer = None  # it has the parameters of before
            self.watched.clear()
        result = self.model.load_state_dict(values, assign=assign)
        return list(result.missing_keys), list(result.unexpected_keys)
