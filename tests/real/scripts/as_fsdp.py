"""Sets accelerate's state to FSDP, as ``install()`` does, because accelerate only enables it on accelerators."""

import accelerate.state
from accelerate.state import PartialState
from accelerate.utils import DistributedType

make = accelerate.state.AcceleratorState.__init__


def as_fsdp(self, *args, **kwargs):
    make(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU and kwargs.get("fsdp_plugin") is not None:
        # The shared state too: every later AcceleratorState() takes the type from there.
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = kwargs["fsdp_plugin"]
        if self._mixed_precision != "no":
            self.fsdp_plugin.set_mixed_precision(self._mixed_precision)


accelerate.state.AcceleratorState.__init__ = as_fsdp
