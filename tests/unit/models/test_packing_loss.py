"""Log-probabilities and the token mean against torch's own functions; memory by chunks."""

import pytest
import torch
import torch.nn.functional as F

from fsdp2x.sequence import count_label_tokens, mean_over_ranks, token_log_probs, token_mean_loss
from memory import allocations, peak_of


def make(dtype=torch.float32, shape=(2, 7), vocab=11):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*shape, vocab, generator=generator) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=generator)
    labels[0, :3] = -100
    return logits, labels


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs(dtype, chunk, temperature):
    logits, labels = make(dtype)
    got = token_log_probs(logits, labels, temperature=temperature, chunk_tokens=chunk)
    scores = (logits.float() / temperature).log_softmax(-1)
    expected = torch.where(labels == -100, 0.0, scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(labels.shape, generator=torch.Generator().manual_seed(4))
    (grad,) = torch.autograd.grad((got * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(grad, wanted, **exact)
    assert grad.dtype == dtype and not grad[0, :3].any()


def test_tokens_that_a_model_excludes():
    logits, labels = make()
    excluded = torch.cat((logits, torch.full((*labels.shape, 2), -torch.inf)), dim=-1)
    for one, other in ((excluded, logits), (excluded.detach().bfloat16(), logits.bfloat16())):
        torch.testing.assert_close(token_log_probs(one, labels), token_log_probs(other, labels))
    (grad,) = torch.autograd.grad(token_log_probs(excluded, labels).sum(), logits)
    assert grad.isfinite().all()


def test_memory_is_that_of_a_chunk():
    """bf16 logits of 512 tokens: plain log_softmax makes fp32 copies of all of them, forward and backward."""
    logits, labels = make(torch.bfloat16, shape=(1, 512), vocab=1000)
    whole_bytes, chunk_bytes = 512 * 1000 * 4, 16 * 1000 * 4

    def chunked():
        token_log_probs(logits, labels, chunk_tokens=16).sum().backward()
        logits.grad = None

    def plain():
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").backward()
        logits.grad = None

    chunked()
    assert peak_of(allocations(chunked)) < whole_bytes / 2 + 6 * chunk_bytes  # the gradient in bf16, and chunks
    assert peak_of(allocations(plain)) > 2 * whole_bytes


def test_the_mean_over_label_tokens_of_unequal_micro_batches():
    """Not the mean of their means."""
    (logits, labels), (others, more) = make(), make(shape=(1, 3))
    num_tokens = count_label_tokens([labels, more])
    assert num_tokens == 14 - 3 + 0
    loss = token_mean_loss(logits, labels, num_tokens) + token_mean_loss(others, more, num_tokens)
    expected = F.cross_entropy(torch.cat((logits.flatten(0, 1), others[0])), torch.cat((labels.flatten(), more[0])))
    torch.testing.assert_close(loss, expected)
    assert torch.equal(mean_over_ranks(loss), loss.detach())


def test_a_step_without_labels():
    logits, labels = make()
    labels = torch.full_like(labels, -100)
    num_tokens = count_label_tokens(labels)
    loss = token_mean_loss(logits, labels, num_tokens)
    loss.backward()
    assert num_tokens == 0 and loss == 0 and not logits.grad.any()


def test_wrong_arguments():
    logits, labels = make()
    with pytest.raises(ValueError, match=r"logits of shape \[2, 7, 11\] .* \[2, 6\]"):
        token_log_probs(logits, labels[:, :6])
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_log_probs(logits, labels, temperature=0)
    with pytest.raises(ValueError, match="1 labels are outside .*11 tokens"):
        token_log_probs(logits, torch.where(labels == labels[1, 0], 11, labels))
    with pytest.raises(ValueError, match="no micro-batches"):
        count_label_tokens([])
