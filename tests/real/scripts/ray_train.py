"""Ray Train's TorchTrainer on two workers: the loop shards, saves by DCP, fails once, and resumes from its checkpoint.

Started without torchrun. Ray starts the workers, so each installs fsdp2x itself. No change for a CPU.
"""

import os
import sys
from pathlib import Path

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}

import ray
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    import sys

    sys.path.insert(0, config["scripts"])
    sys.argv[1:] = [config["answer"]]
    if config["transport"]:
        import fsdp2x

        os.environ["FSDP2X_TRANSPORT"] = config["transport"]
        fsdp2x.install()
    import tiny
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from ray import train
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import report

    rank = dist.get_rank()
    os.environ["RANK"] = str(rank)
    model = tiny.qwen3()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, values, checkpoint = 0, [], train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            shards = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(shards, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=shards["model"], optim_state_dict=shards["optimizer"])
        start = 4
    for step, ids in enumerate(tiny.batches(12, 2, rank)):
        if step < start:
            continue
        if step == 6 and checkpoint is None:
            raise RuntimeError("a worker fails, as a test")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        saved = None
        if step == 3:
            shards = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(shards, checkpoint_id=config["answer"] + ".dcp")
            dist.barrier()
            saved = Checkpoint.from_directory(config["answer"] + ".dcp") if rank == 0 else None
        train.report({"loss": loss.item()}, checkpoint=saved)
    assert start == 4, "the workers were not restarted from the checkpoint"
    report.write(values, model)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).parent
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 << 20)
    settings = {"scripts": os.path.dirname(os.path.abspath(__file__)), "answer": sys.argv[1]}
    trainer = TorchTrainer(
        loop,
        train_loop_config={**settings, "transport": os.environ.get("FSDP2X_TRANSPORT")},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(
            name=Path(sys.argv[1]).stem,
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    trainer.fit()
    ray.shutdown()
