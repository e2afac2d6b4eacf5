"""``WeightSource``: presents a sharded model to vLLM's trainer classes, by their protocol but without their types.

A trainer class of vLLM (``WeightTransferTrainerFactory.trainer_init(init_info, client=, source=)``) asks for
``metadata``, iterates, and may ask for groups. It keeps tensors of several buckets until its own chunk is full, and
iterates inside its own transfers. So each tensor has separate memory and is complete when it is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2x.api import MergedModel, check_transport, running_step
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import call_of
from fsdp2x.io.export.stream import BUCKET_BYTES, BucketPlan, check_bucket_bytes, chosen_params, run_plans
from fsdp2x.rl.sync.wire import by_layers, layer_of, plan_wire


@dataclass(frozen=True)
class SourceParam:
    """One item of the iteration: ``dtype`` on the wire, ``shape`` of the full tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Yields full weights in the order that vLLM's trainer classes expect: before the layers, each layer, after them.

        trainer = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(..., rank=rank), client=client, source=fsdp2x.sync.WeightSource(model, torch.bfloat16)
        )
        trainer.send_weights()                            on every rank

    Each iteration is a separate pass over the current weights. It is collective: every rank runs it to its end, between
    two steps of the model. If a rank ends a pass early, the others wait in a gather until their process group times
    out.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        keep: Mapping[str, torch.dtype] | None = None,
        params: Callable[[str, torch.Tensor], bool] | None = None,
        merge_adapters: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        receive: bool = True,
        transport: str = "auto",
    ) -> None:
        """Plans the iteration.

        Args:
            model: a module sharded by ``fully_shard``, or a part of one.
            dtype: dtype of floating-point parameters, cast at the shard. Default: their own. Buffers keep theirs.
            keep: dtypes by pattern, as for ``connect``.
            params: predicate over FQN and sharded parameter or buffer, the same on every rank. Default: all.
            merge_adapters: see ``connect``.
            bucket_bytes: size of a gather. Two are in memory; what the trainer class keeps is not included.
            receive: whether this rank gets tensors. With False it takes part and yields None for each tensor.
            transport: see ``fully_shard``.

        Raises:
            ValueError: an argument is impossible, or a pattern of ``keep`` matches nothing.
        """
        caller = "fsdp2x.sync.WeightSource"
        check_bucket_bytes(caller, bucket_bytes)
        self._caller, self._model, self._dtype, self._keep, self._params = caller, model, dtype, keep or {}, params
        self._merges, self._bucket_bytes, self._receive, self._transport = (
            merge_adapters,
            bucket_bytes,
            receive,
            check_transport(transport),
        )
        self._plans()

    def _plans(self) -> list[BucketPlan]:
        """Makes the plans again, because parameters may have been replaced."""
        chosen = chosen_params(self._caller, self._model, self._params)
        merged = MergedModel(self._caller, self._model) if self._merges else None
        return plan_wire(
            self._caller, self._model, chosen, self._dtype, self._keep, "hf", self._bucket_bytes, by_layers, merged
        )

    def metadata(self) -> list[SourceParam]:
        """Returns name, dtype and shape of each item of an iteration, in order. Gathers nothing."""
        return [SourceParam(s.name, s.dtype, tuple(s.shape)) for plan in self._plans() for s in plan.specs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (name, full tensor). Collective.

        Raises:
            RuntimeError: a forward or backward of the model is running.
        """
        if (step := running_step(self._model)) is not None:
            raise RuntimeError(f"{self._caller}: a {step} of the model is running. Send between two steps.")
        plans = self._plans()
        params = [entry.param for plan in plans for entry in plan.entries]
        call = call_of(self._caller, self._model, params, names_shapes=True)
        for bucket in run_plans(plans, self._receive, self._transport, call):
            # Copy all before handing out the first, because the receiver may use another stream.
            copies = [None] * len(bucket.names) if bucket.tensors is None else [t.clone() for t in bucket.tensors]
            for device in {copy.device for copy in copies if copy is not None and copy.device.type != "cpu"}:
                torch.get_device_module(device).current_stream(device).synchronize()
            copies.reverse()
            for name in bucket.names:
                yield name, copies.pop()

    def held_names(self) -> None:
        """Returns None: every rank holds all weights."""

    def groups(self) -> list[list[str]]:
        """Returns the names of ``metadata`` in order: those before the layers, each layer, those after them."""
        groups: list[list[str]] = []
        before: object = None
        for param in self.metadata():
            key = layer_of(param.name)
            if not groups or key != before:
                groups.append([])
            groups[-1].append(param.name)
            before = key
        return groups

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor | None]]]:
        """Yields the items of the iteration, one group of ``groups`` at a time."""
        items = iter(self)
        for group in self.groups():
            yield group, [next(items)[1] for _ in group]
        for _ in items:
            pass  # the end of the pass is collective as well
