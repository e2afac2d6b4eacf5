#!/usr/bin/env python3
"""Sampling one step ahead: torchrun --nproc_per_node=2 examples/grpo_async.py (half a minute on two cores).

The task, model, and update are those of `grpo_toy.py`. Here another process samples while the trainers train:

    trainers   update 1 | push | update 2 | push | update 3
    engine     sample 2 | take | sample 3 | take | sample 4

So a response comes from weights that are one update old, and importance weights correct the loss. Rank 0 starts the
engine, this file with `--serve`. It sends prompts and takes responses over a pipe. The weights of all ranks go to the
engine by `fsdp2x.sync`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from grpo_toy import Trainer, build_model, check_rise, make_prompts, settings_of

from fsdp2x import rollout, sync

TIMEOUT_S = 120.0  # for each message of the other side


@dataclass
class Answer:
    """Responses to all prompts of a step, the version of their weights, and when they were sampled.

    Both processes read the host's clock `time.monotonic`.
    """

    responses: list[rollout.Completion]
    version: int
    began: float
    ended: float


# ---- the engine's process


def run_engine(pipe: Connection, address: str) -> None:
    """Samples what is asked for, and takes weights between two requests. Ends when the trainers leave."""
    torch.set_num_threads(1)
    model = build_model().eval().requires_grad_(False)
    weights = sync.engine.Parameters(model.state_dict())
    with contextlib.closing(sync.engine.Receiver(address, weights)) as receiver:
        pipe.send("ready")
        while wait([pipe, *receiver.sockets], TIMEOUT_S):
            if pipe.poll():  # before a push, because it was sent before
                try:
                    request = pipe.recv()
                except EOFError:
                    return
                if request is None:
                    return
                began = time.monotonic()
                with receiver.reading() as version:
                    responses = rollout.sample(model, *request)
                pipe.send(Answer(responses, version, began, time.monotonic()))
            receiver.poll()


# ---- the trainers' side


class Engine:
    """The engine of all ranks. Rank 0 has its process and the pipe to it."""

    def __init__(self) -> None:
        """Starts the process, before the ranks meet. `wait_until_ready` comes after that."""
        self.address = f"@grpo-async-{os.environ['MASTER_PORT']}"  # the same on all ranks of a run
        self._pipe: Connection | None = None
        if os.environ["RANK"] == "0":
            self._pipe, theirs = multiprocessing.Pipe()
            words = [f"--serve={theirs.fileno()}", f"--address={self.address}"]
            self._process = subprocess.Popen([sys.executable, __file__, *words], pass_fds=[theirs.fileno()])
            theirs.close()

    def wait_until_ready(self) -> None:
        self._receive()

    def ask(self, prompts: list[list[int]], sampling: rollout.Sampling) -> None:
        """Sends all ranks' prompts and returns at once."""
        if self._pipe is not None:
            self._pipe.send((prompts, sampling))

    def collect(self) -> Answer:
        """Waits for the answer, on every rank."""
        return self._receive()

    def _receive(self) -> Any:
        answers = [None]
        if self._pipe is not None:
            if not self._pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"the engine did not answer in {TIMEOUT_S:.0f} s")
            answers[0] = self._pipe.recv()
        dist.broadcast_object_list(answers)
        return answers[0]

    def close(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._pipe.send(None)
            self._process.wait(TIMEOUT_S)


def mine(responses: list[rollout.Completion]) -> list[rollout.Completion]:
    """Returns the responses to this rank's prompts, with the prompts numbered as in the rank's own list."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return [
        rollout.Completion(one.prompt // world, one.tokens, one.log_probs)
        for one in responses
        if one.prompt % world == rank
    ]


def train(trainer: Trainer, engine: Engine, num_steps: int) -> tuple[list[float], float, float]:
    """Runs the loop.

    Returns:
        The mean rewards of the steps. The seconds in which the engine sampled ahead, and those of them in which the
        trainers updated the policy.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rewards, sampled, overlapped = [], 0.0, 0.0
    update = (0.0, 0.0)  # when the last one began and ended
    with sync.connect(trainer.policy, sync.Peer(engine.address), names="model") as session:
        session.push(version=0)
        engine.ask(make_prompts(0), settings_of(seed=0))
        for step in range(num_steps):
            answer = engine.collect()
            if step:
                sampled += answer.ended - answer.began
                overlapped += max(0.0, min(answer.ended, update[1]) - max(answer.began, update[0]))
            if step + 1 < num_steps:
                engine.ask(make_prompts(step + 1), settings_of(seed=step + 1))
            began = time.monotonic()
            reward, _ = trainer.update(make_prompts(step)[rank::world], mine(answer.responses))
            update = (began, time.monotonic())
            session.push(version=step + 1)  # waits until the engine has sampled
            rewards.append(reward)
            if rank == 0 and (step % 10 == 0 or step == num_steps - 1):
                print(
                    f"step {step}: reward {reward:.3f}, {step - answer.version} update(s) old, "
                    f"sampled in {answer.ended - answer.began:.2f} s, updated in {update[1] - began:.2f} s",
                    flush=True,
                )
    return rewards, sampled, overlapped


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy from rewards, and sample one step ahead.")
    parser.add_argument("--steps", type=int, default=40, help="Optimizer steps. Default: 40.")
    parser.add_argument("--lr", type=float, default=1e-3, help="Learning rate. Default: 1e-3.")
    parser.add_argument(
        "--engine",
        choices=("process", "colocated"),
        default="process",
        help="Where to sample. Colocated is refused, because it cannot be ahead. Default: process.",
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # the engine's end of the pipe
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return run_engine(Connection(args.serve), args.address)
    if args.engine == "colocated":
        parser.error(
            "--engine colocated: a trainer's process cannot sample while it trains. Use grpo_toy.py, which samples and "
            "trains alternately, or --engine process."
        )
    torch.set_num_threads(1)
    engine = Engine()
    try:
        dist.init_process_group("gloo")
        trainer = Trainer(args.lr)
        engine.wait_until_ready()
        rewards, sampled, overlapped = train(trainer, engine, args.steps)
    finally:
        engine.close()
    if dist.get_rank() == 0:
        print(f"the engine sampled {sampled:.2f} s ahead, {overlapped:.2f} s of them during updates", flush=True)
        if overlapped < 0.25 * sampled:
            sys.exit("FAILED: the engine did not sample during updates")
    check_rise(rewards)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
