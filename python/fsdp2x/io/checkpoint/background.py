"""Keeps staging memory, the agreed plan, and the writing thread between the saves of a model.

    save(async_save=True)   copy shards -> staging; start the thread           this time is measured as the stall
    thread                  write, fsync, checksum, agree with all ranks, publish, retain
    next save, or wait()    join the thread; its error is raised there
    end of the process      join the thread; an error that was not raised becomes the exit code

The thread never uses the training's process groups: ranks agree over a separate gloo group. Every wait of that group
has a timeout, and a rank that dies closes its connections, so the thread always ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base.failures import CheckpointError, Group, LostRanks, rank_and_size
from fsdp2x.base.memory_file import aligned_starts, whole_pages
from fsdp2x.base.native import _C
from fsdp2x.io.checkpoint.disk import page_aligned
from fsdp2x.io.checkpoint.plan import Plan

logger = logging.getLogger(__name__)

# For ranks that write at different speeds. A rank that died is noticed at once.
GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass
class Saved:
    """A finished or running save.

    Attributes:
        num_bytes: tensor bytes that this rank writes.
        stall_s: seconds that `save` blocked training.
        seconds: seconds until the checkpoint was published, or None before that.
    """

    path: Path
    step: int
    form: str
    num_bytes: int = 0
    seconds: float | None = None
    stall_s: float = 0.0
    _saver: Saver | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether the save has ended."""
        return self.seconds is not None or self._saver is None or not self._saver.is_busy

    def wait(self) -> Path:
        """Waits until the checkpoint is published and returns its path. Raises `CheckpointError` if the save failed."""
        if self._saver is not None:
            self._saver.wait()
        return self.path


class Saver:
    """The saver of one model. `plan` is that of its last save. `roots` are folders it loaded from or saved to."""

    def __init__(self) -> None:
        self.roots: set[Path] = set()
        self.plan: Plan | None = None
        self.lost_ranks: LostRanks | None = None
        self.writing_to: Path | None = None  # folder or file of its last asynchronous save
        self.writing_step = 0
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: dist.ProcessGroup | None = None
        self._world: Any = None
        self._guard = _C.ProcessGuard()  # a forked child has no such thread

    @classmethod
    def of(cls, model: torch.nn.Module) -> Saver:
        """Returns the saver of a model. It lives as long as the model."""
        saver = _savers.get(model)
        if saver is None:
            saver = _savers[model] = cls()
        world = dist.group.WORLD if dist.is_initialized() else None
        if saver._world is not world:
            # The process group is new, so agreements with the ranks of the old one are void.
            saver._world, saver._group, saver.plan, saver.lost_ranks = world, None, None, None
        return saver

    def known_ranks(self) -> LostRanks:
        """Returns what names ranks that end during a save or a load. Collective at the first call."""
        if self.lost_ranks is None:
            self.lost_ranks = LostRanks()
        return self.lost_ranks

    @property
    def is_busy(self) -> bool:
        self._guard.require("wait for a save of its parent")
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Joins the thread and raises its error once."""
        self._guard.require("wait for a save of its parent")
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            _lost.pop(id(self), None)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"the previous asynchronous save failed: {error}") from None
            raise RuntimeError(f"the previous asynchronous save failed: {error}") from error

    def others_writing(self, path: Path) -> list[Saver]:
        """Returns savers of other models whose asynchronous save to this folder or file is still running."""
        return [saver for saver in _writing if saver is not self and saver.writing_to == path]

    def finish_writing(self) -> None:
        """Waits for the end of the thread. An error stays for the caller of `wait`."""
        if (thread := self._thread) is not None:
            thread.join()

    def start(
        self, data: list[torch.Tensor], write: Callable[[list[torch.Tensor], Group], None], saved: Saved, begun: float
    ) -> None:
        """Copies `data` and has the thread pass the copies to `write`. Collective at the first call."""
        if self._group is None and rank_and_size()[1] > 1:
            group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup), "this rank is in a group of all ranks"
            self._group = group
        copies = self._staging.fill(data)

        def work() -> None:
            try:
                write(copies, self._group)
                saved.seconds = time.perf_counter() - begun
            except BaseException as error:
                self._error = error
                _lost[id(self)] = os.getpid()
                logger.error("asynchronous save of %s failed: %s", saved.path, error)
            finally:
                _writing.discard(self)

        _writing.add(self)
        self._thread = threading.Thread(target=work, name="fsdp2x-checkpoint")
        self._thread.start()
        saved.stall_s = time.perf_counter() - begun


class Staging:
    """CPU memory for the data of one save. It is kept for the next, so pages are touched only once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sizes: list[int] = []
        self._views: list[torch.Tensor] = []

    def fill(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies as flat bytes."""
        # Only CUDA is known to copy asynchronously into pinned memory. Other copies are waited for one by one.
        on_cuda = any(source.device.type == "cuda" for source in data)
        sizes = [source.numel() for source in data]
        if sizes != self._sizes or on_cuda != self._buffer.is_pinned():
            starts, num_bytes = aligned_starts(sizes)
            if self._buffer.numel() < num_bytes or on_cuda != self._buffer.is_pinned():
                self._views = []
                self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free it before allocating the next one
                pinned = {"dtype": torch.uint8, "pin_memory": True}
                self._buffer = torch.empty(whole_pages(num_bytes), **pinned) if on_cuda else page_aligned(num_bytes)
            self._sizes = sizes
            self._views = [self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        if all(source.device.type == "cpu" and source.is_contiguous() for source in data):
            _C.stream_copies(self._views, data)  # bypass the caches, because the staging is not read soon
            return self._views
        for view, source in zip(self._views, data, strict=True):
            view.copy_(source, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize()
        return self._views


def _end_with_an_error() -> None:
    """Ends the process with exit code 1 if the error of a save was never raised. An exception would not change it.

    Python has joined the threads that write, since they are no daemons.
    """
    if os.getpid() in _lost.values():
        print("fsdp2x: an asynchronous save failed, see above. Its checkpoint does not exist.", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end_with_an_error)
_lost: dict[int, int] = {}  # savers whose error was not raised, by id; the process in which they failed
_savers: weakref.WeakKeyDictionary[torch.nn.Module, Saver] = weakref.WeakKeyDictionary()
_writing: set[Saver] = set()
