#!/usr/bin/env python3
"""Reinforcement learning in one file: torchrun --nproc_per_node=2 examples/grpo_toy.py (half a minute on two cores).

A prompt asks for even or for odd tokens. The reward of a response is the share of its tokens that are as asked. Each
step samples responses, trains the policy on them with GRPO, and pushes its weights to the model that samples. That is a
full copy in each trainer's process. `grpo_async.py` samples in another process instead.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

import fsdp2x
from fsdp2x import rl, rollout, sequence, sync

VOCAB, RESPONSE = 32, 8  # tokens that there are, and tokens of a response
EVEN, ODD = 0, 1  # a prompt's last token: what it asks for
PROMPTS, GROUP = 16, 8  # prompts of a step on all ranks, and responses to each
RISE = 0.25  # of the mean reward: with less the program fails


# ---- the task


def make_prompts(step: int) -> list[list[int]]:
    """Returns the prompts of a step for all ranks: some random tokens, then what is asked for."""
    draw = random.Random(step)
    return [[*draw.choices(range(2, VOCAB), k=draw.randint(1, 4)), draw.choice((EVEN, ODD))] for _ in range(PROMPTS)]


def reward_of(prompt: Sequence[int], response: Sequence[int]) -> float:
    return sum(token % 2 == prompt[-1] for token in response) / len(response)


def settings_of(seed: int) -> rollout.Sampling:
    return rollout.Sampling(max_tokens=RESPONSE, num_samples=GROUP, seed=seed)


# ---- the models


def build_model() -> torch.nn.Module:
    """Makes an untrained Qwen3 of 78 thousand parameters, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=VOCAB, num_hidden_layers=2, head_dim=16, max_position_embeddings=64, **sizes)
    return AutoModelForCausalLM.from_config(config)


class Trainer:
    """The sharded policy and its optimizer."""

    def __init__(self, learning_rate: float) -> None:
        self.policy = build_model()
        sequence.use_varlen_attention(self.policy)
        fsdp2x.fully_shard(self.policy, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = fsdp2x.optim.AdamW(self.policy.parameters(), lr=learning_rate, max_grad_norm=1.0)

    def update(self, prompts: Sequence[Sequence[int]], responses: Sequence[rollout.Completion]) -> tuple[float, float]:
        """Takes one optimizer step on this rank's responses, and all other ranks' theirs.

        Returns:
            The mean reward of all ranks. The largest difference between log-probabilities of the sampler and of the
            policy on this rank, which is rounding if both have the same weights.
        """
        samples = [
            {
                "input_ids": torch.tensor([*prompts[one.prompt], *one.tokens]),
                "labels": torch.tensor([-100] * len(prompts[one.prompt]) + one.tokens),
            }
            for one in responses
        ]
        rewards = [reward_of(prompts[one.prompt], one.tokens) for one in responses]
        groups = [dist.get_rank() * PROMPTS + one.prompt for one in responses]
        rows = list(sequence.micro_batches(samples, max_tokens=1024))
        tokens = [rl.RowTokens(row) for row in rows]
        count = rl.count_step(tokens)
        advantages = rl.group_advantages(rewards, groups)
        apart = 0.0
        for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
            with fsdp2x.accumulate(self.policy, last=index == len(rows) - 1):
                scores = rl.score(self.policy, row.inputs, row.next_labels)
                now, drawn = scores.log_probs.detach(), of_row.align([one.log_probs for one in responses])
                # The policy may be a step ahead of the weights that sampled.
                weights = rl.importance_weights(now, drawn, of_row, high=2.0)
                rl.policy_loss(scores, of_row, advantages, count, rl.GRPO, weights=weights).loss.backward()
            apart = max(apart, float((now - drawn).abs().max()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.tensor([sum(rewards), len(rewards)])
        dist.all_reduce(total)
        return float(total[0] / total[1]), apart


def check_rise(rewards: Sequence[float]) -> None:
    """Ends the program with an error unless the mean reward has risen."""
    part = max(1, len(rewards) // 10)
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    if dist.get_rank() == 0:
        print(f"mean reward: {first:.2f} at first, {last:.2f} at last", flush=True)
    if last < first + RISE:
        sys.exit(f"FAILED: the mean reward did not rise by {RISE}" if dist.get_rank() == 0 else 1)


# ---- the loop


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy from rewards: sample, train, push.")
    parser.add_argument("--steps", type=int, default=40, help="Optimizer steps. Default: 40.")
    parser.add_argument("--lr", type=float, default=1e-3, help="Learning rate. Default: 1e-3.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(args.lr)

    # A full copy in this process. Any function of (name, full tensor) pairs can take the weights.
    sampler = build_model().eval().requires_grad_(False)
    weights = sync.engine.Parameters(sampler.state_dict())
    rewards = []
    with sync.connect(trainer.policy, sync.InProcess(weights.load), names="model") as session:
        for step in range(args.steps):
            session.push(version=step)
            prompts = make_prompts(step)[rank::world]
            responses = rollout.sample(sampler, prompts, settings_of(seed=step * world + rank))
            reward, apart = trainer.update(prompts, responses)
            rewards.append(reward)
            if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
                print(f"step {step}: reward {reward:.3f}, sampler and policy differ by {apart:.0e}", flush=True)
    check_rise(rewards)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
