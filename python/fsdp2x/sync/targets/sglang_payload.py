"""A bucket as SGLang's ``load_format="flattened_bucket"`` takes it: one tensor of bytes, and what lies where in it.

    | t0 |gap| t1 |gap| t2 ...       a tensor begins at a multiple of 64 bytes, as views of its dtype must

SGLang unpickles it by an exact list of globals; what is written here needs nothing of SGLang's own. The bytes are in
the payload: nothing is shared, and nothing has to outlive the request.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from fsdp2x.hf.names import TensorSpec
from fsdp2x.runtime.native import _C


def flattened_bucket(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> str:
    """The payload of one rank, in base64."""
    places, end = [], 0
    for spec in specs:
        places.append(SimpleNamespace(name=spec.name, shape=spec.shape, dtype=spec.dtype, numel=spec.num_bytes))
        places[-1].start_idx, places[-1].end_idx = end, end + spec.num_bytes
        end = _C.align_up(end + spec.num_bytes)
    flat = torch.zeros(end, dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=True):
        flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape).copy_(tensor)
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": places}, protocol=4)).decode()
