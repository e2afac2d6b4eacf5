"""A trainer that pushes into checkpoint-engine's own worker function, in a process beside each rank.

    torchrun push_to_checkpoint_engine.py RESULT

checkpoint-engine wants an accelerator: it finds one named "npu", whose calls do nothing, and memory of the CPU. Rank 0
writes what was found.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import fsdp2x
from fsdp2x.sync import CheckpointEngine, SyncError

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def serve(connection) -> None:
    """Each message is (path of the socket, a name that the loader refuses); the answer is what is held, or a text."""
    torch.npu = SimpleNamespace(is_available=lambda: True)
    nothing = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)
    sys.modules["torch_npu"] = SimpleNamespace(npu=nothing)
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    context, held = zmq.Context(), {}
    while (message := connection.recv()) is not None:
        path, bad, processed = *message, []

        def run(items, bad=bad):
            for name, tensor in items:
                if name == bad:
                    raise KeyError(name)
                held[name] = tensor.clone()

        try:
            update_weights_from_ipc(context, path, None, run=run, post_hook=lambda done=processed: done.append(1))
            connection.send({name: tensor.float().numpy() for name, tensor in held.items()} if processed else "no end")
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


def main(result: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=100, num_key_value_heads=2, head_dim=16, **SIZES)
    model = fsdp2x.fully_shard(AutoModelForCausalLM.from_config(config))
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    process = spawned.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    bad: list[str | None] = [None]
    answers: list = []

    def request(socket_paths: list[tuple[str, str]]) -> None:
        ours.send((socket_paths[rank][1], bad[0]))
        answers.append(ours.recv())
        if isinstance(answers[-1], str):
            raise RuntimeError(answers[-1])

    found = {}
    target = CheckpointEngine(request)
    with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, bucket_bytes=20_000, timeout_s=120) as sync:
        for version in range(4):
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.25)
            bad[0] = "model.layers.1.mlp.up_proj.weight" if version == 2 and rank == 1 else None
            try:
                report = sync.push(version=version)
                found[version] = {"buckets": report.num_buckets, "tensors": report.num_tensors, "s": report.seconds}
            except SyncError as error:
                found[version] = {"phase": error.phase, "rank": error.rank, "reason": error.reason}
                continue
            whole = {}
            for bucket in fsdp2x.export.stream(model, dtype=torch.bfloat16):
                whole.update((name, tensor.float()) for name, tensor in bucket.items())
            held = answers[-1]
            same = held.keys() == whole.keys() and all((whole[name].numpy() == held[name]).all() for name in whole)
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, bool(same))
            found[version]["same"] = everywhere
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, [answer for answer in answers if isinstance(answer, str)])
    ours.send(None)
    process.join(60)
    if rank == 0:
        with open(result, "w") as file:
            json.dump({"pushes": found, "workers": said}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
