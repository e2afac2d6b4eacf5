"""Measures weights into an engine process: ``sync.push`` in full and as a delta, against common ways without it.

    python benchmarks/bench_sync.py [--hidden 1024] [--layers 16] [--repeats 5] [--bucket-mib 16] [--changed 0.01]

Starts its own 2 ranks and 1 engine, which copies weights into its own parameters. All sides alternately send the same
sharded Qwen3 in fp32. Reports milliseconds from the call to the engine's last copy, and the bytes that it got.

    per tensor   ``full_tensor()`` of each parameter, a message and a gloo broadcast to the engine for each
    one bucket   ``full_tensor()`` of each parameter into one 512 MiB bucket of shared memory, stop and wait
    push         ``sync.push`` to a ``Peer``, with ``connect``'s defaults
    push, held   the same with ``deltas=True``, which keeps a snapshot
    delta        ``sync.push(mode="delta")`` of that session after ``--changed`` of the elements changed
    copy         the wire's bytes written once and read once, by one process
"""

from __future__ import annotations

import math
import os
import sys
from multiprocessing import resource_tracker, shared_memory

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import harness
from bench_export import build_model

BUCKET_BYTES = 512 << 20
WAYS = ("per tensor", "one bucket", "push", "push, held", "delta", "copy")
TRAINERS = [0, 1]
ENGINE = 2


class Gathered:
    """Shared part of the two old ways: the model's full tensors, one at a time, and a group with the engine."""

    def __init__(self, model, pair, memory) -> None:
        self.params = list(model.parameters())
        self.pair, self.memory, self.is_sender = pair, memory, dist.get_rank() == 0

    def per_tensor(self, timer) -> None:
        for param in self.params:
            whole = param.detach().full_tensor()
            if self.is_sender:
                dist.broadcast_object_list([whole.numel()], src=0, group=self.pair)
                dist.broadcast(whole, src=0, group=self.pair)
        self._answer()

    def one_bucket(self, timer) -> None:
        end, sizes = 0, []
        for param in [*self.params, None]:
            whole = None if param is None else param.detach().full_tensor()
            if whole is None or end + whole.nbytes > BUCKET_BYTES:
                if self.is_sender:
                    dist.broadcast_object_list([sizes], src=0, group=self.pair)
                    self._answer()
                end, sizes = 0, []
            if whole is not None and self.is_sender:
                self.memory[end : end + whole.nbytes].view(torch.float32).copy_(whole.view(-1))
            if whole is not None:
                end += whole.nbytes
                sizes.append(whole.numel())

    def _answer(self) -> None:
        if self.is_sender:
            dist.broadcast(torch.zeros(1), src=ENGINE, group=self.pair)


def addresses() -> dict[str, str]:
    """Way -> where the engine listens for pushes of that way's session."""
    plain = f"@fsdp2x-bench-{os.environ['MASTER_PORT']}"
    return {"push": plain, "push, held": f"{plain}-held", "delta": f"{plain}-held"}


def serve(shapes, pair, memory) -> None:
    """The engine: follows what rank 0 says comes next, until it says None."""
    from fsdp2x.rl.sync.receiver.engine import Parameters, Receiver

    held = {name: torch.zeros(shape) for name, shape in shapes}
    receivers = {address: Receiver(address, Parameters(held)) for address in set(addresses().values())}
    dist.barrier()
    while (way := _told(pair)) is not None:
        if way == "per tensor":
            for tensor in held.values():
                whole = torch.empty(_told(pair))
                dist.broadcast(whole, src=0, group=pair)
                tensor.view(-1).copy_(whole)
            dist.broadcast(torch.zeros(1), src=ENGINE, group=pair)
        elif way == "one bucket":
            left = list(held.values())
            while left:
                end = 0
                for numel in _told(pair):
                    left.pop(0).view(-1).copy_(memory[end : end + 4 * numel].view(torch.float32))
                    end += 4 * numel
                dist.broadcast(torch.zeros(1), src=ENGINE, group=pair)
        else:
            while receivers[addresses()[way]].poll(60) is None:
                pass
    sums = [tensor.double().sum().item() for tensor in held.values()]
    dist.broadcast_object_list([sums], src=ENGINE, group=pair)
    for receiver in receivers.values():
        receiver.close()


def _told(pair):
    told = [None]
    dist.broadcast_object_list(told, src=0, group=pair)
    return told[0]


@torch.no_grad()
def change(model, fraction: float) -> None:
    for param in model.parameters():
        local = param.to_local().view(-1)
        local[:: max(1, round(1 / fraction))] += 1e-3


def rows_of(results: dict) -> list[list[str]]:
    rows = [["way", "MB to the engine", "ms", "against push"]]
    base = results["push"]["step"]["median_ms"]
    for name in (way for way in WAYS if way in results):
        took = results[name]["step"]["median_ms"]
        rows.append([name, f"{results['wire_bytes'][name] / 1e6:.1f}", f"{took:.1f}", f"{took / base:.2f}x"])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="beside push")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=3, timeout_s=1800)
    rank = harness.start_group()
    trainers, pair = dist.new_group(TRAINERS), dist.new_group([0, ENGINE])
    memory = shared_memory.SharedMemory(create=True, size=BUCKET_BYTES) if rank == 0 else None
    name = [memory.name if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    if memory is None:
        memory = shared_memory.SharedMemory(name=name[0])
        resource_tracker.unregister(memory._name, "shared_memory")  # rank 0 removes it
    bucket = torch.frombuffer(memory.buf, dtype=torch.uint8)
    dist.barrier()
    if rank == 0:
        memory.unlink()
    model = build_model(args.hidden, args.layers)
    shapes = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    if rank == ENGINE:
        serve(shapes, pair, bucket)
    else:
        train(model, shapes, trainers, pair, bucket, args)
    dist.destroy_process_group()
    return 0


def train(model, shapes, trainers, pair, bucket, args) -> None:
    import fsdp2x

    is_sender = dist.get_rank() == 0
    fsdp2x.fully_shard(model, mesh=DeviceMesh.from_group(trainers, "cpu"))
    old = Gathered(model, pair, bucket)
    options = {"names": "model", "group": trainers, "bucket_bytes": args.bucket_mib << 20}
    plain, holding = (
        fsdp2x.sync.connect(model, fsdp2x.sync.Peer(addresses()[way]), deltas=deltas, **options)
        for way, deltas in (("push", False), ("delta", True))
    )
    dist.barrier()
    reports, versions = {}, iter(range(1 << 30))

    def announced(way: str, run):
        def step(timer) -> None:
            if is_sender:
                dist.broadcast_object_list([way], src=0, group=pair)
            run(timer)

        return step

    def pushes(way: str, sync, mode: str = "full"):
        def push(timer) -> None:
            reports[way] = sync.push(version=next(versions), mode=mode)

        return announced(way, push)

    def changed(timer) -> None:
        change(model, args.changed)
        timer.mark("change")

    wire = torch.zeros(sum(math.prod(shape) for _, shape in shapes), dtype=torch.float32)
    copies = [torch.empty_like(wire) for _ in range(2)]

    def copy(timer) -> None:
        if is_sender:  # written once, read once
            copies[0].copy_(wire)
            copies[1].copy_(copies[0])

    push, held = pushes("push", plain), pushes("push, held", holding)
    delta = pushes("delta", holding, "delta")
    held(None)
    steps = {
        "per tensor": announced("per tensor", old.per_tensor),
        "one bucket": announced("one bucket", old.one_bucket),
        "push": push,
        "push, held": held,
        "delta": lambda timer: (changed(timer), delta(timer), timer.mark("push")),
        "copy": copy,
    }
    steps = {way: step for way, step in steps.items() if way in args.ways or way == "push"}
    samples = harness.alternate(steps, warmup=1, count=args.repeats, before=lambda: dist.barrier(group=trainers))
    expected = [tensor.double().sum().item() for _, tensor in fsdp2x.full_tensors(model)]
    push(None)
    if is_sender:
        dist.broadcast_object_list([None], src=0, group=pair)
        sums = [None]
        dist.broadcast_object_list(sums, src=ENGINE, group=pair)
        assert sums[0] == expected, "the engine has other weights"
        results = {name: sample.summary() for name, sample in samples.items()}
        if "delta" in results:
            results["delta"]["step"] = results["delta"]["push"]
        sent = dict.fromkeys(steps, wire.nbytes) | {name: report.bytes_sent for name, report in reports.items()}
        results |= {
            "parameters": len(shapes),
            "wire_bytes": sent,
            "changed": getattr(reports.get("delta"), "num_changed", 0),
        }
        print(f"{len(shapes)} parameters, {wire.nbytes / 1e9:.2f} GB, {results['changed']} changed", flush=True)
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "sync", results)
    plain.close()
    holding.close()


if __name__ == "__main__":
    sys.exit(main())
