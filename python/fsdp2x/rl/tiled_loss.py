"""The loss of causal language models without logits in memory, for training loops and transformers' ``Trainer``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp2x.api import IGNORE, base_model
from fsdp2x.base.arguments import checked
from fsdp2x.rl.score import find_heads, score


def require_tiled_loss(model: nn.Module) -> None:
    """Raises an error unless the model's loss is the mean cross-entropy of next tokens over a linear head.

    Raises:
        TypeError: ``model`` is not a transformers model.
        NotImplementedError: the head or the loss differs.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    outer = base_model(model)
    find_heads(outer)
    if outer.loss_function is not ForCausalLMLoss:
        raise NotImplementedError(
            f"fsdp2x.rl.causal_lm_loss: {type(outer).__name__} has another loss than the mean cross-entropy of next "
            "tokens. Compute logits and its own loss."
        )


@checked
def causal_lm_loss(
    model: nn.Module, inputs: Mapping[str, Any], *, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Runs the model's forward and returns ``model(**inputs).loss``, with one tile of logits in memory at a time.

        loss = rl.causal_lm_loss(model, {"input_ids": ids, "labels": ids})

    At 8B with 2,048 tokens, logits, their fp32 copy, and its gradient would take 3 to 4 GB. Backward computes the
    tiles again, which costs one product more with the head. Sums run in fp32, so the loss can differ from the model's
    in the last bits. The auxiliary loss of a mixture of experts (``output_router_logits``) is included.

    Args:
        model: a transformers model with a linear head, plain, sharded, or in PEFT.
        inputs: keyword arguments of its forward, with ``labels`` [rows, positions], which are not shifted, -100 for
            none. ``shift_labels``, already shifted, may replace them.
        num_items_in_batch: tokens to divide the sum by, as transformers' ``Trainer`` counts them. None: the labels of
            ``inputs``.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: there are no labels, or their shape is wrong.
        TypeError: ``model`` is not a transformers model.
        NotImplementedError: the head, the loss, or a change of the logits is unknown (see :func:`score`).
    """
    require_tiled_loss(model)
    rest = dict(inputs)
    labels, next_labels = rest.pop("labels", None), rest.pop("shift_labels", None)
    if next_labels is None:
        if labels is None:
            raise ValueError("fsdp2x.rl.causal_lm_loss: expected labels in the inputs")
        next_labels = nn.functional.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    scores = score(model, rest, next_labels)
    total = -scores.log_probs.sum()
    loss = total / ((next_labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch)
    if (aux_loss := scores.output.get("aux_loss")) is not None:
        loss = loss + base_model(model).router_aux_loss_coef * aux_loss.to(loss.device)
    return loss


def use_tiled_loss(trainer: Any) -> None:
    """Makes transformers' ``Trainer`` compute its training loss by :func:`causal_lm_loss`.

        trainer = Trainer(model=model, args=args, train_dataset=data)
        fsdp2x.rl.use_tiled_loss(trainer)
        trainer.train()

    Call it before ``train()``. Evaluation and prediction still compute logits, because metrics may need them.
    TRL's ``SFTTrainer`` needs no such call: it computes its loss in chunks by itself.

    Raises:
        TypeError: the trainer's model is not a transformers model.
        NotImplementedError: the model's head or loss is unknown, the trainer computes a loss of its own, or it smooths
            labels.
    """
    from transformers import Trainer

    require_tiled_loss(trainer.model)
    compute_loss = trainer.compute_loss
    own = compute_loss.__func__ is not Trainer.compute_loss or trainer.compute_loss_func is not None
    if own or trainer.label_smoother is not None:
        what = "computes a loss of its own" if own else "smooths labels (label_smoothing_factor)"
        raise NotImplementedError(
            f"fsdp2x.rl.use_tiled_loss: {type(trainer).__name__} {what}, which may need logits. Call "
            "fsdp2x.rl.causal_lm_loss in its compute_loss."
        )

    @functools.wraps(compute_loss)
    def compute_tiled_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        def run(num_items_in_batch: torch.Tensor | int | None = None, **inputs: Any) -> dict[str, torch.Tensor]:
            return {"loss": causal_lm_loss(model, inputs, num_items_in_batch=num_items_in_batch)}

        return compute_loss(model if return_outputs else run, inputs, return_outputs, num_items_in_batch)

    trainer.compute_loss = compute_tiled_loss
