"""``WeightSource``: a sharded model as what vLLM's own trainer classes send from, in their words, not in their types.

A trainer class of vLLM (``WeightTransferTrainerFactory.trainer_init(init_info, client=, source=)``) asks for
``metadata``, iterates, and may ask for groups. It keeps tensors until a chunk of its own is full, whatever bucket they
came from, and it iterates inside of its own transfers: each tensor has memory of its own, and is complete when it is
handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import call_of
from fsdp2x.io.export.stream import BUCKET_BYTES, BucketPlan, check_bucket_bytes, chosen_params, run_plans
from fsdp2x.lifecycle.tree import running_step
from fsdp2x.rl.sync.merged import AdapterMerge
from fsdp2x.rl.sync.wire import by_layers, layer_of, plan_wire
from fsdp2x.sharding.transport import check_transport


@dataclass(frozen=True)
class SourceParam:
    """What one step of the iteration gives: ``dtype`` on the wire, ``shape`` of the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Whole weights of a model, in the order that vLLM's trainer classes expect: before, layer by layer, after.

        trainer = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(..., rank=rank), client=client, source=fsdp2x.sync.WeightSource(model, torch.bfloat16)
        )
        trainer.send_weights()                            on every rank

    Each iteration is a pass of its own over the weights as they are then. It is collective: every rank runs it to its
    end, and none has a step of the model under way. A pass that ends early leaves the other ranks in a gather, until
    their process group gives up.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        keep: Mapping[str, torch.dtype] | None = None,
        params: Callable[[str, nn.Parameter], bool] | None = None,
        merge_adapters: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        receive: bool = True,
        transport: str = "auto",
    ) -> None:
        """
        Args:
            model: sharded by ``fully_shard``, or a part of one.
            dtype: of floating-point weights, cast at the shard; default that of the parameters.
            keep: dtypes by pattern, as for ``connect``.
            params: which parameters, by FQN and sharded parameter; the same choice on every rank. Default all.
            merge_adapters: as for ``connect``.
            bucket_bytes: of a gather; two of them are in memory, and what the trainer class keeps comes on top.
            receive: False: this rank takes part, and yields None for each tensor, such as where only rank 0 sends.
            transport: as for ``fully_shard``.

        Raises:
            ValueError: an argument that cannot be; a pattern of ``keep`` that matches nothing.
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
        """Made anew, because parameters may be others by now."""
        chosen = chosen_params(self._caller, self._model, self._params)
        merge = AdapterMerge(self._caller, self._model, chosen) if self._merges else None
        return plan_wire(
            self._caller, self._model, chosen, self._dtype, self._keep, "hf", self._bucket_bytes, by_layers, merge
        )

    def metadata(self) -> list[SourceParam]:
        """Name, dtype and shape of what an iteration yields, in its order. Gathers nothing."""
        return [SourceParam(s.name, s.dtype, tuple(s.shape)) for plan in self._plans() for s in plan.specs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (name, whole tensor); collective.

        Raises:
            RuntimeError: a forward or backward of the model runs.
        """
        if (step := running_step(self._model)) is not None:
            raise RuntimeError(f"{self._caller}: a {step} of the model is running; send between two steps")
        plans = self._plans()
        params = [entry.param for plan in plans for entry in plan.entries]
        call = call_of(self._caller, self._model, params, names_shapes=True)
        for bucket in run_plans(plans, self._receive, self._transport, call):
            # Copies of all, before the first is handed out: whoever takes it may be on another stream.
            copies = [None] * len(bucket.names) if bucket.tensors is None else [t.clone() for t in bucket.tensors]
            for device in {copy.device for copy in copies if copy is not None and copy.device.type != "cpu"}:
                torch.get_device_module(device).current_stream(device).synchronize()
            copies.reverse()
            for name in bucket.names:
                yield name, copies.pop()

    def held_names(self) -> None:
        """Every rank holds all of them."""

    def groups(self) -> list[list[str]]:
        """Names of ``metadata``, in its order: what stands before the layers, each layer, what stands after them."""
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
        """The iteration, a group of ``groups`` at a time."""
        items = iter(self)
        for group in self.groups():
            yield group, [next(items)[1] for _ in group]
        for _ in items:
            pass  # the end of the pass is collective, too
