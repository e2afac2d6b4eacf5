"""Interrupts one part of a step at its k-th place on some ranks, and judges what all ranks do then.

A signal handler runs between two instructions of Python's main thread, so it raises before or after functions in C. The
profile function of this file raises there: when a function of fsdp2x or of the model begins, and before and after each
call from there to C, whose result is then lost.

All ranks catch what they get, clear their gradients, and go on. No rank may wait for the timeout, and soon a step must
have the gradients of the unsharded model on all ranks. After an interrupted norm or save, the step ends with another
one. Over shared memory, an error in other parts may also ask for a restart.
"""

import contextlib
import inspect
import math
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp2x
from fsdp2x.base import torch_private
from fsdp2x.base.failures import call_of, calling, exchange, gather_on_rank_0, on_rank_0
from models import STACK_UNITS, Stack, inputs
from reference import full, shard

TIMEOUT_S = 30.0
LIMIT_S = 8.0  # of a step, on a busy machine
PATIENCE_S = 1.0
OVER_GROUP = ("clip", "save")  # parts that use the process group also over shared memory
_PLACES = str(Path(fsdp2x.__file__).parent), str(Path(__file__).parent / "models.py")


class Alarm(Exception):
    """Raised by a handler of the user's."""


class Interrupt:
    """Raises at the place number ``at`` of the block, counted from 1. ``seen`` is how many there were.

    ``after``: the name of a function. Places before its first call do not count.
    """

    def __init__(self, at: int = 0, after: str = "", is_call: bool = False) -> None:
        self.at, self.after, self.seen, self.where = at, after, 0, ""
        self.is_call = is_call

    def __enter__(self) -> "Interrupt":
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_) -> None:
        sys.setprofile(None)

    def _profile(self, frame, event: str, arg) -> None:
        code, called = frame.f_code, getattr(arg, "__name__", "")
        if self.after:
            self.after = "" if code.co_name == self.after else self.after
            return
        if code.co_filename.startswith(_PLACES) and (event in ("c_call", "c_return") or _enters(frame, event)):
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                self.where = f"{code.co_qualname}:{frame.f_lineno} {event} {called}"
                # Ranks exchange exceptions of a call on files, except those that do not derive from Exception.
                raise Alarm if self.at % 2 and not self.is_call else KeyboardInterrupt


def _enters(frame, event: str) -> bool:
    # A generator is also entered where it is destroyed. Python drops exceptions there, also those of signal handlers.
    return event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR


class Program:
    """A sharded model that has trained for a step. ``parts`` are what can be interrupted."""

    def __init__(self, ctx, transport: str) -> None:
        self.ctx, self.number, self.is_shm = ctx, 0, transport == "shm"
        self.model = shard(ctx, Stack(), STACK_UNITS, transport=transport, timeout=timedelta(seconds=TIMEOUT_S))
        tokens: list = [None] * ctx.world
        dist.all_gather_object(tokens, uuid.uuid4().hex)
        self.store, self.num_met = dist.PrefixStore(tokens[0], torch_private.store_of(dist.group.WORLD)), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.parts = {"train": self.train, "clip": self.clip, "step": self.optimizer.step}
        self.parts |= {"save": self.save, "unshard": self.unshard}
        for part in self.parts.values():  # the first ones make groups and agree
            part()
        self.train()

    def train(self) -> None:
        self.model.zero_grad()
        self.number += 1
        self.model(inputs(self.ctx.rank, self.number % 3)).square().mean().backward()

    def clip(self) -> None:
        fsdp2x.clip_grad_norm_(self.model.parameters(), math.inf)

    def save(self) -> None:
        """Exchanges what a checkpoint exchanges."""
        with calling(call_of("save", self.model, self.model.parameters())):
            laid_out = on_rank_0(lambda: list(range(100)))
            gather_on_rank_0(lambda: laid_out)
            exchange("done")

    def unshard(self) -> None:
        self.model.blocks[0].unshard()
        self.model.blocks[0].reshard()

    def begins_at(self, name: str) -> str:
        # Over shared memory, peers wait for a rank that does not begin to clip or save as long as the timeout.
        return "reported" if self.is_shm and name in OVER_GROUP else ""

    def count(self, name: str) -> int:
        """Returns the number of places in a part."""
        with Interrupt(after=self.begins_at(name)) as counted:
            self.parts[name]()
        return counted.seen

    def attempt(self, *names: str, at: int = 0) -> tuple[str, float, str]:
        """Returns what parts raised, their seconds, and where they were interrupted, if they were."""
        told, began, interrupt = "", time.monotonic(), Interrupt(at, self.begins_at(names[0]), names[0] == "save")
        try:
            with interrupt if at else contextlib.nullcontext():
                for name in names:
                    self.parts[name]()
        except (Exception, KeyboardInterrupt) as error:
            told = f"{type(error).__name__}: {error}"
        return told, time.monotonic() - began, interrupt.where

    def meet(self) -> bool:
        """Returns whether all ranks come here within a while. If not, those that do not go on with another step."""
        key, began = f"met {self.num_met}", time.monotonic()
        num = self.store.add(key, 1)
        while num < self.ctx.world and time.monotonic() - began < PATIENCE_S:
            time.sleep(0.01)
            num = self.store.add(key, 0)
        if num < self.ctx.world and self.store.add(key, -1) < self.ctx.world - 1:
            return False
        self.num_met += 1
        return True

    def explore(self, name: str, at: int, victims: set[int]) -> tuple[str, bool]:
        """Returns what is wrong, and whether the model can go on. Collective, the same on every rank."""
        mine = [self.attempt(name, at=at if self.ctx.rank in victims else 0)]
        step = ("train", name) if name in OVER_GROUP else ("train",)
        for _ in range(2):
            mine.append(self.attempt(*step))
            while not self.meet():
                mine.append(self.attempt(*step))
            everyone: list = [None] * self.ctx.world
            dist.all_gather_object(everyone, mine)
            told = [[error for error, _, _ in theirs] for theirs in everyone]
            case = f"{name} at {at}, {[theirs[0][2] for theirs in everyone]}: {everyone}"
            if any(seconds > LIMIT_S for theirs in everyone for _, seconds, _ in theirs):
                return f"too slow: {case}", False
            if any(theirs[0][2] and not theirs[0][0] for theirs in everyone):
                return f"the exception is lost: {case}", False
            if not any(errors[-1] for errors in told):
                return self._judge(case), True
            self.model.reset_iter_state()
        # Over shared memory, other orders or errors in a step need a restart. Nothing makes up for an optimizer step.
        is_final = (self.is_shm and name not in OVER_GROUP) or all(
            "number of optimizer steps" in errors[-1] for errors in told
        )
        return ("" if is_final and all(errors[-1] for errors in told) else f"no right step: {case}"), False

    def _judge(self, case: str) -> str:
        model, plain = self.model, Stack()
        with torch.no_grad():
            for param, value in zip(plain.parameters(), full(list(model.parameters())), strict=True):
                param.copy_(value)
        found = full([param.grad for param in model.parameters()])
        numbers: list = [None] * self.ctx.world
        dist.all_gather_object(numbers, self.number % 3)
        for rank, number in enumerate(numbers):
            (plain(inputs(rank, number)).square().mean() / self.ctx.world).backward()
        for (name, param), gradient in zip(plain.named_parameters(), found, strict=True):
            if not torch.allclose(param.grad, gradient, rtol=1e-4, atol=1e-6):
                return f"the gradient of {name} is wrong: {case}"
        return ""
