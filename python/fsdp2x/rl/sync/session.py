"""``connect`` and ``Session``: push weights of a sharded model into running engines, one version at a time.

    fresh --push--> open --commit--> clean          a delta needs a clean session
                     |                 |
                     +----> torn <-----+            only a full push repairs it

If a push of an adapter fails before its commit, session and engines keep their previous state.

In a push, the ranks first agree (version, mode, nothing runs), and engines begin. For each bucket, the ranks gather it,
hand it over, fill the next one while engines load, and wait for their answers. Then engines finish, and commit. The
ranks exchange the result of each phase before the next begins, so no engine commits before all have finished. An error
of a target is kept as a value until all buckets are done, so no rank leaves the others alone in a collective.
"""

from __future__ import annotations

import enum
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.api import MergedModel, check_transport, require_own_process, running_step
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import call_of, calling, exchange, odd_rank
from fsdp2x.io.export.rings import Entry
from fsdp2x.io.export.stream import (
    BUCKET_BYTES,
    BucketPlan,
    check_bucket_bytes,
    chosen_params,
    finish,
    make_rings,
    named_weights,
    ring_of,
)
from fsdp2x.rl.sync.adapter import describe_adapter
from fsdp2x.rl.sync.delta import BucketDelta, Changes, Snapshot, pack_changes, unpack_changes
from fsdp2x.rl.sync.receiver.engine import POSITION_BYTES
from fsdp2x.rl.sync.targets.base import EngineTarget, Failure, PushBucket, PushReport, SyncError, TargetError
from fsdp2x.rl.sync.wire import describe_wire, layout_digest, lies_in_ring, plan_wire

_numbers = itertools.count()  # numbers of sessions; those of the first rank count


class SessionState(enum.Enum):
    """State of a session, the same on every rank."""

    FRESH = "fresh"  # nothing was committed
    OPEN = "open"  # a push is running
    CLEAN = "clean"  # engines hold the last committed version
    TORN = "torn"  # a push failed, so engines may hold two versions
    CLOSED = "closed"


_MOVES: dict[SessionState, tuple[SessionState, ...]]
_MOVES = dict.fromkeys(SessionState, (SessionState.OPEN, SessionState.CLOSED))
# A failed push of an adapter restores the state before it.
_MOVES[SessionState.OPEN] = tuple(state for state in SessionState if state is not SessionState.OPEN)
_MOVES[SessionState.CLOSED] = (SessionState.CLOSED,)


@checked
def connect(
    model: nn.Module,
    target: EngineTarget,
    *,
    dtype: torch.dtype | None = None,
    keep: Mapping[str, torch.dtype] | None = None,
    names: Literal["hf", "model"] = "hf",
    params: Callable[[str, torch.Tensor], bool] | None = None,
    merge_adapters: bool = False,
    weights: Literal["all", "adapter"] = "all",
    adapter_name: str | None = None,
    deltas: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    transport: str = "auto",
    timeout_s: float = 300.0,
    group: dist.ProcessGroup | None = None,
) -> Session:
    """Plans how the weights of ``model`` get into engines. The session's ``push`` sends them. Collective.

    Persistent buffers are weights, too. They keep their dtype unless ``keep`` names them, and have the values of the
    rank that talks to the engine.

    Pass the same arguments on every rank of ``group``, except the target if its class says so. It sends nothing, and no
    engine has to run. Each host needs memory for two buckets of full tensors, twice the largest one with ``deltas``,
    and the target's own memory. Over a process group, each rank with an engine needs that memory instead. It then also
    needs the small parameters of a bucket and those that are not cut along dim 0.

    Args:
        model: a module sharded by ``fully_shard``, or a part of one.
        target: ``fsdp2x.sync.InProcess``, ``Peer``, ``Vllm`` or ``Sglang``.
        dtype: dtype of floating-point parameters on the wire, cast at the shard. Default: their own.
        keep: dtypes by pattern, such as ``{"*.mlp.gate.weight": torch.float32}`` for routers. Patterns match FQNs and
            names in files, and ``*`` also matches dots.
        names: ``"hf"`` for names and layout of the model's original files, as engines load them. ``"model"`` for FQNs.
        params: predicate over FQN and sharded parameter or buffer, with the same result on every rank. Default: all.
        merge_adapters: whether to merge the LoRA adapters of a PEFT model into its base. The merged weights equal those
            of ``merge_and_unload`` bit for bit, and are then cast. Embeddings that only the base ties are refused.
        weights: ``"all"``, or ``"adapter"`` for only the LoRA adapter of a PEFT model, about 1 % of the bytes. The
            engine must already run the same base. If such a push fails, the previous adapter stays in use. A later full
            push drops it. Targets: ``Peer``, ``Vllm``, ``Sglang``, and ``InProcess(load_adapter=...)``.
        adapter_name: name of the adapter in requests to vLLM and SGLang. Default: its name in the model.
        deltas: whether to keep a snapshot of the engines' weights, so that ``push(mode="delta")`` can send changes. It
            takes this rank's share of the weights' bytes on the wire, and half more during a delta.
        bucket_bytes: limit of a bucket. One larger parameter, or parameters converted together, may exceed it.
        transport: see ``fully_shard``.
        timeout_s: seconds to wait for an engine's answer. Use less than the process group's timeout, so the push fails
            first.
        group: all ranks that have a part of ``model``. Default: the default process group.

    Returns:
        A session.

    Raises:
        ValueError: an argument is impossible, a pattern of ``keep`` matches nothing, or ranks disagree.
        NotImplementedError: a PEFT model would push adapters and base unmerged. Adapters cannot be merged layer by
            layer. A quantized model uses ``names="hf"``. ``weights="adapter"`` is used with other adapters than one
            plain LoRA adapter of linear layers. The target takes no adapters.
        RuntimeError: a parameter is on the meta device.
    """
    caller = "fsdp2x.sync.connect"
    check_bucket_bytes(caller, bucket_bytes)
    if not timeout_s > 0:
        raise ValueError(f"{caller}: timeout_s must be positive, got {timeout_s}")
    transport = check_transport(transport)
    chosen = chosen_params(caller, model, params)
    if not chosen:
        raise ValueError(f"{caller}: params selects no parameter")
    merged = adapter = None
    if weights == "adapter":
        if merge_adapters or deltas or names != "hf" or params is not None:
            raise ValueError(
                f'{caller}: weights="adapter" pushes a complete adapter under its own names. Omit merge_adapters, '
                "deltas, names, and params."
            )
        adapter = describe_adapter(caller, model, chosen, adapter_name)
        chosen = {name: param for name, param in chosen.items() if "lora_" in name}
    elif adapter_name is not None:
        raise ValueError(f'{caller}: adapter_name={adapter_name!r} needs weights="adapter"')
    elif merge_adapters:
        if names != "hf":
            raise ValueError(f'{caller}: merge_adapters=True uses the names of files. Keep names="hf".')
        merged = MergedModel(caller, model)
    else:
        _check_adapters(caller, model, chosen, names)
    plans = plan_wire(caller, model, chosen, dtype, keep or {}, names, bucket_bytes, merged=merged)
    return Session(model, target, plans, deltas, transport, float(timeout_s), group, adapter, merged is not None)


def _check_adapters(caller: str, model: nn.Module, chosen: Mapping[str, Any], names: str) -> None:
    adapters = [name for name in chosen if "lora_" in name]
    if names == "hf" and adapters and len(adapters) < len(chosen):
        raise NotImplementedError(
            f"{caller}: the model has base weights and adapters ({adapters[0]!r}), but an engine's loader takes only "
            'one of them. Use merge_adapters=True to push merged weights, or weights="adapter" if the engine runs the '
            'base. names="model" pushes all weights under their own names.'
        )


def _refusal_of(target: EngineTarget, deltas: bool, adapter: dict[str, Any] | None) -> Exception | None:
    """Returns the exception with which this rank's target rejects the arguments, for all ranks to raise."""
    if adapter is not None and not target.takes_adapters:
        return NotImplementedError(
            f"fsdp2x.sync.connect: this {type(target).__name__} takes no adapters. Give InProcess a load_adapter, or "
            'use weights="all" with merge_adapters=True.'
        )
    try:
        target.check("fsdp2x.sync.connect", deltas)
    except (ValueError, NotImplementedError) as error:
        return error
    return None


class Session:
    """Result of ``connect``. As a context manager it closes itself."""

    def __init__(
        self,
        model: nn.Module,
        target: EngineTarget,
        plans: list[BucketPlan],
        deltas: bool,
        transport: str,
        timeout_s: float,
        group: dist.ProcessGroup | None,
        adapter: dict[str, Any] | None = None,
        is_merged: bool = False,
    ) -> None:
        self._group, self._adapter, self._is_merged = group, adapter, is_merged
        self._model, self._target, self._plans, self._timeout_s = model, target, plans, timeout_s
        self._transport, self._deltas = transport, deltas
        self._known = {name for name, _ in named_weights(model)}
        self._receives = target.receives(dist.get_rank(group))
        refusal = _refusal_of(target, deltas, adapter)
        # Ranks that gather a bucket: this rank's ring, and that of rank 0.
        rings = [[dist.get_rank()] if p.group is None else dist.get_process_group_ranks(p.group) for p in plans]
        params = [entry.param for plan in plans for entry in plan.entries]
        self._call = call_of("fsdp2x.sync.connect", model, params, names_shapes=True)
        said = self._exchange(((layout_digest(plans), adapter), self._receives, refusal, rings, next(_numbers)))
        digests, receivers, refusals, everywhere, numbers = zip(*said, strict=True)
        self._call = replace(self._call, name=f"fsdp2x.sync.push (session {numbers[0]})")
        if refusal := refusal or next(filter(None, refusals), None):
            raise refusal
        if (odd := odd_rank(digests)) is not None:
            raise ValueError(
                f"fsdp2x.sync.connect: rank {odd} has other names, shapes or dtypes than rank 0. Use the same model "
                "and arguments on every rank."
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        outside = sorted({rank for of_rank in everywhere for ring in of_rank for rank in ring} - set(ranks))
        if outside:
            raise ValueError(
                f"fsdp2x.sync.connect: ranks {outside} have parts of the model, but are not in group. Pass all of them."
            )
        if not any(receivers):
            raise ValueError(
                "fsdp2x.sync.connect: no rank has an engine. Peer(rank=...) names none of the ranks, or every rank has "
                "InProcess(None)."
            )
        self._own_rings, self._first_rings = (
            [[ranks.index(rank) for rank in ring] for ring in of_rank] for of_rank in (rings, everywhere[0])
        )
        self._snapshot = Snapshot(plans) if deltas else None
        self._state = self._state_before = SessionState.FRESH
        self._version: int | str | None = None
        self._rings: dict = {}
        self._has_rings = False
        self._gather_error: Exception | None = None
        self._make_rings()

    def _make_rings(self) -> None:
        with calling(self._call):
            self._rings = make_rings(
                self._plans, self._receives, self._transport, keep_files=True, in_order=not self._deltas
            )
        self._has_rings = True
        layout = describe_wire(self._plans, self._rings, self._deltas)
        self._layout = replace(layout, adapter=self._adapter, is_merged=self._is_merged)

    @property
    def version(self) -> int | str | None:
        """The last committed version. None before the first commit and while engines are torn."""
        return self._version if self._state is SessionState.CLEAN else None

    @property
    def is_torn(self) -> bool:
        """Whether a push failed midway, so that engines may hold weights of two versions."""
        return self._state is SessionState.TORN

    def require_clean(self) -> None:
        """Raises unless engines hold the weights of one version. Use it before generating in this process.

        Raises:
            RuntimeError: a push failed or is running, and no full one was committed since.
        """
        if self._state in (SessionState.OPEN, SessionState.TORN):
            raise RuntimeError(
                f"fsdp2x.sync: the engine's weights are {self._state.value}, because a push was not committed. Do not "
                'generate before push(version=..., mode="full") succeeds.'
            )

    @checked(own=("mode",))  # so that all ranks raise for a wrong mode of one
    def push(self, *, version: int | str, mode: Literal["full", "delta"] = "full") -> PushReport:
        """Sends the current weights. When it returns, all engines have committed ``version``. Collective.

        Args:
            version: a name for these weights, such as the number of optimizer steps.
            mode: ``"full"`` sends everything, ``"delta"`` what differs, bit by bit, from the last commit.

        Raises:
            SyncError: on every rank if an engine or its loader failed or did not answer in time. Engines are then torn
                and generate nothing until a full push succeeds. An engine whose answer to the commit was lost may use
                the new version. With ``weights="adapter"`` engines keep the previous adapter; after a failed commit
                some may have the new one.
            ValueError: ``mode`` is unknown, ranks disagree, or a delta lacks ``deltas=True`` or a committed full push.
            RuntimeError: on every rank if a forward or backward is running, the session is closed, or a parameter was
                replaced by another kind.
        """
        began = time.perf_counter()
        self._agree(version, mode)
        engine_mode = mode if self._adapter is None else "adapter"
        self._report, self._gather_error, failure = PushReport(version, engine_mode), None, None
        for plan in self._plans:
            plan.begin()
        try:
            self._state_before = self._state
            self._move(SessionState.OPEN)
            self._settle(version, self._guarded("begin", lambda: self._begin(version, engine_mode)))
            buckets = self._buckets(mode)
            failure = self._guarded("load", lambda: self._target.take(buckets))
            drain(buckets)
            if self._gather_error is not None:
                raise self._gather_error
            self._settle(version, failure)
            self._settle(version, self._guarded("finish", lambda: self._target.finish(version)))
            self._settle(version, self._guarded("commit", lambda: self._target.commit(version)))
        except SyncError:
            raise
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._gather_error = failure = None  # their tracebacks refer to this frame and to the memory of buckets
        self._move(SessionState.CLEAN)
        self._version = version
        self._report.seconds = time.perf_counter() - began
        return self._report

    def close(self) -> None:
        """Releases the engines, which keep their weights, and the memory. Not collective."""
        self._target.close()
        self._rings, self._has_rings, self._snapshot = {}, False, None
        self._move(SessionState.CLOSED)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, mine: Any) -> list:
        with calling(self._call):
            return exchange(mine, self._group)

    # ---- conditions of a push

    def _agree(self, version: int | str, mode: str) -> None:
        """Raises the same on every rank, before anything has changed."""
        require_own_process("push weights")
        said = self._exchange((version, mode, self._why_not(mode), not self._has_rings))
        for rank, (_, _, problem, _) in enumerate(said):
            if problem is not None:
                kind, text = problem
                where = f" (rank {rank})" if len({other[2] for other in said}) > 1 else ""
                raise (ValueError if kind == "value" else RuntimeError)(f"fsdp2x.sync.push{where}: {text}")
        if (different := odd_rank([theirs[:2] for theirs in said])) is not None:
            raise ValueError(
                f"fsdp2x.sync.push: rank 0 pushes version {said[0][0]!r} as {said[0][1]!r}, but rank {different} "
                f"version {said[different][0]!r} as {said[different][1]!r}. Pass the same on every rank."
            )
        if any(other[3] for other in said):
            self._make_rings()

    def _why_not(self, mode: str) -> tuple[str, str] | None:
        """Returns (kind of error, sentence) if this rank cannot push, else None."""
        if self._state is SessionState.CLOSED:
            return "runtime", "the session is closed. Connect again."
        if self._state is SessionState.OPEN:
            return "runtime", "a push of this session is running in another thread"
        if mode not in ("full", "delta"):
            return "value", f'mode must be "full" or "delta", got {mode!r}'
        if mode == "delta" and self._snapshot is None:
            return "value", "this session keeps no snapshot to compare with. Connect with deltas=True."
        if mode == "delta" and self._state is not SessionState.CLEAN:
            is_fresh = self._state is SessionState.FRESH
            why = "nothing was committed yet" if is_fresh else "the last push failed, so engines are torn"
            return "value", f'{why}. Push mode="full" first.'
        if (step := running_step(self._model)) is not None:
            return "runtime", f"a {step} of the model is running. Push between two steps."
        return self._why_not_params()

    def _why_not_params(self) -> tuple[str, str] | None:
        now = dict(named_weights(self._model))
        if added := next((name for name in now if name not in self._known), None):
            return "runtime", f"{added!r} was added to the model since connecting. Connect again."
        for plan in self._plans:
            for entry in plan.entries:
                param = now.get(entry.name)
                if param is entry.param:
                    continue
                if param is None or Entry.of(entry.name, param, entry.dtype).layout != entry.layout:
                    return "runtime", f"parameter {entry.name!r} was replaced since connecting. Connect again."
                entry.param = param
        entry = next(entry for plan in self._plans for entry in plan.entries)
        try:
            entry.local.reshape(-1)[:1].clone()
        except RuntimeError as error:
            return "runtime", f"parameter {entry.name!r} cannot be read: {error}"
        return None

    # ---- a push

    def _begin(self, version: int | str, mode: str) -> None:
        self._target.open(self._layout, self._timeout_s)
        self._target.begin(version, mode, self._version)

    def _guarded(self, phase: str, call: Callable[[], None]) -> tuple[Failure, BaseException] | None:
        """Returns the exception of ``call`` as a value, on a rank that has an engine."""
        if not self._receives:
            return None
        try:
            call()
        except TargetError as error:
            return error.failure, error.__cause__ or error
        except Exception as error:
            return Failure(phase, f"{type(error).__name__}: {error}"), error
        return None

    def _settle(self, version: int | str, mine: tuple[Failure, BaseException] | None) -> None:
        """Exchanges the result of a phase. If it failed on one rank, raises on all."""
        failures = self._exchange(None if mine is None else mine[0])
        rank, failure = next(((r, f) for r, f in enumerate(failures) if f is not None), (0, None))
        if failure is None:
            return
        reason = f"version {version!r} failed on rank {rank} in {failure.place}: {failure.reason}"
        self._tear(reason, has_changed=self._adapter is None or failure.phase == "commit")
        in_commit = failure.phase == "commit"
        if self._adapter is not None:
            kept = f"the adapter of version {self.version!r}" if self.version is not None else "its previous weights"
            kept = "one of the two adapters" if in_commit else kept
            then = f"Each engine continues with {kept}. Fix the cause, then push again."
        else:
            # The commit is the last thing an engine waits for. It cannot be notified that another engine failed.
            but = " (an engine whose answer was lost may have committed, and generates)" if in_commit else ""
            then = (
                f"Engines are torn and generate nothing{but} until a full push succeeds. Fix the cause, then "
                'push(version=..., mode="full").'
            )
        cause = None if mine is None else mine[1]
        raise SyncError(f"fsdp2x.sync.push: {reason}. {then}", failure, rank) from cause

    def _tear(self, reason: str, has_changed: bool) -> None:
        """Ends a failed push. ``has_changed``: engines may hold two versions."""
        self._move(SessionState.TORN if has_changed else self._state_before)
        try:
            if self._receives:
                self._target.abort(reason)
        except Exception as error:
            warnings.warn(f"fsdp2x.sync: abort raised {type(error).__name__}: {error}; {reason}", stacklevel=3)

    def _give_up(self, error: BaseException) -> None:
        """Makes memory and connections again after a failed gather, because ranks may be at different places."""
        if self._state is SessionState.OPEN:
            self._tear(f"a trainer failed: {type(error).__name__}: {error}", has_changed=self._adapter is None)
        self._target.close()
        self._rings, self._has_rings = {}, False

    def _move(self, state: SessionState) -> None:
        assert state in _MOVES[self._state], f"a session that is {self._state.value} cannot be {state.value}"
        self._state = state

    # ---- buckets

    def _buckets(self, mode: str) -> Iterator[PushBucket]:
        try:
            yield from self._all() if mode == "full" else self._changes()
        except Exception as error:
            self._gather_error = error
            raise

    def _all(self) -> Iterator[PushBucket]:
        before = None
        for plan, following in zip(self._plans, [*self._plans, None][1:], strict=True):
            if before is None:
                self._fill(plan)
            bucket = self._gathered(plan, before)
            yield bucket
            if following is not None:
                self._fill(following)
            before = bucket

    def _changes(self) -> Iterator[PushBucket]:
        assert self._snapshot is not None, "refused before"
        before = None
        found = Changes(self._plans, self._snapshot, self._group)
        for changes in found.of_buckets(self._plans, self._first_rings, self._own_rings):
            ring = ring_of(self._rings, changes.dense) if changes.sparse else None
            deltas, bucket = (), None
            if ring is not None:
                packed = pack_changes(changes, ring)
                if not changes.dense.families and packed.whole_bytes <= ring.num_bytes // 2:
                    bucket = PushBucket(changes.dense.index, (), file=ring.file if self._receives else None)
                else:
                    ring = ring.apart(packed)
                ring.fill([packed])
                if bucket is not None:
                    self._await_answer(before)
                    self._count(changes.dense)
                deltas = unpack_changes(changes, ring.finish([packed]))
            if bucket is None:
                self._fill(changes.dense)
                bucket = self._gathered(changes.dense, before)
            bucket.deltas = deltas
            self._count_changes(changes)
            yield bucket
            before = bucket

    def _fill(self, plan: BucketPlan) -> None:
        hold = None if self._snapshot is None else self._snapshot.hold
        if plan.gathered:
            ring_of(self._rings, plan).fill(plan.gathered, hold)
        if hold is not None:
            for entry in plan.alone:
                hold(entry, entry.local)

    def _gathered(self, plan: BucketPlan, before: PushBucket | None) -> PushBucket:
        """Returns a complete bucket that was filled. Only then is the memory of ``before`` free."""
        self._await_answer(before)
        with calling(self._call):
            tensors = finish(plan, self._rings, self._receives)
        self._count(plan)
        if tensors is None:
            return PushBucket(plan.index, ())
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.get_device_module(device).current_stream(device).synchronize()
        file = ring_of(self._rings, plan).file if lies_in_ring(plan, self._rings) else None
        return PushBucket(plan.index, plan.specs, tensors, file=file)

    # ---- what a push has sent so far, the same on every rank except ``waited_s``

    def _await_answer(self, before: PushBucket | None) -> None:
        """Waits until engines are done with the previous bucket."""
        if before is not None:
            began = time.perf_counter()
            before.wait()
            self._report.waited_s += time.perf_counter() - began

    def _count(self, plan: BucketPlan) -> None:
        self._report.num_buckets += 1
        self._report.num_tensors += len(plan.specs)
        self._report.bytes_sent += sum(spec.num_bytes for spec in plan.specs)

    def _count_changes(self, changes: BucketDelta) -> None:
        for index, (_, entry, _, _) in enumerate(changes.sparse):
            count = sum(changes.counts[index])
            self._report.num_changed += count
            self._report.bytes_sent += count * (POSITION_BYTES + entry.dtype.itemsize)


def drain(buckets: Iterator[PushBucket]) -> None:
    """Gathers the buckets that this rank's target did not take, because the other ranks wait in these gathers."""
    for _ in buckets:
        pass
