"""Ranks that are threads of one process, as in torch's own tests of FSDP2."""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

import fsdp2x

WORLD = 2


def test_threads_train_like_one_process():
    """Two models of one class: each thread counts its own, so that ranks know which of them meet."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    losses: dict[int, list[float]] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            found = []
            for number in range(2):
                model = nn.Linear(4, 4)
                with torch.no_grad():
                    model.weight.fill_(0.5 + number)
                    model.bias.zero_()
                fsdp2x.fully_shard(model)
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                found.append(loss.item())
            losses[rank] = found
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    store = dist.HashStore()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "the ranks wait for each other"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not errors, errors
    assert losses == {rank: [16.0, 48.0] for rank in range(WORLD)}
