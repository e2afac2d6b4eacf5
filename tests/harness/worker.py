"""The code of a rank: initializes the group, then runs the bodies that the parent names, one after another.

A worker sleeps in `recv` between bodies. SIGUSR1 makes it write the stacks of all its threads to its log.
"""

import faulthandler
import gc
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from harness.context import GROUP_TIMEOUT, Context, run_body


def main(rank: int, world: int, port: int, connection: Connection, log_path: str, sys_path: list[str]) -> None:
    """Entry point of the process. Messages in: (body, impl, options, arguments, keywords) or None for the end."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group of processes; the parent ends us
    sys.path[:] = sys_path
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++, the thread that crashed first
    _reuse_meshes()
    _seed_devices_that_are_there()
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    # Imported modules stay, so the collection after each body need not visit them.
    gc.freeze()
    connection.send(("ready", None, 0, False))
    while (message := _next_message(connection)) is not None:
        body, impl, options, arguments, keywords = message
        try:
            function = body.load()
        except BaseException as error:
            connection.send(("fail", f"cannot import {body.path}: {type(error).__name__}: {error}", 0, False))
            continue
        status, value = run_body(function, Context(rank, world, impl, options), arguments, keywords)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()  # what outlives a body is a cache or a module, in which no later collection needs to look
        try:
            connection.send((status, value, dist.distributed_c10d._world.group_count, _has_diverged()))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(("fail", f"the body's return value cannot be sent to the parent: {error}", 0, False))
    if dist.is_initialized():
        dist.destroy_process_group()


def meet_again(ctx: Context) -> None:
    """Body that ends the collectives in which ranks still wait for one that raised instead of joining them."""
    from fsdp2x.base.failures import exchange

    for _ in range(3):  # a rank may learn of the failure by the first one
        try:
            exchange(None, None)
            return
        except RuntimeError as error:
            last = error
    raise last


def _has_diverged() -> bool:
    import torch.distributed as dist

    agreements = sys.modules.get("fsdp2x.base.agreement")
    agreement = agreements and dist.is_initialized() and agreements.agreement_of(dist.group.WORLD)
    return bool(agreement and agreement.engine.is_broken)


def _reuse_meshes() -> None:
    """Bodies that ask for a mesh of the same shape and names get the same one.

    A mesh of two axes makes gloo groups with their own threads and sockets, and DTensor's caches never drop meshes.
    After some hundred bodies, a rank would have as many threads.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh

    make, made = device_mesh.init_device_mesh, {}

    def reused(device_type, mesh_shape, **options):
        key = (device_type, tuple(mesh_shape), options.get("mesh_dim_names"))
        if options.keys() - {"mesh_dim_names"}:
            return make(device_type, mesh_shape, **options)
        if key not in made:
            made[key] = make(device_type, mesh_shape, **options)
        return made[key]

    device_mesh.init_device_mesh = dist.init_device_mesh = reused


def _seed_devices_that_are_there() -> None:
    """`torch.manual_seed` keeps a seed and the text of the stack for each kind of device that is not in use yet.

    Reading the sources of the stack took a twelfth of what the ranks compute; a kind that has no device needs no seed.
    """
    import torch

    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None


def _next_message(connection: Connection):
    try:
        return connection.recv()
    except EOFError:  # the parent is gone
        return None
