"""Shared code of the `fsdp2x.rl` tests: plain references over full logits, in a few lines of torch."""

import torch


def plain_scores(logits, next_labels, temperature=1.0):
    """Log-probabilities at the labels and entropies, zero where the label is -100, in the dtype of the logits."""
    logs = (logits / temperature).log_softmax(-1)
    has_label = next_labels != -100
    chosen = logs.gather(-1, next_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # A token of probability 0 adds nothing.
    entropy = -torch.where(logs.isneginf(), 0.0, logs.exp() * logs).sum(-1)
    return chosen.where(has_label, 0.0), entropy.where(has_label, 0.0)


def changed_logits(logits, transform):
    """Applies a model's scaling and soft cap to its head's output."""
    logits = logits * transform.scale
    cap = transform.soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


# ---- rollouts and the losses of them


class Rollout:
    """One sample with what is known of its tokens; per-token values lie where the token is predicted."""

    def __init__(self, length, num_prompt, draw):
        self.input_ids = torch.arange(1, length + 1)
        self.labels = self.input_ids.clone()
        self.labels[:num_prompt] = -100
        self.has_label = torch.zeros(length, dtype=torch.bool)
        self.has_label[max(num_prompt - 1, 0) : length - 1] = True
        self.logp, self.old, self.reference, self.behaviour = (-2 + 0.3 * draw(length) for _ in range(4))
        self.entropy, self.weights = 1 + 0.1 * draw(length), 1 + 0.2 * draw(length)
        self.advantage = float(draw(1))

    @staticmethod
    def placer(row):
        """A function that puts values [length] of samples at their places in a row, differentiably."""
        ends = row.cu_seqlens.tolist()

        def place(values):
            parts = [values[i][: stop - start] for i, start, stop in zip(row.sample_ids, ends, ends[1:], strict=False)]
            parts.append((0 * values[0][:1]).expand(row.num_padding))  # so that an empty row also depends on the model
            return torch.cat(parts).unsqueeze(0)

        return place


def draw_rollouts(num, seed):
    """Some have no response, some are all response."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def integer(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for index in range(num):
        length = integer(2, 9)
        num_prompt = length if index == 4 else integer(0, length - 1)
        found.append(Rollout(length, num_prompt, draw))
    return found


def rows_of(rollouts, cut):
    """Packed rows: ``cut[rank][row]`` are the indices of its samples."""
    from fsdp2x.sequence import pack_samples

    samples = [{"input_ids": one.input_ids, "labels": one.labels} for one in rollouts]
    return [[pack_samples(samples, members, pad_to_multiple_of=4) for members in rank] for rank in cut]


def value_of(tensor):
    return float(tensor.detach())


def plain_loss(rollouts, which):
    """[loss, clipped part, KL to the old policy, entropy] and gradients by sample, one token at a time."""
    num_tokens = max(sum(int(one.has_label.sum()) for one in rollouts), 1)
    total, others = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    leaves = [one.logp.clone().requires_grad_() for one in rollouts]
    for one, logp in zip(rollouts, leaves, strict=True):
        places = one.has_label.nonzero().flatten().tolist()
        for t in places:
            difference = logp[t] - one.old[t]
            ratio = difference.exp()
            low, high, a = 1 - which.clip[0], 1 + which.clip[1], one.advantage
            loss = -min(ratio * a, ratio.clamp(low, high) * a, key=value_of)
            others[0] += float(a > 0 and ratio > high or a < 0 and ratio < low) / num_tokens
            d = logp[t] - one.reference[t]
            loss = loss * one.weights[t] + which.kl_weight * ((-d).exp() - 1 + d)
            share = {"tokens": 1 / num_tokens, "samples": 1 / len(places) / len(rollouts)}
            total = total + loss * share[which.mean]
            others[1] += value_of(difference.exp() - 1 - difference) / num_tokens
            others[2] += float(one.entropy[t]) / num_tokens
    if total.requires_grad:
        total.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return torch.cat((total.detach()[None], others)), grads
