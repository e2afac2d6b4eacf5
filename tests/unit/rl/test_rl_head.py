"""Scores without logits against whole logits in fp64: values, gradients, memory, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fsdp2x.rl import LogitTransform, head_scores
from memory import allocations, peak_of
from policies import changed_logits, plain_scores


def make(shape=(2, 7), vocab=11, width=5, seed=0, dtype=torch.float64, masked=True):
    """Hidden states, weight, bias, labels, and weights for the log-probabilities and entropies, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    operands = [one.to(dtype) for one in (2 * draw(*shape, width), draw(vocab, width), draw(vocab))]
    labels = torch.randint(0, vocab, shape, generator=generator)
    if masked:
        labels[torch.rand(shape, generator=generator) < 0.3] = -100
    weights = [draw(*shape) * (torch.rand(shape, generator=generator) < 0.7) for _ in range(2)]
    return operands, labels, weights


def results(hidden, weight, bias, labels, weights, *, entropy, transform, temperature, tile=None):
    """Ours: values, then gradients of a weighted sum."""
    operands = [None if one is None else one.detach().clone().requires_grad_() for one in (hidden, weight, bias)]
    found = head_scores(
        *operands[:2],
        labels,
        bias=operands[2],
        entropy=entropy,
        transform=transform,
        temperature=temperature,
        tile=tile,
    )
    return with_gradients(found, operands, weights)


def expected(hidden, weight, bias, labels, weights, *, entropy, transform, temperature):
    """The same from whole logits in fp64, whatever the operands."""
    operands = [None if one is None else one.detach().double().requires_grad_() for one in (hidden, weight, bias)]
    logits = operands[0] @ operands[1].t()
    logits = changed_logits(logits if bias is None else logits + operands[2], transform)
    log_probs, entropies = plain_scores(logits, labels, temperature)
    return with_gradients((log_probs, entropies if entropy else None), operands, weights)


def with_gradients(found, operands, weights):
    total = sum((one * w).sum() for one, w in zip(found, weights, strict=True) if one is not None)
    grads = torch.autograd.grad(total, [one for one in operands if one is not None])
    return [one.detach() for one in found if one is not None] + list(grads)


def close(got, wanted, tolerance):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 13),
    vocab=st.integers(1, 17),
    width=st.integers(1, 6),
    tile=st.tuples(st.integers(1, 15), st.integers(1, 19)),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    transform=st.sampled_from([LogitTransform(), LogitTransform(0.3), LogitTransform(1.7, 2.0)]),
    has_bias=st.booleans(),
    entropy=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_tile(tokens, vocab, width, tile, temperature, transform, has_bias, entropy, dtype, seed):
    (hidden, weight, bias), labels, weights = make((tokens,), vocab, width, seed, dtype)
    case = {"entropy": entropy, "transform": transform, "temperature": temperature}
    inputs = hidden, weight, bias if has_bias else None, labels, weights
    got = results(*inputs, **case, tile=tile)
    assert got[0].dtype == dtype and not got[0][labels == -100].any()
    close(got, expected(*inputs, **case), 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_operands_are_rounded_once(dtype):
    """Values as of fp32 logits; gradients no further from fp64's than one rounding of theirs, in every element."""
    (hidden, weight, bias), labels, weights = make((64,), 300, 48, dtype=dtype)
    case = {"entropy": True, "transform": LogitTransform(0.25), "temperature": 0.9}
    got = results(hidden, weight, bias, labels, weights, **case, tile=(16, 32))
    wanted = expected(hidden, weight, bias, labels, weights, **case)
    close(got[:2], wanted[:2], 2e-5)
    for one, other in zip(got[2:], wanted[2:], strict=True):
        assert one.dtype == dtype
        ulp = torch.finfo(dtype).eps * other.abs() / 2
        assert ((one.double() - other).abs() <= 1.01 * ulp + 1e-6).all()


def test_autocast_rounds_operands_as_a_linear_layer_does():
    (hidden, weight, _), labels, weights = make((9,), dtype=torch.float32)
    case = {"entropy": True, "transform": LogitTransform(), "temperature": 1.0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(hidden, weight, None, labels, weights, **case)
    rounded = [one.bfloat16().double() for one in (hidden, weight)]
    wanted = expected(*rounded, None, labels, weights, **case)
    close(got[:2], wanted[:2], 1e-5)
    close(got[2:], wanted[2:], 2e-2)
    assert got[2].dtype == got[3].dtype == torch.float32


def test_excluded_tokens():
    """A bias of -inf removes tokens from the distribution, also a full tile of them."""
    (hidden, weight, bias), labels, weights = make((6,), vocab=8, masked=False)
    bias[4:], labels[:] = -torch.inf, labels % 4
    case = {"entropy": True, "transform": LogitTransform(), "temperature": 1.0}
    got = results(hidden, weight, bias, labels, weights, **case, tile=(3, 2))
    wanted = expected(hidden, weight[:4], bias[:4], labels, weights, **case)
    close(got[:3], wanted[:3], 1e-12)
    close([got[3][:4], got[4][:4]], wanted[3:], 1e-12)
    assert not got[3][4:].any() and not got[4][4:].any()


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_operands(wanted):
    operands, labels, weights = make()
    whole = expected(*operands, labels, weights, entropy=False, transform=LogitTransform(), temperature=1.0)[1:]
    leaves = [one.clone().requires_grad_(flag) for one, flag in zip(operands, wanted, strict=True)]
    found = head_scores(*leaves[:2], labels, bias=leaves[2])
    (found.log_probs * weights[0]).sum().backward()
    for leaf, flag, grad in zip(leaves, wanted, whole, strict=True):
        assert (leaf.grad is not None) == flag
        if flag:
            torch.testing.assert_close(leaf.grad, grad)


def test_no_labels_and_no_gradients_are_zeros_and_not_none():
    operands, labels, _ = make()
    for none, factor in ((torch.full_like(labels, -100), 1.0), (labels, 0.0)):
        leaves = [one.clone().requires_grad_() for one in operands]
        found = head_scores(*leaves[:2], none, bias=leaves[2], entropy=True)
        (factor * (found.log_probs + found.entropy)).sum().backward()
        assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_tokens_without_a_gradient_are_not_computed_again():
    """Backward of 8 tokens of 512: a fraction of the products."""
    (hidden, weight, _), labels, _ = make((512,), 256, 64, masked=False)
    hidden.requires_grad_()
    log_probs = head_scores(hidden, weight, labels).log_probs
    weights = torch.zeros(512, dtype=torch.float64)
    weights[::64] = 1.0
    flops = FlopCounterMode(display=False)
    with flops:
        (log_probs * weights).sum().backward()
    assert flops.get_total_flops() == 2 * 2 * 8 * 256 * 64
    assert not hidden.grad[1:64].any() and hidden.grad[::64].all()


# ---- memory


def peak_bytes(tokens, vocab, run):
    (hidden, weight, _), labels, _ = make((tokens,), vocab, 16, dtype=torch.float32, masked=False)
    hidden.requires_grad_()
    weight.requires_grad_()
    run(hidden, weight, labels)
    hidden.grad = weight.grad = None
    results_bytes = hidden.nbytes + weight.nbytes
    return peak_of(allocations(lambda: run(hidden, weight, labels))) - results_bytes


def test_memory_is_that_of_tiles_whatever_the_tokens_and_the_vocabulary():
    def ours(hidden, weight, labels):
        found = head_scores(hidden, weight, labels, entropy=True, tile=(64, 128))
        (found.log_probs.sum() + found.entropy.sum()).backward()

    def plain(hidden, weight, labels):
        log_probs, entropy = plain_scores(hidden @ weight.t(), labels)
        (log_probs.sum() + entropy.sum()).backward()

    tile = 64 * 128 * 4
    small, wide, long = (peak_bytes(*size, ours) for size in ((256, 1024), (256, 4096), (1024, 1024)))
    assert small < 4 * tile and wide < small + tile and long < small + 1024 * 100
    assert peak_bytes(256, 4096, plain) > 10 * wide


def test_nothing_is_kept_without_gradients():
    (hidden, weight, _), labels, _ = make((256,), 1024, 16, dtype=torch.float32, masked=False)
    hidden.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        sizes = allocations(lambda: kept.append(head_scores(hidden, weight, labels).log_probs))
    assert sum(sizes) <= 256 * 4 + 512


# ---- refusals


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"labels": torch.zeros(2, 6, dtype=torch.int64)},
            ValueError,
            r"expected shapes .* and labels, got .* and \[2, 6\]",
        ),
        ({"labels": torch.full((2, 7), 11)}, ValueError, "14 labels are outside of the vocabulary of 11 tokens"),
        ({"labels": torch.full((2, 7), -1)}, ValueError, "the first is -1"),
        ({"bias": torch.zeros(10, dtype=torch.float64)}, ValueError, r"has a bias of shape \[10\]"),
        ({"weight": torch.zeros(11, 5)}, TypeError, "hidden states are torch.float64, but the head's weight is"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive, got 0"),
    ],
)
def test_wrong_arguments(change, error, said):
    (hidden, weight, bias), labels, _ = make()
    given_ = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, "temperature": 1.0, **change}
    with pytest.raises(error, match=said):
        head_scores(
            given_["hidden"],
            given_["weight"],
            given_["labels"],
            bias=given_["bias"],
            temperature=given_["temperature"],
        )
