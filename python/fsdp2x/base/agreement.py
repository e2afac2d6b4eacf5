"""Makes the ranks of a process group agree on each collective before it is posted.

The engine (``csrc/engine/transport/agreement.hpp``) calls ``Agreement._ask`` for a collective that does not repeat what
all ranks did before. The ranks then compare through the group's store, under keys that every rank derives alike:

    K          the first rank that asks for the K-th time writes what it is about to post, and the others compare
    K/count    how many agree
    K/end      how the round ends: "" if all ranks agree and post, or the message that all raise
    K/left     the rank whose forward or backward raised, how many collectives it had posted, and why
    K/away     how many ranks have left and have not asked again
    K/alarm    one of the above needs ranks that wait in a collective, so they look
    state/R    after a failure: which collectives rank R has posted

A rank that posts what is expected writes nothing. If its peers ask at that moment, the collectives differ, or a peer
has come back after its forward raised. The rank answers when it has waited for ``_LOOK_S``. A steady step neither
writes nor reads the store.

A failure ends a generation of keys. The first question of the next one is whether all ranks have come back. Each rank
then repeats the collectives that only its peers have posted, with zeros. So collectives match again.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.annotations import unchecked
from fsdp2x.base.collectives import (
    Diverged,
    Exchange,
    all_to_all,
    explained,
    gather_in_place,
    plain_all_gather,
    post,
    reduce_scatter,
    unfinished_exchanges,
    wait,
)
from fsdp2x.base.native import _C
from fsdp2x.base.processes import introduced, name_ended

_LOOK_S = 0.1  # interval at which a rank that waits for a collective reads the store
_ALARM_S = 0.05  # a rank that asks for longer raises the alarm
_POLL_S = 0.0003  # the first pause; later ones are a third of the time that this rank has waited
_LOOK_FOR_DEATHS_S = 1.0
_ENDED_S = 5.0  # a rank may end while others still exchange what it has
_GIVE_UP_S = 10.0  # an abandoned question ends earlier, also on a busy machine
_PATIENCE_S = 2.0  # a rank that left an earlier pass may come back, and its peers wait for it so long
_ABORT_S = 30.0  # a rank that has not raised so long after a failure is blocked by its device
_AGAIN_S = 5.0  # the same after a failure, when all ranks begin again
_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
_ADVICE = "Every rank must run the same units and calls in the same order, with the same settings."

T = TypeVar("T")
_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup | None) -> Agreement | None:
    """Returns the agreement of the ranks of ``group``, or None if they have none."""
    return None if group is None else _agreements.get(group)


def make_agreement(group: dist.ProcessGroup, token: str) -> Agreement | None:
    """Returns the agreement of the ranks of ``group``, made at the first call. None if the group has no store.

    ``token`` is the same on all ranks and was never used before.
    """
    store = torch_private.store_of(group)
    if store is None:
        return None
    if group not in _agreements:
        _agreements[group] = Agreement(group, store, token)
    return _agreements[group]


def all_reduce_agreed(group: dist.ProcessGroup, values: torch.Tensor, op: Any, what: str, kind: str = "") -> None:
    """All-reduces ``values`` outside of any unit. ``what`` follows the rank in messages: "clips gradients".

    Ranks compare ``kind``, by default ``what``.

    Raises:
        Diverged: another rank does something else.
    """
    agreement = agreement_of(group)
    if agreement is None:
        dist.all_reduce(values, op=op, group=group)
    else:
        agreement.engine.agree(kind or what, what, values.nbytes, values.dtype)
        agreement.all_reduce(values, op)


def exchange_bytes(group: dist.ProcessGroup, call: str, mine: bytes) -> list[bytes]:
    """Returns the bytes of all ranks of ``group``. Messages name ``call``, which this rank is in.

    Raises:
        Diverged: another rank does something else.
    """
    rank, device = dist.get_rank(group), torch_private.object_device(group)

    def summed(values: torch.Tensor) -> torch.Tensor:  # each byte is that of one rank, and 0 on the others
        moved = values.view(torch.uint8).to(device)
        all_reduce_agreed(group, moved, dist.ReduceOp.SUM, f"is in the {call}", "exchange of objects")
        return moved.cpu()

    with reported(call, group=group), torch_private.unobserved():
        if (agreement := agreement_of(group)) is not None:
            agreement.engine.ask_next()
        lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device="cpu")
        lengths[rank] = len(mine)
        sizes = summed(lengths).view(torch.int64).tolist()
        everything = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
        everything.split(sizes)[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [part.numpy().tobytes() for part in summed(everything).split(sizes)]


@contextlib.contextmanager
def reported(
    call: str, kind: type[BaseException] = BaseException, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """If the block, which is not in a forward or backward, raises, peers that wait for this rank in it raise, too.

    ``kind``: KeyboardInterrupt for a block whose other exceptions the ranks exchange. ``group``: the only one of the
    block's collectives. A call in another one, in which another thread exchanges, goes on. None: all groups.
    """
    try:
        for key, agreement in list(_agreements.items()):
            if group in (None, key):
                agreement.engine.begin_call()
        yield
    except Diverged:
        raise
    except kind as error:
        for agreement in list(_agreements.values()):
            agreement.engine.leave_call(f"left the {call}, which raised {type(error).__name__}")
        raise


def _begin(function: Callable[..., T], *args: Any) -> Future[T]:
    """Runs ``function`` in another thread, where signal handlers do not raise.

    If a handler raises in the caller meanwhile, the function runs on.
    """

    def run(future: Future[T]) -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
            del future  # or the error lives with the backward that it ends, until a garbage collection

    future: Future[T] = Future()
    _thread.start_new_thread(run, (future,))
    return future


class Agreement:
    """Compares this rank's collectives over one process group with those of its peers.

    ``engine`` is the engine's part. ``group`` runs collectives on a CPU and is None on a device, ``separate_group``
    those of set_separate_reduce_scatter_group. ``timeout`` is how many seconds to wait for a peer.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, token: str) -> None:
        self.group: dist.ProcessGroup | None = None
        self.separate_group: dist.ProcessGroup | None = None
        self._users_group = weakref.ref(group)
        self._store = dist.PrefixStore(f"fsdp2x/{token}", store)
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.timeout = torch_private.group_timeout(group, torch.device("cpu")).total_seconds()
        weak: Any = weakref.ref(self)  # the engine's part does not outlive it
        self.engine = _C.Agreement(lambda mine: weak()._ask(mine), lambda *left: weak()._leave(*left))
        self._question = _Question()
        self._generation = 0
        self._why = ""  # the message of the failure after which the ranks have not begun again
        self._stale: list[str] = []  # keys that no rank needs after the next question
        self._num_asked = 0
        self._begin_round()
        self._must_raise = False  # whether this rank's own thread must raise ``_why``
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._abort_at: float | None = None  # when the watcher aborts the groups, unless this rank has raised
        self._saw_ended: float | None = None  # when this rank first saw that a peer had ended

    def _begin_round(self) -> None:
        """Sets the state of a round of questions. A round ends when all ranks have answered, or after a failure."""
        self._has_answered = False  # to a peer that came back
        self._has_left = False  # its caller knows why, so a failure of this round is no news
        self._is_away = False  # whether this rank has left without asking again
        self._saw_away: float | None = None  # first time at which a peer was away

    # --- calls before a collective, and while it runs ---

    def all_reduce(self, values: torch.Tensor, op: Any, timeout: timedelta | None = None) -> None:
        """All-reduces ``values``, on which the ranks have agreed."""
        if self.group is None:  # on a device
            dist.all_reduce(values, op=op, group=self._users_group())
            self.engine.count()
            return
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        (work,) = post(self.engine.count, functools.partial(self.group.allreduce, [values], options))
        self.wait(work, timeout)

    def wait(self, work: Any, timeout: timedelta | None = None) -> bool:
        """Waits for the work of a collective, and checks the peers meanwhile.

        Raises:
            Diverged: a peer has left, or posts something else.
        """
        posted = work.posted if isinstance(work, Exchange) else work
        if not hasattr(posted, "is_completed"):  # of a synchronous or a custom collective
            return wait(work, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not _is_done(posted, _LOOK_S):
            self._check(looks=True)
            if deadline is not None and time.monotonic() > deadline:
                posted.wait(timedelta(milliseconds=1))  # raises the backend's error
        if isinstance(work, Exchange):
            self._receive(work, deadline, looks=True)
        return True

    def _receive(self, exchange: Exchange, deadline: float | None = None, looks: bool = False) -> None:
        """Waits for the messages of an exchange in a thread, and checks meanwhile whether a rank has ended.

        gloo does not end the wait for a message that was on its way when the connection closed. ``looks``: also checks
        the peers. The caller does not hold the lock then.
        """
        waiting = [_begin(exchange.wait)]
        while not futures.wait(waiting, timeout=_LOOK_S).done:
            self._check(looks)
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("the messages of a collective did not arrive in time")
        waiting.pop().result()

    def _check(self, looks: bool) -> None:
        """Raises an error if this rank waits in vain for a collective that it has posted."""
        if looks:
            _begin(self._look).result()
        self._raise_if_ended(since_s=_ENDED_S)

    def _raise_if_ended(self, since_s: float = 0.0) -> None:
        """Raises RuntimeError if a rank of the group has ended, which was seen ``since_s`` seconds ago."""
        known = introduced()
        if ended := name_ended({rank: known[rank] for rank in self._ranks if rank in known}, wait_s=0):
            now = time.monotonic()
            self._saw_ended = self._saw_ended or now
            if now - self._saw_ended >= since_s:
                raise RuntimeError(f"{ended} ended")

    def watch(self) -> None:
        """Answers peers from a thread, because on a device the host does not wait for collectives.

        The host may also be blocked, as in ``loss.item()``, by a collective that a failed peer never posts. So the
        thread prints the failure, and aborts the groups if this rank has not raised it after ``_ABORT_S``.
        """
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Looks at the peers once, in the watcher's thread. Raises RuntimeError if the store is gone."""
        with self._lock:
            if self._must_raise:
                aborts = self._abort_at is not None and time.monotonic() > self._abort_at
            else:
                aborts = False
                self._watch_locked()
        if aborts:
            self._abort_at = None
            self._tell(f"{_ABORT_S:.0f} s later, this rank still waits for its device. Aborting its communicators.")
            for group in (self._users_group(), self.separate_group):
                if group is not None:
                    torch_private.abort(group)

    def _watch_locked(self) -> None:
        if self._why or self.engine.num_posted == 0:
            return
        knows = self._has_left  # why it has left
        try:
            self._look_locked()
        except Diverged as error:
            self._must_raise = True
            if not knows:
                self._abort_at = time.monotonic() + _ABORT_S
                self._tell(str(error))

    def _tell(self, text: str) -> None:
        print(f"[rank {self._ranks[self._rank]}] {text}", file=sys.stderr, flush=True)

    # --- the protocol ---

    def _key(self, name: Any) -> str:
        return f"{self._generation}/{name}"

    def _has(self, name: Any) -> bool:
        return self._store.check([self._key(name)])

    def _read(self, name: Any) -> Any:
        return json.loads(self._store.get(self._key(name)))

    def _write(self, name: Any, value: Any = 1) -> None:
        self._store.set(self._key(name), json.dumps(value))

    def _write_first(self, name: Any, value: Any) -> Any:
        """Returns what the first rank has written."""
        return json.loads(self._store.compare_set(self._key(name), "", json.dumps(value)))

    def _add(self, name: str, number: int) -> int:
        return self._store.add(self._key(f"{self._num_asked}/{name}"), number)

    def _ask(self, mine: dict) -> None:
        """Waits until all ranks are about to post ``mine``. Raises Diverged."""
        self._question.is_abandoned = True
        self._question = question = _Question()
        try:
            _begin(self._ask_peers, mine, question).result()
        finally:
            question.is_abandoned = True

    def _ask_peers(self, mine: dict, question: _Question) -> None:
        mine["rank"] = self._ranks[self._rank]
        with self._lock, explained(self._users_group(), mine["operation"].removeprefix("is in the ")):
            if self._must_raise:
                self._must_raise = False
                raise Diverged(self._why)
            # After its caller has left, a question must not count: peers would post, and wait for this rank.
            while not question.is_abandoned:
                with contextlib.suppress(_NoNews):  # else all begin again
                    if self._why:
                        self._restart(mine["rank"], question)
                        mine |= {"number": 0, "num_passes": 1}
                    return self._compare(mine, question)

    def _compare(self, mine: dict, question: _Question) -> None:
        self._end_rounds()
        if self._is_away:
            self._is_away = False
            self._add("away", -1)
        if self._why:
            self._has_left = False  # a rank that waits in vain for its peers must know why
        if self._has_answered:
            self._wait_for_all(mine, question)
        if difference := _difference(self._write_first(self._num_asked, mine), mine):
            self._fail(difference)
        self._count()
        self._wait_for_all(mine, question)

    def _count(self) -> None:
        if self._add("count", 1) == len(self._ranks):
            self._write_first(f"{self._num_asked}/end", "")

    def _wait_for_all(self, mine: dict, question: _Question) -> None:
        """Waits until all ranks have asked or answered.

        Raises:
            Diverged: a peer has failed, has ended, or does not come within the group's timeout.
        """
        began = time.monotonic()
        look_for_deaths = began + _LOOK_FOR_DEATHS_S
        num, alarmed = self._num_asked, False
        while True:
            self._end_rounds(num)
            if self._num_asked > num:
                return
            waited = time.monotonic() - began
            problem = self._find_problem(mine["number"], mine["num_passes"]) if waited > _ALARM_S else ""
            if not problem and waited > self.timeout:
                problem = f"rank {mine['rank']} {mine['action']}, and some peers did not in {self.timeout:.0f} s"
            if not problem and question.is_abandoned:
                problem = f"rank {mine['rank']} was interrupted when it {mine['action']}"
            if problem:
                self._fail(problem)
                return
            if waited > _ALARM_S and not alarmed:
                self._write(f"{num}/alarm")
                alarmed = True
            if time.monotonic() > look_for_deaths:
                look_for_deaths = time.monotonic() + _LOOK_FOR_DEATHS_S
                self._raise_if_ended()
            time.sleep(min(max(_POLL_S, waited / 3), 0.02))

    def _fail(self, problem: str) -> None:
        """Ends the round with this problem and raises Diverged, unless all ranks have come meanwhile."""
        if self._has(f"{self._num_asked}/left"):
            left = self._read(f"{self._num_asked}/left")
            problem = f"rank {left['rank']} {left['why']}"
        self._write_first(f"{self._num_asked}/end", f"fsdp2x: the ranks diverged: {problem}. {_ADVICE}")
        self._end_rounds(self._num_asked)

    def _end_rounds(self, num: float = math.inf) -> None:
        """Begins the round in which the peers are. Raises Diverged if one has failed, with the message of all ranks.

        ``num``: the last round to end, in which this rank asks. It first does what all ranks do after that round.
        """
        failed, has_left = False, self._has_left
        while self._num_asked <= num and self._has(f"{self._num_asked}/end"):
            why = self._read(f"{self._num_asked}/end")
            self._stale += self._keys_of(self._num_asked - 1)
            if why:
                failed, self._why = True, why
                self._stale += self._keys_of(self._num_asked) + self._state_keys()
                self._generation += 1
                self._num_asked = 0
                self.engine.ask_next()
            else:
                if self._rank == 0:
                    for key in self._stale:  # all ranks have come to this round, so they do not need earlier ones
                        self._store.delete_key(key)
                self._stale = []
                self._num_asked += 1
            self.engine.is_broken = failed
            self._begin_round()
        if failed:
            raise _NoNews(self._why) if has_left else Diverged(self._why)

    def _keys_of(self, num_asked: int) -> list[str]:
        return [self._key(f"{num_asked}{name}") for name in ("", "/count", "/end", "/left", "/away", "/alarm")]

    def _state_keys(self) -> list[str]:
        return [self._key(f"state/{rank}") for rank in range(len(self._ranks))]

    def _leave(self, why: str, num_passes: int) -> None:
        self._question.is_abandoned = True  # so it ends soon
        futures.wait([_begin(self._leave_now, why, num_passes)], timeout=_GIVE_UP_S)

    def _leave_now(self, why: str, num_passes: int) -> None:
        with self._lock:
            with contextlib.suppress(Diverged):
                self._end_rounds()
            self.engine.is_broken = True
            self.engine.ask_next()
            self._has_left = True
            number = 0 if self._why else self.engine.num_posted
            left = {"rank": self._ranks[self._rank], "why": why, "number": number, "num_passes": num_passes}
            self._write(f"{self._num_asked}/left", left)
            if not self._is_away:
                self._is_away = True
                self._add("away", 1)
            self._write(f"{self._num_asked}/alarm")

    def _look(self) -> None:
        """Checks the peers while this rank waits for a collective that it has posted. Raises Diverged."""
        with self._lock:
            if self._why:
                raise Diverged(self._why)
            self._look_locked()

    def _look_locked(self) -> None:
        """Does the same for a rank that holds the lock and knows of no failure."""
        self._end_rounds()
        num = self._num_asked
        if not self._has(f"{num}/alarm"):
            return
        last = self.engine.num_posted - 1
        if problem := self._find_problem(last, self.engine.describe_posted(last)["num_passes"]):
            self._fail(problem)
        elif not self._has_answered and self._has(num) and (asked := self._read(num))["number"] <= last:
            mine = self.engine.describe_posted(asked["number"])
            if mine is None:
                self._fail(f"rank {asked['rank']} {asked['action']} after its peers have gone on")
            elif difference := _difference(asked, mine | {"rank": self._ranks[self._rank]}):
                self._fail(difference)
            self._has_answered = True
            self._count()

    def _find_problem(self, number: int, num_passes: int) -> str:
        """Returns why collective ``number`` cannot run, or "".

        A peer that has left this pass cannot come. A peer that has left an earlier pass may, so this rank waits for it.
        """
        if not self._has(f"{self._num_asked}/left"):
            return ""
        left = self._read(f"{self._num_asked}/left")
        if self._has_left:  # and has come back, but another one has not
            has_gone = self._stays_away()
            self._has_left = not has_gone
        else:
            has_gone = number >= left["number"] and (num_passes <= left["num_passes"] or self._stays_away())
        if not has_gone:
            return ""
        self._raise_if_ended()  # which then is why the peer left
        return f"rank {left['rank']} {left['why']}"

    def _stays_away(self) -> bool:
        """Returns whether a peer has been away for longer than it may need to come back."""
        now = time.monotonic()
        self._saw_away = None if self._add("away", 0) == 0 else self._saw_away or now
        return self._saw_away is not None and now - self._saw_away > (_AGAIN_S if self._why else _PATIENCE_S)

    def _restart(self, rank: int, question: _Question) -> None:
        """Synchronizes all ranks after a failure and posts missing collectives. Raises Diverged if it cannot."""
        if self._watcher is not None:
            raise Diverged(
                f"{self._why} The process group cannot be used again: a device may still wait. Restart all ranks."
            )
        num = self.engine.num_posted
        recent = [self.engine.describe_posted(number) for number in range(max(num - 256, 0), num)]
        self._write(f"state/{self._rank}", {"number": num, "recent": recent})
        action = "came back after a failure"
        # Its peers left earlier passes.
        self._compare(
            {"rank": rank, "tag": 0, "number": 0, "num_passes": 1 << 62, "action": action, "facts": {}}, question
        )
        states = [json.loads(self._store.get(key)) for key in self._state_keys()]
        self._stale += self._state_keys()
        furthest = max(states, key=lambda state: state["number"])
        known = {posted["number"]: posted for posted in furthest["recent"]}
        missing = [known.get(n) for n in range(min(state["number"] for state in states), furthest["number"])]
        if None in missing:
            raise Diverged(
                f"{self._why} The process group cannot be used again: too much is missing. Restart all ranks."
            )
        for posted in missing[len(missing) - (furthest["number"] - num) :]:
            assert posted is not None, "checked above"
            if posted["is_custom"] or posted["kind"] == "other":
                continue  # these run over the user's group
            group = self.separate_group if posted["is_separate"] else self.group
            assert group is not None, "ranks of a device do not come here"
            with unchecked():
                _repeat(group, posted)
        for group in (self.group, self.separate_group):
            for exchange in [] if group is None else unfinished_exchanges(group):
                self._receive(exchange)
        self._why = ""
        self.engine.restart()


class _Question:
    is_abandoned = False  # whether its caller was interrupted


class _NoNews(Diverged):
    """The ranks failed because this one had left."""


def _watch(weak: weakref.ref[Agreement]) -> None:
    while (agreement := weak()) is not None and agreement._users_group() is not None:
        try:
            agreement._watch()
        except RuntimeError:
            return  # the store is gone
        del agreement
        time.sleep(_LOOK_S)


def _difference(first: dict, second: dict) -> str:
    """Returns how two ranks' collectives differ, or an empty string if they match."""
    if (first["tag"], first["num_passes"]) == (second["tag"], second["num_passes"]):
        return ""
    sides = [f"rank {one['rank']} {one['action']}" for one in (first, second)]
    facts, others = first["facts"], second["facts"]
    different = [fact for fact, value in facts.items() if others.get(fact, value) != value]
    if first["action"] != second["action"]:
        different = [fact for fact in different if fact == "model"]
    if different:
        sides = [
            f"{side} ({different[0]}: {of[different[0]]})" for side, of in zip(sides, (facts, others), strict=True)
        ]
    return ", ".join(sides)


def _repeat(group: dist.ProcessGroup, posted: dict) -> None:
    """Posts a collective of zeros that the peers wait for. The caller waits for unfinished exchanges."""
    dtype, world = _DTYPES.get(posted["dtype"], torch.uint8), dist.get_world_size(group)
    part = torch.zeros(posted["segment_bytes"] // dtype.itemsize, dtype=dtype, device="cpu")
    whole = part.new_zeros(part.numel() * world)
    if posted["parts"]:
        parts = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in posted["parts"]]
        gather_in_place(group, [part.new_empty(part.numel() * world) for part in parts], parts)
    elif posted["kind"] == "all_gather":
        plain_all_gather(group, whole, part).wait()
    elif posted["kind"] == "reduce_scatter":
        reduce_scatter(group, part, whole, average=False).wait()
    elif posted["kind"] == "all_to_all":
        work = all_to_all(group, whole, whole.clone())
        if not isinstance(work, Exchange):
            work.wait()
    else:
        dist.all_reduce(part, group=group)


def _is_done(work: Any, seconds: float) -> bool:
    """Waits for at most ``seconds``. Raises what the collective raised."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True
