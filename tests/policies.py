"""What the tests of `fsdp2x.rl` share: plain references over whole logits, in a few lines of torch."""

import torch


def plain_scores(logits, next_labels, temperature=1.0):
    """Log-probabilities at the labels and entropies, zero where the label is -100, in the dtype of the logits."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(-1)
    logs = (logits / temperature).log_softmax(-1)
    has_label = next_labels != -100
    chosen = logs.gather(-1, next_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # A token of probability 0 adds nothing.
    entropy = -torch.where(logs.isneginf(), 0.0, logs.exp() * logs).sum(-1)
    return chosen.where(has_label, 0.0), entropy.where(has_label, 0.0)


def changed_logits(logits, transform):
    """What a model with this scaling and soft cap makes of its head's output."""
    logits = logits * transform.scale
    cap = transform.soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)
