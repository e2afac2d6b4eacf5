"""torch's helpers for full state dicts give an optimizer its state back."""

import copy

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from harness import distributed
from models import STACK_UNITS, Stack, step
from reference import both_transports, parity, same


@distributed(world_sizes=(2,))
@both_transports
def test_optimizer_state_dict_round_trip(ctx, transport):
    """The state goes out whole and comes back into a fresh model and optimizer; training continues bit for bit."""

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            step(ctx, model, optimizer, number)
        whole = StateDictOptions(full_state_dict=True)
        saved = copy.deepcopy(get_model_state_dict(model, options=whole))
        saved_optimizer = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
        wanted = [step(ctx, model, optimizer, number) for number in (2, 3)]
        set_model_state_dict(model, saved, options=whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        set_optimizer_state_dict(model, optimizer, saved_optimizer, options=whole)
        again = [step(ctx, model, optimizer, number) for number in (2, 3)]
        same(again, wanted, "after loading")
        return again

    parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
