"""Context managers around steps: ``accumulate`` for micro-batches, ``unsharded`` for generation.

Both change settings of the units and put back what they found, also when the block raises.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Literal, get_args

from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.tree import units_of

# What backwards before a step's last one communicate.
BeforeLast = Literal["nothing", "reduce_scatter"]
BEFORE_LAST = get_args(BeforeLast)


@checked
@contextlib.contextmanager
def accumulate(model: nn.Module, *, last: bool, before_last: BeforeLast = "nothing") -> Iterator[None]:
    """Backwards inside keep their gradients local, except in the ``last`` micro-batch of a step.

        for i, batch in enumerate(micro_batches):
            with fsdp2x.accumulate(model, last=i == len(micro_batches) - 1):
                (model(batch).loss / len(micro_batches)).backward()
        optimizer.step()

    Only backward matters: forward may be outside. ``last=True`` changes nothing, so that what the units are set to
    holds for the backward that reduces. Every rank must pass the same values. To give up a step halfway, call
    ``model.zero_grad()``, which also clears what earlier micro-batches left. ``optimizer.zero_grad()`` cannot see that.

    Args:
        last: whether this backward completes the step.
        before_last: what the other backwards communicate. ``"nothing"``: the least traffic; each unit keeps its whole
            gradients in the reduce dtype, as many bytes as the unsharded trainable parameters have.
            ``"reduce_scatter"``: every backward reduces within the shard group into the sharded gradients, and on a
            2-D mesh (HSDP) only the all-reduce over the replicas waits for the last one; the least memory.

    Raises:
        ValueError: nothing in ``model`` is sharded, or an unknown ``before_last``.
    """
    states = units_of(model, "accumulate")
    if last:
        yield
        return
    before = [
        (state, state.live_options().requires_gradient_sync, state.live_options().requires_all_reduce)
        for state in states
    ]
    try:
        for state in states:
            if before_last == "nothing":
                state.live_options().requires_gradient_sync = False
            state.live_options().requires_all_reduce = False
        yield
    finally:
        # Looked up anew: the options move into the engine's unit at the first forward.
        for state, sync, all_reduce in before:
            state.live_options().requires_gradient_sync = sync
            state.live_options().requires_all_reduce = all_reduce


@checked
@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gathers all units of ``model`` once and keeps them until the end of the block, for generation or evaluation.

        with fsdp2x.unsharded(model), torch.no_grad():
            model.generate(input_ids, synced_gpus=False)

    Inside, a forward communicates nothing: ranks may run different numbers of tokens, so HuggingFace's ``synced_gpus``
    can be off. All units lie in memory at once, in the compute dtype. Entering and leaving are collective. At the end
    each unit is as it was found: units that were sharded are resharded, settings are put back; nests.

    Weights are those of the entry: what changes the sharded parameters inside, such as ``optimizer.step()``, is not
    seen; and what is written to the gathered ones ends with the block, on every rank (FSDP1's ``summon_full_params``
    wrote it back): change the shards, outside. Backward works, but frees each unit that it passes, and the next forward
    gathers that unit again.

    Args:
        model: a module whose units are to be kept. Before its first forward, a sharded ``model`` becomes the root as if
            its forward had run: pass the module that is called, not a part of it.

    Raises:
        ValueError: nothing in ``model`` is sharded.
    """
    states = units_of(model, "unsharded")
    if isinstance(model, FSDPModule) and all(state.is_root is None for state in states):
        model._get_fsdp_state().lazy_init()
    for state in states:
        state.make_unit()
    before = [
        (state, state.live_options().reshard_after_forward, state.live_options().reshard_without_grad)
        for state in states
    ]
    mine = [state for state in states if state.made_unit.param_state != "UNSHARDED"]
    try:
        for state in states:
            state.live_options().reshard_after_forward = False
            state.live_options().reshard_without_grad = False
        # One gather ahead: the staging of more would lie beside all units.
        for state, following in itertools.zip_longest(mine, mine[1:]):
            state.made_unit.begin_unshard()
            if following is not None:
                following.made_unit.begin_unshard()
            state.made_unit.unshard()
        yield
    finally:
        for state, reshard, without_grad in before:
            # A unit that became the root inside keeps its parameters for backward, unless it was told otherwise.
            keeps = bool(state.is_root and state.auto_reshard)
            state.live_options().reshard_after_forward = reshard and not keeps
            state.live_options().reshard_without_grad = without_grad or keeps
        for state in mine:
            state.reshard()
