"""Context managers around steps: ``accumulate`` for micro-batches, ``unsharded`` for generation.

Both change settings of the units and restore them at the end, also if the block raises.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Literal, get_args

from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.lazy_init import lazy_init, make_unit
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.tree import units_of

# Communication of backwards before the last one of a step.
BeforeLast = Literal["nothing", "reduce_scatter"]
BEFORE_LAST = get_args(BeforeLast)


@checked
@contextlib.contextmanager
def accumulate(model: nn.Module, *, last: bool, before_last: BeforeLast = "nothing") -> Iterator[None]:
    """Accumulates gradients over micro-batches and reduces them only in the last one.

        for i, batch in enumerate(micro_batches):
            with fsdp2x.accumulate(model, last=i == len(micro_batches) - 1):
                (model(batch).loss / len(micro_batches)).backward()
        optimizer.step()

    It acts on backward, so forward may run outside. ``last=True`` changes nothing: the units' own settings apply. Every
    rank must pass the same values. To abandon a step halfway, call ``model.zero_grad()``, which also clears gradients
    of earlier micro-batches. ``optimizer.zero_grad()`` does not.

    Args:
        model: a module that contains FSDP units.
        last: whether this backward completes the step.
        before_last: communication of the other backwards. ``"nothing"``: the least traffic, but each rank keeps the
            full gradients in the reduce dtype. ``"reduce_scatter"``: the least memory, because every backward reduces
            over the shard group, and on a 2-D mesh (HSDP) only the all-reduce over the replicas waits.

    Raises:
        ValueError: nothing in ``model`` is sharded, or ``before_last`` is unknown.
    """
    states = units_of(model, "accumulate")
    if last:
        yield
        return
    before = [
        (state.options, state.options.requires_gradient_sync, state.options.requires_all_reduce) for state in states
    ]
    try:
        for options, *_ in before:
            if before_last == "nothing":
                options.requires_gradient_sync = False
            options.requires_all_reduce = False
        yield
    finally:
        for options, sync, all_reduce in before:
            options.requires_gradient_sync, options.requires_all_reduce = sync, all_reduce


@checked
@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gathers all units of ``model`` once and keeps them until the end of the block, for generation or evaluation.

        with fsdp2x.unsharded(model), torch.no_grad():
            model.generate(input_ids, synced_gpus=False)

    A forward inside communicates nothing, so ranks may process different numbers of tokens. The block needs memory for
    all parameters in the compute dtype. Entering and leaving are collective. At the end, units that were sharded are
    resharded and settings are restored. Blocks can be nested.

    Weights keep their values of the entry: changes of the sharded parameters inside, such as ``optimizer.step()``, have
    no effect until the end. Writes to the gathered parameters are lost at the end. Backward works, but frees each unit
    that it passes, and the next forward gathers it again.

    Args:
        model: the module that is called, not a part of it: before the first forward, it becomes the root.

    Raises:
        ValueError: nothing in ``model`` is sharded.
    """
    states = units_of(model, "unsharded")
    if isinstance(model, FSDPModule) and all(state.is_root is None for state in states):
        lazy_init(model._get_fsdp_state())
    for state in states:
        make_unit(state)
    before = [(state, state.options.reshard_after_forward, state.options.reshard_without_grad) for state in states]
    mine = [state for state in states if state.made_unit.param_state != "UNSHARDED"]
    try:
        for state in states:
            state.options.reshard_after_forward = False
            state.options.reshard_without_grad = False
        # Gather one unit ahead. Staging for more would add to the memory of all units.
        for state, following in itertools.zip_longest(mine, mine[1:]):
            state.made_unit.begin_unshard()
            if following is not None:
                following.made_unit.begin_unshard()
            state.made_unit.unshard()
        yield
    finally:
        for state, reshard, without_grad in before:
            # A unit that became the root inside keeps its parameters for backward, unless set otherwise.
            keeps = bool(state.is_root and state.auto_reshard)
            state.options.reshard_after_forward = reshard and not keeps
            state.options.reshard_without_grad = without_grad or keeps
        for state in mine:
            state.reshard()
