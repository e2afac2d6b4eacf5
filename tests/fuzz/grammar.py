"""Draws programs: a model, and phrases of operations as training code has them, mixed with single operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from fuzz.machine import MODES
from fuzz.parts import BACKWARD_FAULTS, CONTAINERS, FORWARD_FAULTS, HOOKS, LEAVES, RETURNS, TAKES
from fuzz.program import POLICIES, Op, Part, Program, op
from reference import TORCH_MINOR

OPTIMIZERS = ("SGD", "AdamW", "ours", "local")
OFFLOADS = ("", "none", "gradients", "all")  # "optimizer" needs fsdp2x's AdamW
GRADS = ("", "bfloat16", "float32", "float64")
# Name, values, whether it takes `recurse`.
SETTERS = (
    ("set_reshard_after_backward", (False, True), True),
    ("set_reshard_after_forward", (False, True), True),
    ("set_requires_gradient_sync", (False, True), True),
    ("set_requires_all_reduce", (False, True), True),
    ("set_is_last_backward", (False, True), False),
    ("set_gradient_divide_factor", (1.0, 3.0), False),
    ("set_force_sum_reduction_for_comms", (True, False), False),
    ("set_reduce_scatter_unused_params", (True, False), True),
    ("set_separate_reduce_scatter_group", (True, False), True),
    ("set_keep_unsharded_storage", (True, False), True),
    ("set_reduce_scatter_max_input_buffers", (1, 3), True),
    ("set_allocate_memory_from_process_group_for_comm", (True, False), False),
    ("_set_unshard_async_op", (True, False), False),
    ("set_manual_backward_finalization", (True, False), False),
)


class Grammar:
    """Draws programs from random numbers. The same seed gives the same program."""

    def __init__(self, seed: int, world: int) -> None:
        self._random, self._world = Random(seed), world

    def pick(self, values) -> Any:
        return self._random.choice(list(values))

    def number(self, last: int) -> int:
        return self._random.randint(0, last)

    def chance(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    # --- the model ---

    def reshard(self, shards: int) -> bool | int | None:
        divisors = [size for size in range(1, shards + 1) if shards % size == 0]
        return self.pick([True, None, None, False, *divisors])

    def part(self, shards: int, depth: int) -> Part:
        """A leaf, or a container of parts of less depth."""
        parts, together, frozen = (), 0, False
        if depth == 0 or self.chance(2):
            kind = self.pick(sorted(LEAVES))
            frozen = self.chance(5)
        else:
            kind = self.pick(CONTAINERS)
            parts = tuple(self.part(shards, depth - 1) for _ in range(self.pick([1, 2, 2, 3])))
            # Modules of one list each run once per forward, which only these promise.
            if kind in ("sequence", "residual") and len(parts) > 1 and self.chance(2):
                together = self.pick(range(2, len(parts) + 1))
        return Part(
            kind,
            size=1 + self.number(4),
            frozen=frozen,
            unit=self.chance(2),
            reshard=self.reshard(shards),
            parts=parts,
            together=together,
            **self.form(),
        )

    def form(self) -> dict[str, Any]:
        return {
            "takes": self.pick(TAKES) if self.chance(5) else "rows",
            "returns": self.pick(RETURNS) if self.chance(3) else "rows",
            "hooks": tuple(dict.fromkeys(self.pick(HOOKS) for _ in range(2))) if self.chance(5) else (),
        }

    def grads(self) -> tuple[str, ...]:
        """FSDP2 ignores them before torch 2.15."""
        drawn = tuple(self.pick(GRADS) for _ in range(3)) if self.chance(6) else ()
        return drawn if TORCH_MINOR >= 15 else ()

    def program(self) -> Program:
        mesh = "2d" if self._world == 4 and self.chance(2) else "1d"
        shards = self._world // 2 if mesh == "2d" else self._world
        parts = tuple(self.part(shards, 2) for _ in range(self.pick([1, 2, 2, 3])))
        ops = [op("optimizer", kind=self.pick(OPTIMIZERS))] if self.chance(2) else []
        for _ in range(1 + self.number(7)):
            ops += self.phrase()
        return Program(
            tree=Part("sequence", parts=parts, **self.form()),
            ops=tuple(ops),
            seed=self.number(99),
            reshard=self.reshard(shards),
            policy=self.pick(sorted(POLICIES)) if self.chance(3) else "full",
            mesh=mesh,
            input_grad=self.chance(2),
            ties=self.chance(4),
            columns=self.chance(5),
            late_hooks=self.chance(3),
            meta=self.chance(8),
            grads=self.grads(),
            offload=tuple(self.pick(OFFLOADS) for _ in range(3)) if self.chance(4) else (),
        )

    # --- operations ---

    def phrase(self) -> list[Op]:
        phrases: tuple[tuple[Callable[[], list[Op]], int], ...] = (
            (self.training, 5),
            (self.accumulation, 2),
            (self.several_graphs, 1),
            (self.failure, 2),
            (self.evaluation, 1),
            (self.twice_backward, 1),
            (self.pipeline, 1),
            (lambda: [self.single()], 8),
        )
        return self.pick([phrase for phrase, weight in phrases for _ in range(weight)])()

    def forward(self, slot: int = 0) -> Op:
        arguments: dict[str, Any] = {"batch": self.number(5)}
        if slot:
            arguments["slot"] = slot
        if self.chance(8):
            arguments["mode_name"] = self.pick(MODES[1:])
        if self.chance(10):
            arguments["method"] = "other"
        return op("forward", **arguments)

    def training(self) -> list[Op]:
        ops = [self.forward(), op("backward")]
        if self.chance(4):
            ops.append(op("clip"))
        if self.chance(2):
            ops.append(op("step"))
        if self.chance(2):
            ops.append(op("zero_grad") if self.chance(2) else op("zero_grad", to_none=False))
        return ops

    def accumulation(self) -> list[Op]:
        last = [self.forward(), op("backward")]
        if self.chance(4):
            return [self.forward(), op("accumulate", before_last=self.pick(["nothing", "reduce_scatter"])), *last]
        name = self.pick(["set_requires_gradient_sync"] * 3 + ["set_requires_all_reduce", "set_is_last_backward"])
        ops = [op("set", name=name, value=False)]
        for _ in range(self.pick([1, 1, 2])):
            ops += [self.forward(), op("backward")]
        return [*ops, op("set", name=name, value=True), *last]

    def several_graphs(self) -> list[Op]:
        order = self.pick([((0, 1),), ((0,), (1,)), ((1,), (0,)), ((1,),)])
        return [self.forward(), self.forward(1), *(op("backward", slots=slots) for slots in order)]

    def twice_backward(self) -> list[Op]:
        return [self.forward(), op("backward", retain=True), op("backward")]

    def pipeline(self) -> list[Op]:
        """Backwards of micro-batches that are finalized together, as by schedules of pipelines."""
        manual = partial(op, "set", name="set_manual_backward_finalization", unit=-1)
        ops = [manual(value=True)]
        for _ in range(self.pick([2, 3, 4])):
            ops += [self.forward(), op("backward")]
        ops.append(op("finalize", asynchronous=self.chance(2)))
        return [*ops, manual(value=False)] if self.chance(2) else ops

    def evaluation(self) -> list[Op]:
        forward = op("forward", batch=self.number(5), mode_name=self.pick(["no_grad", "inference"]))
        return [op("train", training=False), forward, op("train")]

    def fault(self, where: tuple[str, ...]) -> tuple[int, str]:
        return self.number(7), self.pick(where)

    def failure(self) -> list[Op]:
        """An exception in forward or backward, and what training code does about it: nothing, or something."""
        if self.chance(2):
            ops = [op("forward", batch=self.number(5), fault=self.fault(FORWARD_FAULTS))]
            return ops + self.pick([[op("reset")], [op("reset")], [op("zero_grad")], []])
        fault = self.fault(self.pick((("gradient",), BACKWARD_FAULTS)))
        watch = [op("watch", param=fault[0])] if fault[1] == "accumulated" else []
        return [*watch, self.forward(), op("backward", fault=fault), op("reset")]

    def setter(self) -> Op:
        name, values, recurses = self.pick(SETTERS)
        arguments = {"recurse": False} if recurses and self.chance(4) else {}
        return op("set", name=name, value=self.pick(values), unit=self.pick([-1, -1, 0, 1, 2]), **arguments)

    def single(self) -> Op:
        number, coin = self.number(7), self.chance(2)
        return self.pick(
            (
                *(self.setter() for _ in range(4)),
                *(op(kind) for kind in ("step", "zero_grad", "clip", "save", "reset", "hold", "full", "report")),
                *(op(kind) for kind in ("collect", "deepcopy", "save_optimizer", "load_optimizer", "torch_save")),
                self.forward(),
                op("forward", part=number, batch=self.number(5)),
                op("backward", slots=(self.number(1),), retain=coin),
                op("input_grad", retain=coin),
                op("generate", batch=number),
                op("drop", slot=self.number(1)),
                op("unshard", unit=number, asynchronous=coin),
                op("reshard", unit=number),
                op("prefetch", which=self.pick(["forward", "backward"]), unit=number, targets=(self.number(7),)),
                op("hook", unit=number),
                op("finalize", asynchronous=coin),
                op("register", part=self.pick([-1, -1, 0, 1])),
                op("optimizer", kind=self.pick(OPTIMIZERS)),
                op("freeze", part=number, trainable=coin),
                op("write", param=number, data=coin),
                op("foreign_grad", param=number),
                op("watch", param=number),
                op("apply", how=self.pick(["cpu", "float", "nothing"])),
                op("load", assign=coin),
                op("state_dict", part=number),
                op("dcp_state", full=coin),
            )
        )


def draw(seed: int, world: int) -> Program:
    """The program of a seed."""
    return Grammar(seed, world).program()
