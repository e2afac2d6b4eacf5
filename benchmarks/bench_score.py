"""Measures log-probabilities of a head with logits and without: time, peak memory, and error against fp64.

    python benchmarks/bench_score.py [--quick] [--cases fp32 prompts bf16] [--sides softmax] [--steps 3] [--json FILE]

Hidden states [4096, 1024] and a head of 32768 tokens, forward and backward to both, one process, one thread. Sides:

    logits        the product, then sequence.token_log_probs, and the entropy from its log_softmax
    logits_fp32   operands cast to fp32 before the product
    softmax       the product and torch's log_softmax
    chunks        512 tokens at a time, each under torch's checkpoint
    score         rl.head_scores

Cases:

    fp32          every position has a label; log-probabilities and entropies, both with gradients
    log_probs     fp32 without entropies
    prompts       fp32, but a third of the positions has no label
    bf16          operands in bf16, so the product of ``logits`` is bf16

Without options it runs fp32 with logits, chunks, and score, for some minutes. All cases and sides take a quarter of an
hour. Times are this process's CPU time, with alternating sides. The peak is the rise of resident memory in a step, once
with the gradients and once above them. Errors are means of absolute values against fp64, relative ones for gradients.
Losses of all sides must agree, or there is no row.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import harness
from bench_sequence import peak_rise_bytes

# glibc's M_MMAP_THRESHOLD: from this size on, freed memory leaves the resident set at once.
_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES = -3, 65536
_CHUNK = 512
_NO_LABEL = -100


@dataclass(frozen=True)
class Case:
    tokens: int = 4096
    vocab: int = 32768
    width: int = 1024
    dtype: str = "float32"
    entropy: bool = True
    prompts: float = 0.0  # part of the positions without a label


CASES = {
    "fp32": Case(),
    "log_probs": Case(entropy=False),
    "prompts": Case(prompts=1 / 3),
    "bf16": Case(dtype="bfloat16"),
}
QUICK = {name: replace(case, tokens=512, vocab=4096, width=256) for name, case in CASES.items()}
SIDES = ("logits", "logits_fp32", "softmax", "chunks", "score")


class Problem:
    """Operands of a case, and what the log-probabilities and entropies are weighed with."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        dtype = getattr(torch, case.dtype)
        self.entropy = case.entropy
        self.hidden = draw(case.tokens, case.width).to(dtype).requires_grad_()
        self.weight = (draw(case.vocab, case.width) * 2 / math.sqrt(case.width)).to(dtype).requires_grad_()
        self.labels = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
        self.labels[torch.rand(case.tokens, generator=generator) < case.prompts] = _NO_LABEL
        self.of_log_probs, self.of_entropy = draw(case.tokens), 0.1 * draw(case.tokens)

    def loss(self, log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: slice = slice(None)) -> torch.Tensor:
        """Returns the loss of these rows. Default: all."""
        total = (log_probs * self.of_log_probs[rows]).sum()
        if entropy is None:
            return total
        return total + (entropy.where(self.labels[rows] != _NO_LABEL, 0.0) * self.of_entropy[rows]).sum()


Scores = tuple[torch.Tensor, torch.Tensor | None]


def with_logits(problem: Problem, wide: bool = False) -> Scores:
    from fsdp2x.sequence import token_log_probs

    hidden, weight = (one.float() if wide else one for one in (problem.hidden, problem.weight))
    logits = hidden @ weight.t()
    log_probs = token_log_probs(logits, problem.labels)
    return log_probs, plain(logits.float(), problem.labels, True)[1] if problem.entropy else None


def plain(logits: torch.Tensor, labels: torch.Tensor, entropy: bool) -> Scores:
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(labels != _NO_LABEL, 0.0)
    return chosen, -(logs.exp() * logs).sum(-1) if entropy else None


def with_softmax(problem: Problem) -> Scores:
    return plain((problem.hidden @ problem.weight.t()).float(), problem.labels, problem.entropy)


def with_chunks(problem: Problem) -> Scores:
    def of_chunk(hidden: torch.Tensor, labels: torch.Tensor) -> Scores:
        return plain((hidden @ problem.weight.t()).float(), labels, problem.entropy)

    parts = [
        checkpoint(of_chunk, hidden, labels, use_reentrant=False)
        for hidden, labels in zip(problem.hidden.split(_CHUNK), problem.labels.split(_CHUNK), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if problem.entropy else None


def with_score(problem: Problem) -> Scores:
    from fsdp2x.rl import head_scores

    return head_scores(problem.hidden, problem.weight, problem.labels, entropy=problem.entropy)


RUN: dict[str, Callable[[Problem], Scores]] = {
    "logits": with_logits,
    "logits_fp32": lambda problem: with_logits(problem, wide=True),
    "softmax": with_softmax,
    "chunks": with_chunks,
    "score": with_score,
}


def exact(problem: Problem) -> tuple[Scores, list[torch.Tensor]]:
    """Scores and gradients in fp64, in chunks so as to need no more memory than the others."""
    hidden, weight = (one.detach().double().requires_grad_() for one in (problem.hidden, problem.weight))
    scores = []
    for start in range(0, problem.labels.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        found = plain(hidden[rows] @ weight.t(), problem.labels[rows], problem.entropy)
        problem.loss(*found, rows).backward()
        scores.append([None if one is None else one.detach() for one in found])
    log_probs, entropies = zip(*scores, strict=True)
    found = torch.cat(log_probs), torch.cat(entropies) if problem.entropy else None
    return found, [hidden.grad, weight.grad]


def errors_of(problem: Problem, scores: Scores, true: tuple[Scores, list[torch.Tensor]]) -> dict[str, float]:
    """Mean absolute errors of the values at labels; of the gradients, relative to the mean of their absolute values."""
    has_label = problem.labels != _NO_LABEL
    found = {}
    for name, one, other in zip(("log_probs", "entropy"), scores, true[0], strict=True):
        if one is not None:
            found[name] = float((one.detach().double() - other)[has_label].abs().mean())
    for name, one, other in zip(("hidden", "weight"), (problem.hidden, problem.weight), true[1], strict=True):
        found[f"grad_{name}"] = float((one.grad.double() - other).abs().mean() / other.abs().mean())
    return found


def run_case(case: Case, sides: Sequence[str], steps: int) -> dict:
    problem = Problem(case)
    losses: dict[str, list[float]] = {side: [] for side in SIDES}

    def step_of(side: str) -> Callable[[harness.PhaseTimer], None]:
        def step(timer: harness.PhaseTimer) -> None:
            problem.hidden.grad = problem.weight.grad = None
            loss = problem.loss(*RUN[side](problem))
            timer.mark("forward")
            loss.backward()
            timer.mark("backward")
            losses[side].append(loss.item())

        return step

    if case.dtype == "float32":  # logits are of that already
        sides = [side for side in sides if side != "logits_fp32"]
    # This process's CPU time: one thread, so what else runs on the machine matters little.
    timer = functools.partial(harness.PhaseTimer, clock=time.process_time)
    samples = harness.alternate({side: step_of(side) for side in sides}, warmup=1, count=steps, make_timer=timer)
    # After the timing: with this allocator every large tensor is a fresh mapping.
    if ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES) != 1:
        raise OSError("mallopt(M_MMAP_THRESHOLD) failed: freed memory would stay in the peak")
    true = exact(problem)
    gradients = problem.hidden.nbytes + problem.weight.nbytes
    result = {}
    for side in sides:
        problem.hidden.grad = problem.weight.grad = None
        scores: list[Scores] = []

        def step(side: str = side, scores: list[Scores] = scores) -> None:
            scores.append(RUN[side](problem))
            problem.loss(*scores[0]).backward()

        peak = peak_rise_bytes(step)
        result[side] = {
            **samples[side].summary(),
            "peak_bytes": peak,
            "above_gradients_bytes": peak - gradients,
            "errors": errors_of(problem, scores[0], true),
        }
        rounding = 1e-4 if case.dtype == "float32" or side in ("score", "logits_fp32") else 2e-2
        if not math.isclose(losses[side][0], losses["score"][0], rel_tol=rounding, abs_tol=rounding):
            raise AssertionError(f"losses of {side} and score differ: {losses[side][0]} and {losses['score'][0]}")
    return {"case": asdict(case), "sides": result}


def rows_of(results: dict) -> list[list[str]]:
    """The table: seconds and peaks against logits, errors."""
    titles = {
        "logits": "logits",
        "logits_fp32": "logits in fp32",
        "softmax": "logits, log_softmax",
        "chunks": "checkpointed chunks",
        "score": "rl.score",
    }
    head = [
        "case",
        "side",
        "step, s",
        "min to max",
        "to logits",
        "forward",
        "backward",
        "above gradients, MiB",
        "less by",
    ]
    head += ["error of log-probs", "of entropy", "of d hidden", "of d weight"]
    rows = [head]
    for name, result in results.items():
        first = result["sides"]["logits"]
        for side, values in result["sides"].items():
            step, peak = values["step"], values["above_gradients_bytes"]
            row = [name, titles[side], f"{step['median_ms'] / 1e3:.2f}"]
            row.append(f"{step['min_ms'] / 1e3:.2f} to {step['max_ms'] / 1e3:.2f}")
            row.append(f"{step['median_ms'] / first['step']['median_ms']:.2f}x")
            row += [f"{values[phase]['median_ms'] / 1e3:.2f}" for phase in ("forward", "backward")]
            row += [f"{peak / 2**20:.0f}", f"{first['above_gradients_bytes'] / max(peak, 1):.1f}x"]
            keys = ("log_probs", "entropy", "grad_hidden", "grad_weight")
            row += [f"{values['errors'][key]:.1e}" if key in values["errors"] else "" for key in keys]
            rows.append(row)
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens and the vocabulary")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["fp32"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["chunks"], help="beside logits and score")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=1, timeout_s=3600)
    harness.start_group()
    cases = QUICK if args.quick else CASES
    sides = [side for side in SIDES if side in ("logits", "score", *args.sides)]
    results: dict = {}
    for name in args.cases:  # prints and saves each result at once
        results[name] = run_case(cases[name], sides, args.steps)
        print(harness.table(rows_of({name: results[name]})), flush=True)
        harness.save(args.json, "score", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
