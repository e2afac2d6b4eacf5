"""``InProcess``: an engine in the trainer's process, given as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.rl.sync.receiver.engine import MERGED_BASE
from fsdp2x.rl.sync.targets.base import EngineTarget, PushBucket, TargetError, WireLayout


class InProcess(EngineTarget):
    """Passes (name, full tensor) to ``load_weights`` on every rank that has an engine.

        InProcess(llm_model.load_weights)                     a list for each bucket
        InProcess(None)                                       this rank has no engine

    ``load_weights`` may keep the tensors, as vLLM does until a layer is complete. With ``copies=False`` it gets the
    gathered memory itself, which is reused after the next bucket.
    """

    @checked
    def __init__(
        self,
        load_weights: Callable | None,
        *,
        copies: bool = True,
        apply_delta: Callable | None = None,
        finish: Callable | None = None,
        load_adapter: Callable | None = None,
    ) -> None:
        """Makes a target of functions.

        Args:
            load_weights: function of a list of (name, tensor), on the parameters' device. Called for each bucket.
            copies: whether it gets copies. With False it must copy what it needs before it returns.
            apply_delta: ``apply_delta(name, positions, values)``, with int64 positions in the flattened tensor. Without
                it delta pushes raise.
            finish: ``finish(version)``, called once after all ranks have loaded everything, such as
                ``finish_weight_update`` or a reset of the prefix cache.
            load_adapter: ``load_adapter(adapter, tensors)`` for ``connect(weights="adapter")``, with the tensors by
                name. It changes nothing and returns a function that installs the adapter at the commit. ``finish``
                comes after it.
        """
        self._has_engine, self._copies = load_weights is not None, copies
        # An engine that is an empty container is false, but still an engine.
        self._load, self._finish = (_ignore if call is None else call for call in (load_weights, finish))
        self._apply = apply_delta
        self._load_adapter = load_adapter
        self._adapter: dict[str, Any] | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._install: Callable = _ignore
        self._is_merged = self._will_be_merged = False  # whether the engine's weights include an adapter
        self.takes_adapters = load_adapter is not None or load_weights is None

    def receives(self, rank: int) -> bool:
        return self._has_engine

    def check(self, caller: str, deltas: bool) -> None:
        if deltas and self._has_engine and self._apply is None:
            raise NotImplementedError(
                f"{caller}: engines load full tensors, so deltas need InProcess(load_weights, apply_delta=...). "
                "Without it connect with deltas=False and push full weights."
            )

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        self._adapter, self._staged, self._will_be_merged = layout.adapter, {}, layout.is_merged

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        if self._adapter is not None and self._is_merged:
            raise TargetError.at("begin", MERGED_BASE)

    def take(self, buckets: Iterator[PushBucket]) -> None:
        for bucket in buckets:
            if self._adapter is None:
                self._take_one(bucket)
                continue
            names = [spec.name for spec in bucket.specs]
            self._staged.update(zip(names, [tensor.clone() for tensor in bucket.tensors], strict=True))

    def _take_one(self, bucket: PushBucket) -> None:
        try:
            pairs = zip(bucket.specs, bucket.tensors, strict=True)
            items = [(spec.name, tensor.clone() if self._copies else tensor) for spec, tensor in pairs]
            if items:
                self._load(items)
            for delta in bucket.deltas:
                assert self._apply is not None, "checked when connecting"
                self._apply(delta.spec.name, delta.positions, delta.values)
        except Exception as error:
            raise TargetError.at("load", f"load_weights raised {type(error).__name__}: {error}", bucket) from error

    def finish(self, version: int | str) -> None:
        if self._adapter is None:
            return self._finish(version)
        assert self._load_adapter is not None, "checked when connecting"
        self._install = self._load_adapter({**self._adapter, "version": version}, self._staged)
        self._staged = {}

    def commit(self, version: int | str) -> None:
        if self._adapter is not None:
            self._install()
            return self._finish(version)
        self._is_merged = self._will_be_merged

    def abort(self, reason: str) -> None:
        self._staged = {}


def _ignore(*_: object) -> None:
    """Does nothing, for engines that need no such call."""
