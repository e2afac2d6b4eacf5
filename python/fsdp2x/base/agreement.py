"""Makes the ranks of a process group agree on each collective before it is posted.

The engine (``csrc/engine/transport/agreement.hpp``) calls ``Agreement._ask`` for a collective that does not repeat what
all ranks did before. The ranks then compare through the group's store, under keys that every rank derives alike:

    K          the first rank that asks for the K-th time writes what it is about to post, and the others compare
    K/count    how many agree; the last one writes K/go, and all post. A rank that waits too long writes it instead,
               and all raise
    K/left     the rank whose forward or backward raised, how many collectives it had posted, and why
    K/away     how many ranks have left and have not asked again
    K/alarm    one of the above needs ranks that wait in a collective, so they look
    failed     the message that every rank raises
    again/...  after a failure: how many collectives each rank has posted, and how many ranks have left since

A rank that posts what is expected writes nothing. If its peers ask at that moment, the collectives differ, or a peer
has come back after its forward raised. The rank answers when it has waited for ``_LOOK_S``. A steady step neither
writes nor reads the store.

After a failure, the ranks synchronize at their next collective. Each rank repeats the collectives that only its peers
have posted, with zeros. Then collectives match again.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
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
_GIVE_UP_S = 1.0  # a question whose caller is gone ends earlier
_PATIENCE_S = 2.0  # a rank that left an earlier pass may come back, and its peers wait for it so long
_ABORT_S = 30.0  # a rank that has not raised so long after a failure is blocked by its device
_AGAIN_S = 5.0  # the same after a failure, when all ranks are to begin again
_VERBS = {"all_gather": "gathers", "reduce_scatter": "reduces", "all_to_all": "reduces", "all_reduce": "all-reduces"}
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


def all_reduce_agreed(group: dist.ProcessGroup, values: torch.Tensor, op: Any, what: str) -> None:
    """All-reduces ``values`` outside of any unit. ``what`` follows the rank in messages: "clips gradients".

    Raises:
        Diverged: another rank does something else.
    """
    agreement = agreement_of(group)
    if agreement is None or not agreement.has_group(what):
        dist.all_reduce(values, op=op, group=group)
    else:
        agreement.engine.agree(what, what, values.nbytes, values.dtype)
        agreement.all_reduce(values, op)


@contextlib.contextmanager
def reported(call: str, kind: type[BaseException] = BaseException) -> Iterator[None]:
    """If the block, which is not in a forward or backward, raises, peers that wait for this rank in it raise, too.

    ``kind``: KeyboardInterrupt for a block whose other exceptions the ranks exchange.
    """
    try:
        for agreement in list(_agreements.values()):
            agreement.engine.begin_call()
        yield
    except Diverged:
        raise
    except kind as error:
        for agreement in list(_agreements.values()):
            agreement.engine.leave_call(f"left the {call}, which raised {type(error).__name__}")
        raise


def undisturbed(function: Callable[..., T], *args: Any) -> T:
    """Runs ``function`` in another thread, where signal handlers do not raise, and waits.

    If a handler raises in the caller meanwhile, the function runs on.
    """
    answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((function(*args), None))
        except BaseException as error:
            answer.put((None, error))

    _thread.start_new_thread(run, ())
    result, error = answer.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # or it lives with the backward that it ends, until a garbage collection
    return result


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
        self.engine = _C.Agreement(lambda mine: weak()._ask_undisturbed(mine), lambda *left: weak()._leave(*left))
        # Makes ``group`` from the user's, at the first need.
        self.make_group: Callable[[dist.ProcessGroup], dist.ProcessGroup] | None = None
        self._caller_is_gone = threading.Event()  # of the last question
        self._left_meanwhile: tuple[str, int] | None = None  # arguments of _leave during the running question
        self._generation = 0
        self._stale: list[str] = []  # keys of the last generation
        self._num_asked = 0
        self._begin_round()
        self._failed = ""  # the message, once a failure is known
        self._must_raise = False  # whether this rank's own thread must raise that message
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._abort_at: float | None = None  # when the watcher aborts the groups, unless this rank has raised
        self._saw_ended: float | None = None  # when this rank first saw that a peer had ended
        self._requests: queue.SimpleQueue | None = None  # of the thread that waits for messages

    def _begin_round(self) -> None:
        """Sets the state of a round of questions. A round ends when all ranks have answered, or after a failure."""
        self._has_answered = False  # to a peer that came back
        self._has_left = False
        self._is_away = False  # whether this rank has left without asking again
        self._left_again = False  # whether this rank has left after a failure, and has not come to begin again
        self._saw_away: float | None = None  # first time at which a peer was away

    # --- calls before a collective, and while it runs ---

    def meet(self, call: str) -> None:
        """Waits until all ranks are about to exchange objects. Messages name ``call``, which this rank is in.

        Raises:
            Diverged: a peer does something else.
        """
        with reported(call):
            self.engine.ask_next()
            self.engine.agree("exchange of objects", f"is in the {call}")
            self.engine.count()

    def has_group(self, what: str) -> bool:
        """Returns whether ``group`` may run collectives of ``what``. Collective: makes the group at first."""
        if self.group is None and self.make_group is not None:
            self.meet(what)
            undisturbed(self._make_group)
        return self.group is not None

    def _make_group(self) -> None:
        with self._lock:
            users_group = self._users_group()
            if self.make_group is not None and users_group is not None:
                self.group, self.make_group = self.make_group(users_group), None

    def all_reduce(self, values: torch.Tensor, op: Any, timeout: timedelta | None = None) -> None:
        """All-reduces ``values``, on which the ranks have agreed."""
        assert self.group is not None, "checked by the caller"
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        (work,) = post(self.engine.count, functools.partial(self.group.allreduce, [values], options))
        self.wait(work, timeout)

    def exchange(self, call: str, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks. Messages name ``call``, which this rank is in.

        Raises:
            Diverged: a peer does something else.
        """
        with reported(call), torch_private.unobserved():
            self.engine.ask_next()
            sizes = self._gather(call, torch.tensor([len(mine)], device="cpu").view(torch.uint8)).view(torch.int64)
            padded = torch.frombuffer(bytearray(mine.ljust(int(sizes.max()))), dtype=torch.uint8)
            rows = self._gather(call, padded).view(len(sizes), -1)
            return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def _gather(self, call: str, mine: torch.Tensor) -> torch.Tensor:
        assert self.group is not None, "checked by the caller"
        self.engine.agree("exchange of objects", f"is in the {call}", mine.nbytes)
        gathered = mine.new_empty(len(self._ranks) * mine.numel())
        self.wait(plain_all_gather(self.group, gathered, mine, self.engine.count))
        return gathered

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
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            weakref.finalize(self, self._requests.put, None)
            threading.Thread(target=_wait_for_exchanges, args=(self._requests,), daemon=True).start()
        answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._requests.put((exchange, answer))
        while True:
            try:
                error = answer.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                self._check(looks)
                if deadline is not None and time.monotonic() > deadline:
                    raise RuntimeError("the messages of a collective did not arrive in time") from None
        if error is not None:
            raise error

    def _check(self, looks: bool) -> None:
        """Raises an error if this rank waits in vain for a collective that it has posted."""
        if looks:
            undisturbed(self._look)
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
        if self._failed or self.engine.num_posted == 0:
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

    def _count(self, name: str) -> None:
        if self._store.add(self._key(f"{name}/count"), 1) == len(self._ranks):
            self._end_wait(f"{name}/go", "all came")

    def _end_wait(self, name: str, how: str) -> str:
        """Returns how the wait for ``name`` ends, which the first rank decides."""
        return json.loads(self._store.compare_set(self._key(name), "", json.dumps(how)))

    def _ask_undisturbed(self, mine: dict) -> bool:
        self._caller_is_gone.set()
        self._caller_is_gone = caller_is_gone = threading.Event()
        try:
            return undisturbed(self._ask, mine, caller_is_gone)
        finally:
            caller_is_gone.set()

    def _ask(self, mine: dict, caller_is_gone: threading.Event) -> bool:
        """Waits until all ranks are about to post ``mine``. Raises Diverged."""
        try:
            return self._ask_peers(mine, caller_is_gone)
        finally:
            if left := self._left_meanwhile:
                self._leave(*left)

    def _ask_peers(self, mine: dict, caller_is_gone: threading.Event) -> bool:
        mine["rank"] = self._ranks[self._rank]
        with self._lock, explained(self._users_group(), _operation(mine)):
            self._question, self._left_meanwhile = caller_is_gone, None
            if self._must_raise:
                self._must_raise = False
                raise Diverged(self._failed)
            while not self._compare(mine):
                self._restart()
                mine |= {"number": 0, "num_passes": 1}
        return True

    def _compare(self, mine: dict) -> bool:
        """Returns False if the peers failed because this rank left, or all failed before. They begin again."""
        if self._failed or (self._has_left and self._has("failed")):
            return False
        if self._is_away:
            self._is_away = False
            self._store.add(self._key(f"{self._num_asked}/away"), -1)
        try:
            if self._has_answered:
                self._wait_for(f"{self._num_asked}/go", mine)
                self._finish_asking()
            asked = self._key(self._num_asked)
            first = json.loads(self._store.compare_set(asked, "", json.dumps(mine)))
            if difference := _difference(first, mine):
                self._fail(difference)
            self._count(str(self._num_asked))
            self._wait_for(f"{self._num_asked}/go", mine)
            self._finish_asking()
        except Diverged:
            if not self._has_left:
                raise
            return False  # its caller knows why it left
        return True

    def _finish_asking(self) -> None:
        if self._rank == 0 and self._num_asked > 0:
            # All ranks have finished the last exchange, because they came to this one.
            self._delete(self._keys_of(self._num_asked - 1))
        self._delete_stale()
        self._num_asked += 1
        self._begin_round()
        self.engine.is_broken = False

    def _keys_of(self, num_asked: int) -> list[str]:
        return [self._key(f"{num_asked}{name}") for name in ("", "/count", "/go", "/left", "/away", "/alarm")]

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _delete_stale(self) -> None:
        """Deletes the keys of earlier generations. All ranks have begun this one."""
        if self._rank == 0:
            self._delete(self._stale)
        self._stale = []

    def _leave(self, why: str, num_passes: int) -> bool:
        self._caller_is_gone.set()
        # A question that nobody waits for ends soon, unless the ranks are about to begin again.
        if self._lock.acquire(timeout=_GIVE_UP_S):
            try:
                self._leave_locked(why, num_passes)
            finally:
                self._lock.release()
        else:
            self._left_meanwhile = (why, num_passes)
        return True

    def _leave_locked(self, why: str, num_passes: int) -> None:
        self.engine.is_broken = True
        self.engine.ask_next()
        if self._failed or self._has("failed"):  # peers may wait for this rank to begin again
            text = f"fsdp2x: the ranks diverged: rank {self._ranks[self._rank]} {why}. {_ADVICE}"
            self._write("again/left", text)
            if not self._left_again:
                self._left_again = True
                self._store.add(self._key("again/away"), 1)
            if self._has("again/go"):  # they have begun again, because this rank has waited for them before
                left = {"rank": self._ranks[self._rank], "why": why, "number": 0, "num_passes": 1}
                self._store.set(f"{self._generation + 1}/0/left", json.dumps(left))
                self._store.set(f"{self._generation + 1}/0/alarm", "1")
            return
        self._has_left = True
        number = self.engine.num_posted
        left = {"rank": self._ranks[self._rank], "why": why, "number": number, "num_passes": num_passes}
        self._write(f"{self._num_asked}/left", left)
        if not self._is_away:
            self._is_away = True
            self._store.add(self._key(f"{self._num_asked}/away"), 1)
        self._write(f"{self._num_asked}/alarm")

    def _look(self) -> None:
        """Checks the peers while this rank waits for a collective that it has posted. Raises Diverged."""
        with self._lock:
            self._look_locked()

    def _look_locked(self) -> None:
        if self._failed:
            raise Diverged(self._failed)
        num = self._num_asked
        if not self._has(f"{num}/alarm"):
            return
        last = self.engine.num_posted - 1
        posted = self.engine.describe_posted(last)
        self._check_peers(last, posted["num_passes"])
        if self._has_answered:
            if self._has(f"{num}/go"):
                self._finish_asking()
        elif self._has(num) and (asked := self._read(num))["number"] <= last:
            mine = self.engine.describe_posted(asked["number"])
            if mine is None:
                self._fail(f"rank {asked['rank']} {_told(asked)} after its peers have gone on")
            if difference := _difference(asked, mine | {"rank": self._ranks[self._rank]}):
                self._fail(difference)
            self._has_answered = True
            self._count(str(num))

    def _check_peers(self, number: int, num_passes: int) -> None:
        """Raises Diverged if a peer has found a failure, or has left before collective ``number`` and does not come.

        A peer that has left this pass cannot come. A peer that has left an earlier pass may, so this rank waits for it.
        """
        if self._has("failed"):
            self._fail("")
        if self._has(f"{self._num_asked}/left"):
            left = self._read(f"{self._num_asked}/left")
            if self._has_left:  # and has come back, but another one has not
                has_gone = self._stays_away()
                self._has_left = not has_gone
            else:
                has_gone = number >= left["number"] and (num_passes <= left["num_passes"] or self._stays_away())
            if has_gone:
                self._raise_if_ended()  # which then is why the peer left
                self._fail(f"rank {left['rank']} {left['why']}")

    def _stays_away(self) -> bool:
        """Returns whether a peer has been away for more than ``_PATIENCE_S`` seconds."""
        if self._store.add(self._key(f"{self._num_asked}/away"), 0) == 0:
            self._saw_away = None
        elif self._saw_away is None:
            self._saw_away = time.monotonic()
        return self._saw_away is not None and time.monotonic() - self._saw_away > _PATIENCE_S

    def _wait_for(self, name: str, mine: dict | None = None) -> None:
        """Waits until a peer writes ``name``. ``mine`` is the collective that this rank asks for, if any.

        Raises:
            Diverged: a peer has failed, has ended, or does not come within the group's timeout.
        """
        began = time.monotonic()
        look_for_deaths = began + _LOOK_FOR_DEATHS_S
        alarmed = False
        while not self._has(name):
            # Peers may count on this rank. If they have all come, it only has not posted.
            if mine and self._question.is_set() and self._end_wait(name, "too late") == "too late":
                self._fail(f"rank {self._ranks[self._rank]} was interrupted when it {_told(mine)}")
            now = time.monotonic()
            if mine is not None and now - began > _ALARM_S:
                self._check_peers(mine["number"], mine["num_passes"])
                if not alarmed:
                    self._write(f"{self._num_asked}/alarm")
                    alarmed = True
            elif mine is None and now - began > _AGAIN_S and self._store.add(self._key("again/away"), 0) > 0:
                raise Diverged(self._read("again/left"))
            if now > look_for_deaths:
                look_for_deaths = now + _LOOK_FOR_DEATHS_S
                self._raise_if_ended()
            # Ranks that came back may try again.
            if now - began > self.timeout and (mine is None or self._end_wait(name, "too late") == "too late"):
                what = "came back after a failure" if mine is None else _told(mine)
                self._fail(f"rank {self._ranks[self._rank]} {what}, and some peers did not in {self.timeout:.0f} s")
            time.sleep(min(max(_POLL_S, (now - began) / 3), 0.02))
        if self._read(name) == "too late":
            self._fail("")

    def _fail(self, difference: str) -> None:
        """Raises Diverged with the message of the first failing rank. ``difference`` is empty if that is a peer."""
        if difference:
            if self._has(f"{self._num_asked}/left"):
                left = self._read(f"{self._num_asked}/left")
                difference = f"rank {left['rank']} {left['why']}"
            text = f"fsdp2x: the ranks diverged: {difference}. {_ADVICE}"
            self._store.compare_set(self._key("failed"), "", json.dumps(text))
            self._write(f"{self._num_asked}/alarm")
        self._failed = self._read("failed")
        self.engine.is_broken = True
        self.engine.ask_next()
        raise Diverged(self._failed)

    def _restart(self) -> None:
        """Synchronizes all ranks after a failure and posts missing collectives. Raises Diverged if it cannot."""
        why = self._failed or self._read("failed")
        if self._watcher is not None:
            raise Diverged(f"{why} The process group cannot be used again: a device may still wait. Restart all ranks.")
        if self._left_again:
            self._left_again = False
            self._store.add(self._key("again/away"), -1)
        num = self.engine.num_posted
        recent = [self.engine.describe_posted(number) for number in range(max(num - 256, 0), num)]
        if not self._has(f"again/{self._rank}"):  # otherwise it has already waited in vain
            self._write(f"again/{self._rank}", {"number": num, "recent": recent})
            self._count("again")
        self._wait_for("again/go")
        end = time.monotonic() + _AGAIN_S
        while self._store.add(self._key("again/away"), 0) > 0:  # that rank has waited before, and does not wait now
            if time.monotonic() > end:
                raise Diverged(self._read("again/left"))
            time.sleep(_LOOK_S / 10)
        self._delete_stale()
        states = [self._read(f"again/{rank}") for rank in range(len(self._ranks))]
        furthest = max(states, key=lambda state: state["number"])
        known = {posted["number"]: posted for posted in furthest["recent"]}
        missing = [known.get(n) for n in range(min(state["number"] for state in states), furthest["number"])]
        for posted in missing:
            if posted is None:
                raise Diverged(f"{why} The process group cannot be used again: too much is missing. Restart all ranks.")
        for posted in missing[len(missing) - (furthest["number"] - num) :]:
            assert posted is not None, "checked above"
            if posted["is_custom"] or posted["operation"] == "other":
                continue  # these run over the user's group
            group = self.separate_group if posted["is_separate"] else self.group
            assert group is not None, "ranks of a device do not come here"
            with unchecked():
                _repeat(group, posted)
        for group in (self.group, self.separate_group):
            for exchange in [] if group is None else unfinished_exchanges(group):
                self._receive(exchange)
        names = ("failed", "again/count", "again/go", "again/left", "again/away")
        self._stale = [self._key(name) for name in names]
        self._stale += [self._key(f"again/{rank}") for rank in range(len(self._ranks))]
        for num_asked in range(max(self._num_asked - 1, 0), self._num_asked + 2):  # of any rank
            self._stale += self._keys_of(num_asked)
        self._generation += 1
        self._num_asked = 0
        self._begin_round()
        self._failed = ""
        self.engine.restart()


def _watch(weak: weakref.ref[Agreement]) -> None:
    while (agreement := weak()) is not None and agreement._users_group() is not None:
        try:
            agreement._watch()
        except RuntimeError:
            return  # the store is gone
        del agreement
        time.sleep(_LOOK_S)


def _wait_for_exchanges(requests: queue.SimpleQueue) -> None:
    while (request := requests.get()) is not None:
        exchange, answer = request
        try:
            exchange.wait()
            answer.put(None)
        except Exception as error:
            answer.put(error)
        del request, exchange, answer  # or they live until the next request


def _told(collective: dict) -> str:
    """Describes a collective, to follow the number of its rank: "gathers unit 'a' in forward"."""
    if collective["subject"] == 0:
        return collective["name"]
    return f"{_VERBS[collective['operation']]} unit {collective['name']!r} {collective['pass']}"


def _operation(collective: dict) -> str:
    """Names a collective as errors of a backend do: "all-gather of unit 'a'"."""
    if collective["subject"] == 0:
        return collective["name"].removeprefix("is in the ")
    kind = {"all_gather": "all-gather", "all_reduce": "all-reduce"}.get(collective["operation"], "reduction")
    return f"{kind} of unit {collective['name']!r}"


def _difference(first: dict, second: dict) -> str:
    """Returns how two ranks' collectives differ, or an empty string if they match."""
    if (first["tag"], first["num_passes"]) == (second["tag"], second["num_passes"]):
        return ""
    ranks = f"rank {first['rank']}", f"rank {second['rank']}"
    verbs = [_VERBS.get(one["operation"]) for one in (first, second)]
    if verbs[0] != verbs[1] or any(first[key] != second[key] for key in ("subject", "name", "pass")):
        told = [_told(one) for one in (first, second)]
        if first["model"] != second["model"]:
            told = [
                f"{text} of {one['model']}" if one["model"] else text
                for text, one in zip(told, (first, second), strict=True)
            ]
        return f"{ranks[0]} {told[0]}, {ranks[1]} {told[1]}"
    what = f"unit {first['name']!r}" if first["subject"] else first["name"]
    for name, value in first["settings"].items():
        if value != (other := second["settings"][name]):
            return f"{name} of {what} is {value} on {ranks[0]} and {other} on {ranks[1]}"
    for name, is_trained in first.get("trained", {}).items():
        if is_trained != second.get("trained", {}).get(name, is_trained):
            return f"requires_grad of {name!r} is {is_trained} on {ranks[0]} and {not is_trained} on {ranks[1]}"
    for one, other, rank in ((first, second, ranks[0]), (second, first, ranks[1])):
        if _is_replaced(other) and not _is_replaced(one):
            how = "under a dispatch mode, under a patch of torch.distributed, or with a custom collective"
            return f"{rank} {_told(one)} {how}, and other ranks do not"
    if first["num_passes"] != second["num_passes"]:
        passes = f"in its pass {first['num_passes']}", f"in its pass {second['num_passes']}"
        return f"{ranks[0]} {_told(first)} {passes[0]}, {ranks[1]} {passes[1]}"
    if first["segment_bytes"] == second["segment_bytes"]:
        return f"{ranks[0]} and {ranks[1]} train different parameters of {what}"
    return f"{ranks[0]} {_told(first)} with {first['segment_bytes']} bytes, {ranks[1]} with {second['segment_bytes']}"


def _is_replaced(collective: dict) -> bool:
    """Whether messages or an all-to-all run in place of FSDP2's collective (``collectives.may_replace``)."""
    return bool(collective["parts"]) or collective["operation"] == "all_to_all"


def _repeat(group: dist.ProcessGroup, posted: dict) -> None:
    """Posts a collective of zeros that the peers wait for. The caller waits for unfinished exchanges."""
    dtype = _DTYPES.get(posted["dtype"], torch.uint8)
    part = torch.zeros(posted["segment_bytes"] // dtype.itemsize, dtype=dtype, device="cpu")
    whole = part.new_zeros(part.numel() * dist.get_world_size(group))
    op = dist.ReduceOp.AVG if posted["averages"] else dist.ReduceOp.SUM
    if posted["parts"]:
        world = dist.get_world_size(group)
        parts = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in posted["parts"]]
        gather_in_place(group, [part.new_empty(part.numel() * world) for part in parts], parts)
    elif posted["operation"] == "all_gather":
        plain_all_gather(group, whole, part).wait()
    elif posted["operation"] == "reduce_scatter":
        reduce_scatter(group, part, whole, posted["averages"]).wait()
    elif posted["operation"] == "all_to_all":
        work = all_to_all(group, whole, whole.clone())
        if not isinstance(work, Exchange):
            work.wait()
    else:
        dist.all_reduce(part, op=op, group=group)


def _is_done(work: Any, seconds: float) -> bool:
    """Waits for at most ``seconds``. Raises what the collective raised."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True
