"""``score``: log-probabilities and entropies of a HuggingFace model's own tokens, without logits.

The model runs as usual, but its head (the output embedding) computes scores instead of logits. The model continues with
a probe, a few fp32 numbers in place of logits:

    decoder -> hidden -> head: head_scores(hidden, weight) --> log-probs, entropies ------------> Tie -> results
                               |-> Tie -> probe -> the model's own scaling, soft cap -> output ----^

The probe's path carries the graph instead of values. Hooks of every unit around the head, including the root's, see an
output whose backward comes before the head's. The probe's values show how the model changes logits, whatever its config
calls it. They reveal scaling and soft cap, and any other change raises an error.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fsdp2x.api import FSDPModule, base_model, never_compiled, release_memory, sleep, units_of, wake
from fsdp2x.rl.head import HeadScores, LogitTransform, head_scores

# Values that replace logits: small numbers show the model's scale, the last one its soft cap.
# All are exact in bf16 and fp16.
_PROBE = (-20.0, -3.0, -0.5, 0.0, 0.25, 1.0, 7.0, 57344.0)
_NOT_RETURNED = {"logits", "loss", "past_key_values", "cache"}
_transforms: weakref.WeakKeyDictionary[nn.Module, LogitTransform] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Scores:
    """Scores of a row's tokens under a policy.

    Attributes:
        log_probs: log-probability of the label at each position, of the labels' shape, fp32 (fp64 for an fp64 model).
            Zero where the label is -100.
        entropy: entropy of the distribution at each labeled position, in nats, of the same shape. None unless
        requested.
        output: other outputs of the model by name (``aux_loss``, ``router_logits``), without logits and caches.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    output: Mapping[str, Any]


def score(
    model: nn.Module,
    inputs: Mapping[str, Any],
    next_labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Scores:
    """Runs the model's forward and returns ``log_softmax(logits / temperature)`` at the labels, without logits.

        row = next(sequence.micro_batches(samples, 4096))
        scores = rl.score(model, row.inputs, row.next_labels, entropy=True)

    Only one tile of logits exists at a time, see :func:`head_scores`. Ties, mixed precision, Ulysses (``shard.inputs``,
    ``shard.next_labels``), gradient checkpointing, PEFT adapters and autocast work as in a normal forward. Without
    gradients nothing is kept. The first call finds the model's scaling of logits and soft cap with a probe. If the
    model has one, its first forward runs twice.

    Args:
        model: a transformers model with a linear head, plain, sharded, or in PEFT.
        inputs: keyword arguments of its forward, without ``labels``.
        next_labels: [rows, positions] of the inputs, int64, already shifted, -100 for no label.
        temperature: the sampler's temperature, a positive number.
        entropy: whether to compute entropies.

    Returns:
        Log-probabilities, entropies, and other outputs.

    Raises:
        ValueError: the inputs contain labels, or ``next_labels`` does not match the head's rows or the vocabulary.
        TypeError: ``model`` is not a transformers model.
        NotImplementedError: the head is not one plain linear layer, or the model changes its logits in an unknown way.
    """
    outer = base_model(model)
    heads = find_heads(outer)
    if inputs.get("labels") is not None:
        raise ValueError("fsdp2x.rl.score: the inputs contain labels, for which the model needs logits. Remove them.")
    known = _transforms.get(outer)
    call = _Call(outer, heads, next_labels, temperature, entropy)
    output = call.run(model, inputs, known or LogitTransform())
    if known is None:
        _transforms[outer] = found = call.find_transform()
        if found != LogitTransform():
            del output
            output = call.run(model, inputs, found)
    return call.join(output)


def find_heads(outer: Any) -> list[nn.Linear]:
    """Returns the linear layers that may be the model's head. PEFT's trained copies make several."""
    name = _name_of(outer)
    if not hasattr(outer, "get_output_embeddings") or not hasattr(outer, "config"):
        raise TypeError(
            f"fsdp2x.rl.score: {name} is not a transformers model. Pass the PreTrainedModel (or its PEFT wrapper) "
            "itself, or call fsdp2x.rl.head_scores(hidden, weight, next_labels) on its hidden states."
        )
    head = outer.get_output_embeddings()
    if head is None:
        raise NotImplementedError(f"fsdp2x.rl.score: {name} has no output embedding (get_output_embeddings() is None)")
    found = [head]
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        found = [head.original_module, *head.modules_to_save.values()]
    for layer in found:
        if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
            reason = "its forward was replaced" if "forward" in vars(layer) else "it is not a plain torch.nn.Linear"
            if hasattr(layer, "base_layer"):
                reason = "an adapter changes it; leave it out of target_modules or put it into modules_to_save"
            raise NotImplementedError(
                f"fsdp2x.rl.score: the head of {name} is a {_name_of(layer)}: {reason}. Compute logits and use "
                "fsdp2x.sequence.token_log_probs, or call fsdp2x.rl.head_scores on its hidden states and weight."
            )
    return found


class _Call:
    """One call of :func:`score`: the head's replacement, and what it observed."""

    def __init__(
        self,
        outer: nn.Module,
        heads: list[nn.Linear],
        next_labels: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> None:
        self._outer, self._heads = outer, heads
        self._labels, self._temperature, self._entropy = next_labels, temperature, entropy
        self._name = f"fsdp2x.rl.score: {_name_of(outer)}"
        self._probe = torch.empty(0, device="cpu")
        self._scores: HeadScores | None = None
        self._shown: torch.Tensor | None = None  # the model's result for the probe, before any cast of its output

    def run(self, model: nn.Module, inputs: Mapping[str, Any], transform: LogitTransform) -> Any:
        """Returns the model's output, with the probe in place of logits."""
        self._scores = self._shown = None
        with self._replaced_heads(transform):
            try:
                output = model(**inputs)
            except NotImplementedError:
                raise
            except Exception as error:
                if self._scores is None or self._shown is not None:
                    raise
                raise NotImplementedError(
                    f"{self._name} computes something with its logits that fails on {len(_PROBE)} numbers in their "
                    f"place: {error}"
                ) from error
        if self._scores is None:
            raise NotImplementedError(
                f"{self._name} did not call its output embedding: it computes logits in another way"
            )
        if _logits_of(output) is None:
            raise NotImplementedError(f"{self._name} returned no logits")
        return output

    @contextlib.contextmanager
    def _replaced_heads(self, transform: LogitTransform) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for head in self._heads:

                @never_compiled
                def forward(input: torch.Tensor, head: nn.Linear = head) -> torch.Tensor:
                    return self._score(input, head, transform)

                head.forward = forward
                stack.callback(delattr, head, "forward")
                # Runs after the hooks of its unit, which may have cast the probe.
                stack.callback(head.register_forward_hook(self._restore).remove)
            # Runs before the hooks of its unit, which may cast the output.
            stack.callback(self._outer.register_forward_hook(self._watch, prepend=True).remove)
            yield

    def _score(self, hidden: torch.Tensor, head: nn.Linear, transform: LogitTransform) -> torch.Tensor:
        if self._scores is not None:
            raise NotImplementedError(f"{self._name} calls its output embedding several times in a forward")
        if isinstance(head.weight, DTensor):
            raise NotImplementedError(
                f"{self._name}: the weight of its output embedding is a DTensor in forward ({head.weight.placements}); "
                "heads under tensor parallelism are not supported"
            )
        if hidden.shape[:-1] != self._labels.shape:
            raise ValueError(
                f"{self._name}: expected labels for hidden states of shape {list(hidden.shape)} at the head, got "
                f"next_labels of shape {list(self._labels.shape)}. Omit logits_to_keep, and pass the labels of these "
                "inputs."
            )
        found = head_scores(
            hidden,
            head.weight,
            self._labels,
            bias=head.bias,
            transform=transform,
            temperature=self._temperature,
            entropy=self._entropy,
        )
        self._probe = torch.tensor(_PROBE, dtype=found.log_probs.dtype, device=hidden.device).view(1, 1, -1)
        probe, *anchored = _Tie.apply(self._probe, *found)
        self._scores = HeadScores(*anchored)
        return probe

    def _restore(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output.to(self._probe.dtype) * 0 + self._probe

    def _watch(self, module: nn.Module, args: tuple, output: Any) -> None:
        logits = _logits_of(output)
        self._shown = None if logits is None else logits.detach()

    def find_transform(self) -> LogitTransform:
        """Returns what the model did to the probe.

        Raises:
            NotImplementedError: it is not a scaling followed by a soft cap.
        """
        shown = self._shown
        probe = torch.tensor(_PROBE, dtype=torch.float64, device="cpu")
        if shown is None or shown.numel() != probe.numel():
            raise NotImplementedError(f"{self._name} changes the shape of its logits")
        made = shown.double().cpu().flatten()
        found = _fit(probe, made)
        # If a model rounds its logits to a narrower dtype, the result does not round.
        error = 16 * max(torch.finfo(shown.dtype).eps, torch.finfo(torch.float32).eps)
        if found is None or not torch.allclose(_transformed(probe, found), made, rtol=error, atol=error):
            pairs = ", ".join(f"{a:g} -> {b:g}" for a, b in zip(probe.tolist(), made.tolist(), strict=True))
            raise NotImplementedError(
                f"{self._name} changes its logits by neither a scaling nor a soft cap: {pairs}. Compute logits "
                "and use fsdp2x.sequence.token_log_probs."
            )
        if found != LogitTransform() and torch.finfo(shown.dtype).bits < 32:
            raise NotImplementedError(
                f"{self._name} scales its logits in {shown.dtype}, from which {found} cannot be determined exactly"
            )
        return found

    def join(self, output: Any) -> Scores:
        """Returns the results, in a graph that passes through the model's output."""
        assert self._scores is not None, "the head was called"
        logits = _logits_of(output)
        log_probs, entropy = self._scores
        if log_probs.requires_grad:
            if logits is None or not logits.requires_grad:
                raise NotImplementedError(f"{self._name} detaches its logits")
            _, log_probs, entropy = _Tie.apply(logits, log_probs, entropy)
        others = {} if isinstance(output, tuple) else {n: v for n, v in output.items() if n not in _NOT_RETURNED}
        return Scores(log_probs, entropy, others)


def _name_of(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _logits_of(output: Any) -> torch.Tensor | None:
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else None


def _fit(probe: torch.Tensor, made: torch.Tensor) -> LogitTransform | None:
    """Returns the scaling and soft cap that would make ``made`` of ``probe``. The caller checks them."""
    at = {value: float(number) for value, number in zip(probe.tolist(), made.tolist(), strict=True)}
    highest = max(at)
    if abs(at[0.25] / 0.25 - at[highest] / highest) <= 1e-2 * abs(at[0.25] / 0.25):
        return LogitTransform(scale=at[1.0])
    cap = at[highest]
    if not abs(at[1.0]) < cap:
        return None
    scale = cap * math.atanh(at[1.0] / cap)
    return LogitTransform(1.0 if abs(scale - 1.0) < 1e-5 else scale, cap)


def _transformed(probe: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    made, cap = probe * transform.scale, transform.soft_cap
    return made if cap is None else cap * torch.tanh(made / cap)


class _Tie(torch.autograd.Function):
    """Returns everything unchanged. Backward waits for the gradients of all results, and sends zeros along ``path``.

    So the gradient of the probe arrives before the scores go on to the head, and all hooks on the way of the model's
    logits run.
    """

    @staticmethod
    def forward(ctx, path: torch.Tensor, log_probs: torch.Tensor, entropy: torch.Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(path)
        return path.clone(), log_probs.view_as(log_probs), None if entropy is None else entropy.view_as(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, grad_log_probs, grad_entropy):
        (path,) = ctx.saved_tensors
        return torch.zeros_like(path) if ctx.needs_input_grad[0] else None, grad_log_probs, grad_entropy


# ---- a second model next to the policy


class Reference:
    """Computes log-probabilities with a frozen, sharded model, which frees all units after each forward.

        reference = rl.Reference(fsdp2x.fully_shard(model))
        with reference:
            logs = [reference.score(row.inputs, row.next_labels) for row in rows]

    Outside of the block it holds only its shards, with ``offload`` in CPU memory (see ``fsdp2x.sleep``). Entering,
    leaving, and each ``score`` are collective. If the policy is a base model with adapters, you need no second model:
    ``with torch.no_grad(), policy.disable_adapter(): rl.score(policy, ...)``.
    """

    def __init__(self, model: nn.Module, *, offload: bool = False) -> None:
        """Freezes ``model`` permanently and puts it into evaluation mode.

        Args:
            model: a model sharded by ``fully_shard``.
            offload: whether its shards wait in CPU memory outside of the block.

        Raises:
            ValueError: nothing in ``model`` is sharded.
        """
        self._states = units_of(model, "rl.Reference")
        self._model, self._offload = model.requires_grad_(False).eval(), offload
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(True, recurse=False)
        self._is_open = self._is_asleep = False
        self._fall_asleep()

    def _fall_asleep(self) -> None:
        if self._offload:
            sleep(self._model)
            self._is_asleep = True

    def __enter__(self) -> Reference:
        if self._is_open:
            raise RuntimeError("fsdp2x.rl.Reference: it was already entered. Score all rows of a step in one block.")
        if self._is_asleep:
            wake(self._model)
            self._is_asleep = False
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if kind is not None:
            return  # the other ranks may be in another call
        for state in self._states:
            if state.is_root:
                release_memory(state)
        self._fall_asleep()

    @torch.no_grad()
    def score(self, inputs: Mapping[str, Any], next_labels: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
        """Returns log-probabilities of the labels, of their shape, as :func:`score` does. Collective.

        Raises:
            RuntimeError: called outside of the block.
        """
        if not self._is_open:
            raise RuntimeError("fsdp2x.rl.Reference.score: call it inside `with reference:`, which frees memory")
        return score(self._model, inputs, next_labels, temperature=temperature).log_probs
