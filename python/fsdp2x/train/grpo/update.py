"""Updates a policy with the responses of a rollout: log-probabilities, advantages, losses and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x import rl
from fsdp2x.lifecycle.contexts import accumulate
from fsdp2x.models.sequence.packing import IGNORE, PackedBatch, micro_batches
from fsdp2x.optim import AdamW
from fsdp2x.train.config import TrainingError
from fsdp2x.train.distributed import sums_over_ranks
from fsdp2x.train.grpo.config import GrpoConfig

PerSample = list[torch.Tensor]


@dataclass
class Batch:
    """This rank's samples of a step, with one entry for each sample."""

    packed: list[dict[str, Any]]
    rewards: torch.Tensor
    group_ids: list[int]
    behaviour: list[list[float]]  # log-probabilities of the engine
    versions: list[list[float]]  # versions of the weights that drew each token
    old: PerSample | None = None  # log-probabilities of the policy before the update
    frozen: PerSample | None = None  # log-probabilities of the reference
    advantages: torch.Tensor | PerSample = field(default_factory=lambda: torch.zeros(0))
    values: PerSample = field(default_factory=list)
    returns: PerSample = field(default_factory=list)


class Critic:
    """A sharded value model and its optimizer, for PPO."""

    def __init__(self, model: torch.nn.Module, lr: float, max_grad_norm: float | None) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=lr, max_grad_norm=max_grad_norm)

    @torch.no_grad()
    def values(self, rows: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Returns the values of each position of the rows. Collective."""
        self.model.eval()
        found = [self.model(**row.inputs) for row in rows]
        self.model.train()
        return found


class Update:
    """Makes the optimizer steps of a rollout. All methods are collective.

    `step` is the number of rollouts that have been trained on, which is the version of the weights.
    """

    def __init__(
        self,
        config: GrpoConfig,
        model: torch.nn.Module,
        reference: rl.Reference | None,
        critic: Critic | None,
        *,
        device: torch.device,
        num_steps: int,
        budget: int,
    ) -> None:
        """`budget` is the tokens of a micro-batch."""
        self._config, self._model, self._reference, self._critic = config, model, reference, critic
        self._device, self._num_steps, self._budget = device, num_steps, budget

    def kl_weight(self, step: int) -> float:
        """Returns the KL weight of the rollout after `step` others."""
        algorithm = self._config.algorithm
        if algorithm.kl_end is None:
            return algorithm.kl_weight
        part = step / max(self._num_steps - 1, 1)
        return algorithm.kl_weight + (algorithm.kl_end - algorithm.kl_weight) * min(part, 1.0)

    def _rows(self, samples: Sequence[dict[str, Any]]) -> tuple[list[PackedBatch], list[rl.RowTokens]]:
        """Returns rows within the budget, the same number on every rank, and their label tokens."""
        rows = [row.to(self._device) for row in micro_batches(samples, self._budget)]
        return rows, [rl.RowTokens(row) for row in rows]

    # ---- before the update

    @torch.no_grad()
    def score(self, batch: Batch, step: int) -> None:
        """Computes the log-probabilities before the update, advantages, values and returns.

        With one optimizer step the policy's own log-probabilities are those of the update's forward and omitted here.
        """
        algorithm = self._config.algorithm
        needs_old = algorithm.epochs * algorithm.minibatches > 1
        needs_reference = self.kl_weight(step) > 0
        if self._critic is None:
            batch.advantages = rl.group_advantages(batch.rewards, batch.group_ids, scale=algorithm.scale)
        if not (needs_old or needs_reference or self._critic is not None):
            return
        rows, tokens = self._rows(batch.packed)
        temperature = self._config.rollout.temperature

        def of_policy(row: PackedBatch) -> torch.Tensor:
            return rl.score(self._model, row.inputs, row.next_labels, temperature=temperature).log_probs

        self._model.eval()
        if needs_old:
            batch.old = _by_sample(rows, [of_policy(row) for row in rows])
        if needs_reference and self._reference is not None:
            with self._reference as reference:
                found = [reference.score(row.inputs, row.next_labels, temperature=temperature) for row in rows]
            batch.frozen = _by_sample(rows, found)
        elif needs_reference:
            model: Any = self._model
            with model.disable_adapter():
                batch.frozen = _by_sample(rows, [of_policy(row) for row in rows])
        self._model.train()
        if self._critic is not None:
            values = self._critic.values(rows)
            rewards = [row.on_last(batch.rewards) for row in tokens]
            advantages, returns = rl.gae(
                rewards, values, tokens, gamma=algorithm.gamma, lam=algorithm.gae_lambda, whiten=True
            )
            batch.advantages, batch.returns = _by_sample(rows, advantages), _by_sample(rows, returns)
            batch.values = _by_sample(rows, values)

    # ---- the update

    def run(self, batch: Batch, step: int, step_optimizer: Callable[[], float | None]) -> dict[str, float]:
        """Makes all optimizer steps of the batch. `step_optimizer` clips, steps and returns the gradient's norm.

        Returns:
            Numbers over all ranks, means over the optimizer steps. Those that end with `_max` are maxima.

        Raises:
            TrainingError: on every rank if trainer and engine differ by more than `rollout.tolerance`.
        """
        algorithm = self._config.algorithm
        found: list[dict[str, float]] = []
        for members in self._minibatches(len(batch.packed), step):
            rows, tokens = self._rows([batch.packed[i] for i in members])
            count = rl.count_step(tokens)
            numbers: dict[str, float] = {}
            if self._critic is not None:
                numbers |= self._update_critic(self._critic, batch, members, rows, tokens, count)
            if self._critic is None or step >= algorithm.critic_warmup:
                numbers |= self._backward(batch, members, rows, tokens, count, step)
                norm = step_optimizer()
                numbers |= {} if norm is None else {"grad_norm": norm}
            found.append(numbers)
        return {
            name: (max if name.endswith("_max") else _mean)([numbers[name] for numbers in found if name in numbers])
            for name in found[-1]
        }

    def _minibatches(self, count: int, step: int) -> Iterator[list[int]]:
        """Yields indices of this rank's samples for each optimizer step. Every rank yields the same number."""
        algorithm = self._config.algorithm
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed((self._config.train.seed << 24) + (step << 8) + rank)
        for _ in range(algorithm.epochs):
            order = list(range(count))
            if algorithm.minibatches > 1:
                order = torch.randperm(count, generator=generator).tolist()
            for part in range(algorithm.minibatches):
                yield sorted(order[part :: algorithm.minibatches])

    def _backward(
        self,
        batch: Batch,
        members: list[int],
        rows: list[PackedBatch],
        tokens: list[rl.RowTokens],
        count: rl.StepCount,
        step: int,
    ) -> dict[str, float]:
        """Computes gradients of one optimizer step of the policy."""
        config, algorithm = self._config, self._config.algorithm
        settings = algorithm.loss(config.rollout.max_tokens, self.kl_weight(step))
        high = algorithm.max_weight or (2.0 if config.rollout.ahead else None)
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)  # loss, clipped, policy_kl, kl, entropy
        gaps = torch.zeros(2, dtype=torch.float64, device=self._device)  # sum, number
        largest = torch.zeros(2, dtype=torch.float64, device=self._device)  # gap, weight
        zero = torch.zeros((), device=self._device)
        for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
            with accumulate(self._model, last=index == len(rows) - 1, before_last=config.parallel.accumulate):
                scores = rl.score(
                    self._model, row.inputs, row.next_labels, temperature=config.rollout.temperature, entropy=True
                )
                before = scores.log_probs.detach()
                if batch.old is not None:
                    before = of_row.align([batch.old[i] for i in members])
                drawn = of_row.align([batch.behaviour[i] for i in members])
                is_current = of_row.has_label & (of_row.align([batch.versions[i] for i in members]) == step)
                apart = (before.float() - drawn)[is_current].abs().double()
                gaps += torch.stack((apart.sum(), gaps.new_tensor(apart.numel())))
                if apart.numel():
                    largest[0] = torch.maximum(largest[0], apart.nan_to_num(nan=math.inf).max())
                weights = None
                if high is not None:
                    weights = rl.importance_weights(before, drawn, of_row, high=high)
                    largest[1] = torch.maximum(largest[1], weights.max().double())
                loss = rl.policy_loss(
                    scores,
                    of_row,
                    self._advantages(batch, members, of_row),
                    count,
                    settings,
                    old=None if batch.old is None else before,
                    reference=None if batch.frozen is None else of_row.align([batch.frozen[i] for i in members]),
                    weights=weights,
                )
                loss.loss.backward()
            shares = [loss.loss, loss.clipped, loss.policy_kl, loss.reference_kl, loss.entropy]
            sums += torch.stack([(zero if share is None else share).detach().double() for share in shares])
        *means, gap, seen = sums_over_ranks([*(sums / count.ranks).tolist(), *gaps.tolist()], self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found = dict(zip(("loss", "clipped", "policy_kl", "kl", "entropy"), means, strict=True))
        if batch.frozen is None:
            del found["kl"]
        found |= {"difference": gap / max(seen, 1.0), "difference_max": float(largest[0])}
        if high is not None:
            found["weight_max"] = float(largest[1])
        tolerance = config.rollout.tolerance
        if tolerance is not None and not found["difference_max"] <= tolerance:
            raise TrainingError(
                f"step {step + 1}: log-probabilities of trainer and engine differ by {found['difference_max']:.3g}, "
                f"more than rollout.tolerance={tolerance:g}. Check the engine's dtype and weights."
            )
        return found

    def _advantages(self, batch: Batch, members: list[int], of_row: rl.RowTokens) -> torch.Tensor:
        if isinstance(batch.advantages, torch.Tensor):
            return batch.advantages[torch.tensor(members, dtype=torch.int64)].to(self._device)
        return of_row.align([batch.advantages[i] for i in members])

    def _update_critic(
        self,
        critic: Critic,
        batch: Batch,
        members: list[int],
        rows: list[PackedBatch],
        tokens: list[rl.RowTokens],
        count: rl.StepCount,
    ) -> dict[str, float]:
        """Runs one optimizer step of the critic."""
        total = 0.0
        for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
            with accumulate(critic.model, last=index == len(rows) - 1):
                loss = rl.value_loss(
                    critic.model(**row.inputs),
                    of_row,
                    of_row.align([batch.returns[i] for i in members]),
                    count,
                    old=of_row.align([batch.values[i] for i in members]),
                    clip=self._config.algorithm.value_clip,
                )
                loss.loss.backward()
            total += float(loss.loss.detach())
        critic.optimizer.step()
        critic.optimizer.zero_grad(set_to_none=True)
        return {"value_loss": sums_over_ranks([total / count.ranks], self._device)[0]}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _by_sample(rows: Sequence[PackedBatch], values: Sequence[torch.Tensor]) -> PerSample:
    """Returns the values of each sample's label tokens, in the order of the samples."""
    found: dict[int, torch.Tensor] = {}
    for row, of_row in zip(rows, values, strict=True):
        parts = zip(row.sample_ids, row.unpack(of_row), row.unpack(row.next_labels), strict=True)
        found |= {index: one[label != IGNORE].float() for index, one, label in parts}
    return [found[index] for index in range(len(found))]
