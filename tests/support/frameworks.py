"""HuggingFace's accelerate and Trainer inside a rank of the harness, on the FSDP path they only take on devices."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import fsdp2x


@contextlib.contextmanager
def launched(ctx, *, impl: str = "fsdp2x") -> Iterator[None]:
    """Sets a launcher's environment variables while the block runs. Resets accelerate's state afterwards.

    impl: "fsdp2x" runs the block under install(), "torch" without.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = str(ctx.rank), str(ctx.world)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, {**variables, "OMP_NUM_THREADS": "1"}):
        try:
            with fsdp2x.install() if impl == "fsdp2x" else contextlib.nullcontext():
                yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            assert PartialState._shared_state == {}


def fsdp_accelerator_class() -> type:
    """``Accelerator`` that takes the path of its ``fsdp_plugin`` on the CPU, where it would choose DDP."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    class FsdpAccelerator(Accelerator):
        def __init__(self, *args, fsdp_plugin, **kwargs):
            super().__init__(*args, fsdp_plugin=fsdp_plugin, **{**kwargs, "cpu": True})
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.state.fsdp_plugin = fsdp_plugin

    return FsdpAccelerator


def assert_sharded_by_us(model) -> None:
    """The root and more units below it are ours, and every parameter is sharded."""
    from torch.distributed.tensor import DTensor

    units = [module for module in model.modules() if isinstance(module, fsdp2x.FSDPModule)]
    assert isinstance(model, fsdp2x.FSDPModule) and len(units) > 2, type(model).__mro__
    assert all(isinstance(param, DTensor) for param in model.parameters())
