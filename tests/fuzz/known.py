"""Comparisons that the judge skips, and why: FSDP2 differs from the unsharded model, or fsdp2x differs on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuzz.observe import SKIPPED, Observation, differences
from fuzz.program import Part, Program

Traces = dict[str, list[Observation]]

ALL = frozenset({"all"})
# Operations whose exception leaves a model in the middle of something.
STEPS = ("forward", "backward", "input_grad", "generate", "accumulate")

# Errors of upstream where the unsharded model and ours go on: from then on upstream is not compared.
STOCK_RAISES = (
    ("Inplace update to inference tensor|Inference tensors cannot be saved", "inference_mode gathered a unit first"),
    ("no attribute 'reduce_scatter_states'", "reset_iter_state before the first forward"),
    ("has changed the type of value", "a returned parameter that the policy casts, behind a hook of its gradient"),
    (
        "are out of bounds for storage of size 0|its data is not allocated yet",
        "the last module of a group returns no tensor: nothing is gathered",
    ),
    ("Cannot use ReduceOp.PREMUL_SUM with Gloo", "a gradient divide factor on the CPU"),
    ("list index out of range", "reshard_after_forward to fewer ranks with shards of the last dim"),
    ("cannot change mode after backward starts", "after backwards that it does not take for the last"),
)


@dataclass(frozen=True)
class Case:
    """One operation: what `side`, one of ours, and `other` made of it."""

    program: Program
    traces: Traces
    side: str
    other: str
    index: int

    @property
    def kind(self) -> str:
        return self.program.ops[self.index - 1].kind if self.index else "fully_shard"

    def at(self, side: str) -> Observation | None:
        trace = self.traces.get(side, ())
        return trace[self.index] if self.index < len(trace) else None

    @property
    def got(self) -> Observation:
        return self.at(self.side)

    @property
    def expected(self) -> Observation:
        return self.at(self.other)

    def raised(self, side: str) -> str:
        """The type and text of an exception; nothing if there was none."""
        seen = self.at(side)
        return f"{seen.raised.kind}: {seen.raised.text}" if seen is not None and seen.raised is not None else ""


@dataclass(frozen=True)
class Rule:
    """Where `applies` says so, `keys` of an observation are not compared with `other`; from then on if it `stays`."""

    other: tuple[str, ...]
    keys: frozenset[str]
    stays: bool
    reason: str
    applies: Callable[[Case], bool]


def _graph_after_failure(case: Case) -> bool:
    return case.kind == "backward" and "stale" in case.traces["unsharded"][case.index - 1].taint


def _refused_alike(case: Case) -> bool:
    stock = case.at("stock")
    if case.kind not in STEPS or not case.raised(case.side) or not case.raised("stock"):
        return False
    plain = case.at("unsharded").raised
    return case.got.raised.kind == stock.raised.kind and (plain is None or plain.kind != stock.raised.kind)


def _stock_alone_raises(case: Case) -> bool:
    texts = [text for text, _ in STOCK_RAISES if re.search(text, case.raised("stock"))]
    return any(not re.search(text, case.raised(case.side)) for text in texts)


def _kinds(part: Part) -> set[str]:
    return {one.kind for one in part.walk()}


def _has_checkpoint(case: Case) -> bool:
    return bool(_kinds(case.program.tree) & {"checkpoint", "reentrant"})


def _cast_without_gradients(case: Case) -> bool:
    """A part that runs without gradients returns what it was given, which the policy casts: the copy has no graph."""
    if case.program.policy == "full":
        return False
    alone = [part for part in case.program.tree.walk() if part.kind == "no_grad"]
    return any(one.returns == "input" for part in alone for one in part.walk())


def _zeros_of_a_checkpoint(case: Case) -> bool:
    """Upstream has zeros as a gradient that the others have not."""
    if not _has_checkpoint(case):
        return False
    pairs = [(case.got.state["grads"].get(name), theirs) for name, theirs in case.expected.state["grads"].items()]
    return any(ours is None and theirs is not None and not theirs.any() for ours, theirs in pairs)


def _inference_gathers_first(case: Case) -> bool:
    pairs = zip(case.program.ops, case.traces["unsharded"][1 : case.index + 1], strict=False)
    modes = [op.arguments.get("mode_name") for op, seen in pairs if op.kind == "forward" and seen.result != SKIPPED]
    return "inference" in modes and not {None, "grad", "autocast"} & set(modes[: modes.index("inference")])


def _reads_left_parameter(case: Case) -> bool:
    """A part returns a parameter that its unit has freed. Upstream refuses some uses of it, and crashes in others."""
    has_one = any(part.returns == "param" for part in case.program.tree.walk())
    return has_one and "was used while it is resharded" in case.raised(case.side)


def _left_parameter(case: Case) -> bool:
    """A container returns a parameter, which may be its child's, and has a hook that sees it."""
    parts = [part for part in case.program.tree.walk() if part.parts and part.returns == "param"]
    return any(hook.startswith("full_backward") or hook == "post" for part in parts for hook in part.hooks)


def _stock_stays_gathered(case: Case) -> bool:
    """Upstream has units gathered that ours has not, and none the other way round."""
    pairs = [(case.got.state["sharded"][name], theirs) for name, theirs in case.expected.state["sharded"].items()]
    return all(ours or not theirs for ours, theirs in pairs)


def _ran_without_grad(case: Case) -> bool:
    return any(one.arguments.get("mode_name") in ("no_grad", "inference") for one in case.program.ops[: case.index])


def _was_set(case: Case, name: str) -> bool:
    return any(one.kind == "set" and one.arguments["name"] == name for one in case.program.ops[: case.index])


def _divides_twice(case: Case) -> bool:
    """Upstream divides fp16 gradients of one rank twice by a divide factor."""
    is_alone = case.program.policy == "fp16_reduce" and case.got.state["memory"]["ranks"] == 1
    return is_alone and _was_set(case, "set_gradient_divide_factor")


def _part_of_a_group(case: Case) -> bool:
    """Upstream leaves a group gathered if only some of its modules ran."""
    grouped = any(part.together for part in case.program.tree.walk())
    alone = any("part" in one.arguments for one in case.program.ops[: case.index] if one.kind == "forward")
    return grouped and alone and _stock_stays_gathered(case)


def _failed_between_recomputations(case: Case) -> bool:
    """A backward failed where one side had recomputed more than the other, and so updated more buffers."""
    has_failed = any(one.kind == "backward" and "fault" in one.arguments for one in case.program.ops[: case.index])
    if not has_failed or not _has_checkpoint(case):
        return False
    return bool(differences(case.got.state["buffers"], case.expected.state["buffers"], 1e-5))


def _zeros_of_unused(case: Case) -> bool:
    """Upstream has zeros for unused parameters only if a backward came to their unit, ours after a first forward."""
    if not _was_set(case, "set_reduce_scatter_unused_params"):
        return False
    if case.other in UNSHARDED:
        return case.kind == "finalize" and not any(one.kind == "forward" for one in case.program.ops[: case.index])
    pairs = [(case.got.state["grads"].get(name), theirs) for name, theirs in case.expected.state["grads"].items()]
    return any(theirs is None and ours is not None and not ours.any() for ours, theirs in pairs)


def _kept_from_before(case: Case) -> bool:
    """Sides differ only in units that were gathered before the last `generate`, and are so in ours."""
    kinds = [one.kind for one in case.program.ops[: case.index]]
    if "generate" not in kinds:
        return False
    before = case.traces[case.side][len(kinds) - 1 - kinds[::-1].index("generate")].state["sharded"]
    got = case.got.state["sharded"]
    return all(
        got[name] == theirs or not (got[name] or before.get(name, True))
        for name, theirs in case.expected.state["sharded"].items()
    )


def _refuses_what_stock_left(case: Case) -> bool:
    """Upstream, which ends at an injected fault, did not come to an operation that the policy's dtypes do not allow."""
    mixes_dtypes = case.program.policy != "full" and "must have the same dtype" in case.raised(case.side)
    return mixes_dtypes and case.at("stock") is None


def _load_unties(case: Case) -> bool:
    """Ours have shared parameters still, which the other model has two of since a load that assigns."""
    if not any(part.kind == "tied" for part in case.program.tree.walk()):
        return False
    assigned = [one.kind == "load" and one.arguments.get("assign", False) for one in case.program.ops[: case.index]]
    return any(assigned) and case.got.state["params"].keys() < case.expected.state["params"].keys()


def _reentrant_repeats(case: Case) -> bool:
    if any(part.kind == "twice" and "reentrant" in _kinds(part) for part in case.program.tree.walk()):
        return True
    several = case.index and len(case.program.ops[case.index - 1].arguments.get("slots", ())) > 1
    return bool(several) and "reentrant" in _kinds(case.program.tree)


STOCK, UNSHARDED = ("stock",), ("unsharded",)
GRADS = frozenset({"grads", "held"})
VALUES = frozenset({"result", "log"})
STATES = frozenset({"grads", "held", "params", "sharded", "requires_grad", "is_root", "buffers"})

RULES = (
    Rule(STOCK, ALL, True, "see STOCK_RAISES", _stock_alone_raises),
    Rule(
        STOCK,
        ALL,
        True,
        "in a reentrant checkpoint that runs twice in a backward, gradients are lost",
        _reentrant_repeats,
    ),
    Rule(
        STOCK,
        VALUES | GRADS,
        False,
        "makes zeros of missing gradients of a checkpoint's inputs: its post-backward node is a Python function",
        lambda case: _has_checkpoint(case) and case.kind in ("backward", "input_grad", "accumulate"),
    ),
    Rule(STOCK, ALL, True, "the same: optimizers step with them", _zeros_of_a_checkpoint),
    Rule(
        STOCK,
        ALL,
        True,
        "loses gradients of parameters that inference_mode gathered first: they are inference tensors",
        _inference_gathers_first,
    ),
    Rule(
        UNSHARDED,
        frozenset({"result", "log"}),
        False,
        "a parameter whose unit has been left is a DTensor, also in a hook",
        _left_parameter,
    ),
    Rule(
        STOCK,
        frozenset({"sharded"}),
        False,
        "leaves units gathered that a recomputation gathered and no gradient went through",
        lambda case: _has_checkpoint(case) and _stock_stays_gathered(case),
    ),
    Rule(
        STOCK,
        frozenset({"sharded"}),
        False,
        "keeps the root gathered after a forward without gradients",
        lambda case: _ran_without_grad(case) and _stock_stays_gathered(case),
    ),
    Rule(
        STOCK,
        frozenset({"sharded"}),
        False,
        "keeps the root gathered until finalize_backward",
        lambda case: "unfinished" in case.got.taint and _stock_stays_gathered(case),
    ),
    Rule(
        STOCK,
        STATES,
        False,
        "has an undefined state after an exception until reset_iter_state",
        lambda case: bool(case.raised("stock")),
    ),
    Rule(STOCK, STATES, False, "ties what a load assigned at the next gather, ours at once", _load_unties),
    Rule(UNSHARDED, ALL, True, "has two of a shared parameter after a load that assigns", _load_unties),
    Rule(UNSHARDED, ALL, True, "a backward behind one that failed", _graph_after_failure),
    Rule(UNSHARDED, ALL, True, "what upstream refuses, too, a plain model may do", _refused_alike),
    Rule(UNSHARDED, ALL, True, "what upstream would refuse, too, a plain model may do", _refuses_what_stock_left),
    Rule(STOCK, frozenset({"sharded"}), False, "reshards what unsharded() leaves gathered", _kept_from_before),
    Rule(STOCK, frozenset({"sharded"}), False, "leaves a part of a group gathered", _part_of_a_group),
    Rule(STOCK, ALL, True, "divides fp16 gradients of one rank twice", _divides_twice),
    Rule(STOCK, ALL, True, "recomputes in another order", _failed_between_recomputations),
    Rule((*STOCK, *UNSHARDED), ALL, True, "has zeros of unused parameters at other times", _zeros_of_unused),
    Rule(
        (),
        frozenset({"log"}),
        False,
        "calls hooks of gradients until it raises",
        lambda case: case.kind in STEPS and case.kind != "forward" and bool(case.raised(case.side)),
    ),
    Rule(
        (*STOCK, *UNSHARDED),
        frozenset({"result"}),
        False,
        "returns a norm of bf16 gradients in bf16, ours in fp32",
        lambda case: case.kind == "clip" and getattr(case.expected.result, "dtype", None) == torch.bfloat16,
    ),
    Rule((*STOCK, *UNSHARDED), ALL, True, "uses parameters outside of their units", _reads_left_parameter),
    Rule(
        UNSHARDED,
        ALL,
        False,
        "what is refused outside of forward and backward is upstream's to say",
        lambda case: case.kind not in STEPS and bool(case.raised(case.side)),
    ),
    Rule(
        UNSHARDED,
        VALUES,
        False,
        "computes in other dtypes than the policy's",
        lambda case: case.program.policy != "full",
    ),
    Rule(UNSHARDED, ALL, True, "gives gradients through what upstream casts without", _cast_without_gradients),
    Rule(
        (),
        frozenset({"log"}),
        False,
        "accumulates gradients in another order, so that a hook that raises comes before or after those of others",
        lambda case: bool(
            {"accumulated", "gradient"} & {*(case.program.ops[case.index - 1].arguments.get("fault") or ())}
        ),
    ),
    Rule((), GRADS, False, "may add gradients before finalize_backward", lambda case: "unfinished" in case.got.taint),
    Rule(
        (),
        frozenset({"log"}),
        False,
        "may add gradients before finalize_backward, and calls their hooks then",
        lambda case: case.index > 0 and "unfinished" in case.got.taint | case.traces[case.side][case.index - 1].taint,
    ),
    Rule(
        (),
        GRADS,
        False,
        "holds what a backward did until it raised",
        lambda case: "grads" in case.got.taint | case.expected.taint,
    ),
)


def left_out(case: Case) -> tuple[set[str], bool]:
    """Keys of the observations that are not compared, and whether the other side is not compared any more at all."""
    keys, ends = set(), False
    for rule in RULES:
        if (not rule.other or case.other in rule.other) and rule.applies(case):
            keys |= rule.keys
            ends |= rule.stays
    return keys, ends
