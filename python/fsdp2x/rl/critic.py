"""A critic: a value head on a language model, advantages from its values, and its loss.

With V the values, r the rewards, and t and t+1 consecutive label tokens of a sample (after the last one V = A = 0):

    TD error    d_t = r_t + gamma V_{t+1} - V_t
    advantage   A_t = d_t + gamma lam A_{t+1}          generalized advantage estimation, arXiv 1506.02438, equation 16
    return      R_t = A_t + V_t
    loss        max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2

PPO (arXiv 1707.06347) has the squared error. The clip is that of OpenAI Baselines' ppo2, detail 9 of "The 37
Implementation Details of Proximal Policy Optimization" (iclr-blog-track.github.io, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import exchange, problems_of_all
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.rl.losses import mean_factors
from fsdp2x.rl.rows import RowTokens, StepCount


class _ValueHead(nn.Linear):
    """One number for each hidden state. The product is in fp32, or in fp64 for an fp64 model."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)

    def reset_parameters(self) -> None:
        """Fills weight and bias with zeros."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ValueModel(nn.Module):
    """A transformers model with a value head in place of its language-model head.

        critic = rl.ValueModel(AutoModelForCausalLM.from_pretrained(folder))
        sequence.use_varlen_attention(critic)
        fsdp2x.fully_shard(critic)
        values = critic(**row.inputs)                      # [1, positions]

    ``fully_shard`` splits it into the units of the wrapped model. Parameters of the wrapped model keep their names in
    the causal language model. So ``load_hf(critic, folder, strict=False)`` reads a policy's folder. The head is
    ``head.weight`` [1, hidden size] and ``head.bias`` [1], in fp32.

    The head starts at zero, as in OpenAI's lm-human-preferences. The first values are exactly 0 on every rank, whatever
    the seed, and the first advantages come from the rewards alone.

    A ``MixedPrecisionPolicy(param_dtype=...)`` rounds the head's weights for compute; the product stays in fp32. For
    weights in fp32, shard the head first: ``fully_shard(critic.head)``, then ``fully_shard(critic, mp_policy=...,
    auto_wrap=True)``.
    """

    # fully_shard recognizes transformers models by these attributes of the class.
    _no_split_modules: Any = None
    base_model_prefix = ""

    def __init__(self, model: nn.Module) -> None:
        """Takes over ``model`` without its language-model head.

        Args:
            model: a causal language model of transformers, or its base model (``AutoModel``), not sharded. It may be on
                the meta device. For adapters, pass the plain model and call ``add_lora`` on the result, with
                ``modules_to_save=["head"]``.

        Raises:
            TypeError: ``model`` is not a transformers model, or PEFT wraps it.
            RuntimeError: ``model`` is already sharded.
        """
        super().__init__()
        source: Any = model
        name = type(source).__name__
        if hasattr(source, "peft_config"):
            raise TypeError(
                f"fsdp2x.rl.ValueModel: {name} has adapters. Pass the model without them and call "
                'fsdp2x.add_lora(critic, {..., "modules_to_save": ["head"]}) on the result.'
            )
        if not (
            hasattr(source, "base_model") and getattr(source, "base_model_prefix", "") and hasattr(source, "config")
        ):
            raise TypeError(f"fsdp2x.rl.ValueModel: {name} is not a transformers model. Pass a PreTrainedModel.")
        if any(isinstance(module, FSDPModule) for module in source.modules()):
            raise RuntimeError(
                f"fsdp2x.rl.ValueModel: {name} is sharded already. Make the ValueModel first, then call fully_shard."
            )
        self.config = source.config
        self._no_split_modules = source._no_split_modules
        self.base_model_prefix = source.base_model_prefix
        self.add_module(self.base_model_prefix, source.base_model)
        device = next((param.device for param in source.parameters()), torch.device("cpu"))
        hidden_size = self.config.get_text_config().hidden_size
        self.head = _ValueHead(hidden_size, 1, dtype=torch.float32, device=device)

    @property
    def base_model(self) -> Any:
        """The wrapped model, which returns hidden states."""
        return self._modules[self.base_model_prefix]

    def get_decoder(self) -> Any:
        """The language model that runs the decoder layers."""
        return self.base_model.get_decoder()

    def get_input_embeddings(self) -> Any:
        """The input embedding of the wrapped model."""
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The value head, which ends the forward as a language-model head does."""
        return self.head

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Returns a value for each position: the expected reward from the next token on.

        Args:
            inputs: keyword arguments of the wrapped model, such as ``row.inputs`` or Ulysses' ``shard.inputs``.

        Returns:
            fp32 (fp64 for an fp64 model) tensor of the shape of ``input_ids``. The value at a position belongs to the
            token that is predicted there, as in ``score``.
        """
        return self.head(self.base_model(**{"use_cache": False, **inputs, "return_dict": True}).last_hidden_state)


@checked
@torch.no_grad()
def gae(
    rewards: Sequence,
    values: Sequence,
    rows: Sequence,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Computes advantages and returns of all label tokens of a step by generalized advantage estimation. Collective.

        with torch.no_grad():
            values = [critic(**row.inputs) for row in packed]
        rewards = [row.on_last(scores) for row in rows]                                    # of complete responses
        rewards = [r - 0.05 * (o - f) for r, o, f in zip(rewards, old, reference)]         # a KL penalty by tokens
        advantages, returns = rl.gae(rewards, values, rows, whiten=True)

    This module's docstring has the recurrence (arXiv 1506.02438). It runs over the label tokens of each sample and
    skips the others, such as a tool's answer between two turns. It is computed in fp64.

    Args:
        rewards: one tensor for each row, [1, positions], with rewards where tokens are predicted.
        values: the critic's values in the same form. Positions without a label are not read.
        rows: all rows of this rank's step, or its slices with Ulysses.
        gamma: discount of later rewards, 0 to 1.
        lam: weight of rewards over values, 0 to 1. With 0 advantages are one-step TD errors.
        whiten: whether to subtract the mean of all ranks' advantages and divide by ``sqrt(variance + 1e-8)``. The
            variance is unbiased. Returns do not change.
        group: ranks over which to whiten, as for ``count_step``. Default: all.

    Returns:
        (advantages, returns): for each row an fp32 tensor [1, positions], zero without a label. ``policy_loss`` takes
        the advantages, ``value_loss`` the returns.

    Raises:
        ValueError: on every rank if shapes do not match the rows, or a reward or value is not finite. Also if ``gamma``
            or ``lam`` is not in 0 to 1.
    """
    said = problems_of_all(_find_problem(rewards, values, rows, gamma, lam), group, "gae")
    if said:
        raise ValueError(f"fsdp2x.rl.gae: {said}")
    found = [_estimate(*one, gamma, lam) for one in zip(rewards, values, rows, strict=True)]
    returns = [
        (one + value.detach()).where(row.has_label, 0.0) for one, value, row in zip(found, values, rows, strict=True)
    ]
    if whiten:
        mean, scale = _whitening([one[row.has_label] for one, row in zip(found, rows, strict=True)], group)
        found = [((one - mean) * scale).where(row.has_label, 0.0) for one, row in zip(found, rows, strict=True)]
    return [one.float() for one in found], [one.float() for one in returns]


def _find_problem(rewards: Sequence, values: Sequence, rows: Sequence, gamma: float, lam: float) -> str | None:
    """Returns why this rank's arguments cannot be used, or None."""
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        return f"gamma and lam must be between 0 and 1, got {gamma} and {lam}"
    if not len(rewards) == len(values) == len(rows):
        return f"{len(rewards)} rewards and {len(values)} values for {len(rows)} rows"
    for index, row in enumerate(rows):
        for name, given in (("rewards", rewards[index]), ("values", values[index])):
            try:
                row.check(given, f"{name}[{index}]")
            except ValueError as error:
                return str(error)
            if not given[row.has_label].isfinite().all():
                return f"{name}[{index}] has a label token whose value is not finite"
    return None


def _estimate(rewards: torch.Tensor, values: torch.Tensor, row: RowTokens, gamma: float, lam: float) -> torch.Tensor:
    """Returns the advantages of one row in fp64."""
    (reward, value), sample = row.labels_of_samples(torch.stack((rewards[0].to(values), values[0])).double())
    goes_on = torch.zeros_like(value)
    goes_on[:-1] = (sample[1:] == sample[:-1]).double()
    advantage = reward + gamma * goes_on * value.roll(-1) - value
    # Each round doubles the reach of the sum: a token adds the decayed sum of its 2^k-th successor.
    decay, reach = gamma * lam * goes_on, 1
    while reach < len(advantage):
        later, decay_later = F.pad(advantage[reach:], (0, reach)), F.pad(decay[reach:], (0, reach))
        advantage, decay = advantage + decay * later, decay * decay_later
        reach *= 2
    return row.put_labels(advantage)


def _whitening(advantages: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Returns the mean of the advantages of all ranks, and 1 / their standard deviation."""
    mine = torch.cat([one.cpu() for one in advantages])
    mean = mine.mean() if len(mine) else mine.sum()
    parts = exchange((len(mine), float(mean), float((mine - mean).square().sum())), group, "gae")
    counts, means, squares = (torch.tensor(column, dtype=torch.float64) for column in zip(*parts, strict=True))
    total = counts.sum().clamp(min=1.0)
    mean = (counts * means).sum() / total
    variance = (squares + counts * (means - mean).square()).sum() / (total - 1).clamp(min=1.0)
    return float(mean), float((variance + 1e-8).rsqrt())


class ValueLoss(NamedTuple):
    """Shares of this rank and row, as in ``PolicyLoss``.

    Attributes:
        loss: scalar for ``backward``.
        clipped: fraction of the label tokens whose loss has no gradient because of the clip. Detached.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


@checked
def value_loss(
    values: torch.Tensor,
    row: RowTokens,
    returns: torch.Tensor,
    count: StepCount,
    *,
    old: torch.Tensor | None = None,
    clip: float | None = None,
    mean: Literal["tokens", "samples", "constant"] = "tokens",
    max_tokens: int | None = None,
) -> ValueLoss:
    """Computes this rank's share of the critic's loss of a step, for gradients that are averaged over ranks.

        count = rl.count_step(rows)
        for i, row in enumerate(rows):
            with fsdp2x.accumulate(critic, last=i == len(rows) - 1):
                now = critic(**packed[i].inputs)
                rl.value_loss(now, row, returns[i], count, old=values[i], clip=0.2).loss.backward()

    This module's docstring has the formula, that of ``rl.losses`` the means. Gradients do not depend on how samples are
    distributed over ranks and rows. A row without labels has a loss of zero that reaches every parameter.

    Args:
        values: current values of the critic, [1, positions].
        row: tokens of this row.
        returns: result of ``gae``, [1, positions].
        count: result of ``count_step`` for the step.
        old: values from which the returns were made, needed for ``clip``.
        clip: how far a value may move from the old one before its gradient stops, in units of the reward. None: no
            bound.
        mean: see ``PolicySettings``.
        max_tokens: length for the constant mean.

    Raises:
        ValueError: shapes do not match the row, ``clip`` is not positive or lacks ``old``, or a constant mean lacks
            ``max_tokens``.
    """
    for name, given in (("values", values), ("returns", returns), ("old", old)):
        if given is not None:
            row.check(given, f"fsdp2x.rl.value_loss: {name}")
    if clip is not None and (old is None or not clip > 0):
        raise ValueError(
            f"fsdp2x.rl.value_loss: clip must be positive and needs the values before the update, got clip={clip}, "
            f"old={'None' if old is None else 'a tensor'}. Pass old=values[i]."
        )
    values = values.where(row.has_label, 0.0)
    target = returns.detach().to(values).where(row.has_label, 0.0)
    error = (values - target).square()
    clipped = torch.zeros_like(row.has_label)
    if clip is not None and old is not None:
        before = old.detach().to(values).where(row.has_label, 0.0)
        bounded = (values.clamp(before - clip, before + clip) - target).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    by_token = mean_factors("tokens", None, row, count, values.dtype)
    loss = (error / 2 * mean_factors(mean, max_tokens, row, count, values.dtype)).sum()
    return ValueLoss(loss, (clipped * by_token).sum())
