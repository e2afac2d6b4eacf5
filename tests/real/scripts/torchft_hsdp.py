"""torchft: two replica groups of two ranks, sharded inside, averaged across by torchft through the all-reduce hook.

It runs without torchrun, because this program is the lighthouse and starts both groups. It kills group 1 at step 4 and
starts it again. The new group 1 takes weights and moments from group 0, which continues without a restart. The number
of steps that group 0 does alone depends on timing. Losses do not, because from step 4 on both groups see the same
batches. No change for a CPU.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLED, AFTER = 4, 4


def supervise(answer: str) -> None:
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=120_000, heartbeat_timeout_ms=5_000)
    way = ["-m", "fsdp2x.run"] if "FSDP2X_TRANSPORT" in os.environ else []
    address = "http://127.0.0.1:" + house.address().rsplit(":", 1)[1]

    def start(group: int, life: int) -> subprocess.Popen:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *way, __file__]
        words += [answer, str(group), str(life)]
        return subprocess.Popen(words, env=os.environ | {"TORCHFT_LIGHTHOUSE": address})

    groups = [start(0, 0), start(1, 0)]
    try:
        assert groups[1].wait(timeout=240) != 0, "group 1 was to be killed"
        groups[1] = start(1, 1)
        for group in groups:
            assert group.wait(timeout=240) == 0, "a group failed"
    finally:
        for group in groups:
            group.terminate()
            group.wait()
        house.shutdown()


def train(answer: str, group: int, life: int) -> None:
    import tiny
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torchft import Manager, ProcessGroupGloo

    import report

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = tiny.qwen3()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def shards() -> dict:
        moments = {
            i: {name: getattr(value, "_local_tensor", value) for name, value in optimizer.state[param].items()}
            for i, param in enumerate(model.parameters())
            if param in optimizer.state
        }
        return {"weights": [param.to_local().detach() for param in model.parameters()], "moments": moments}

    def take(state: dict) -> None:
        with torch.no_grad():
            for i, (param, weight) in enumerate(zip(model.parameters(), state["weights"], strict=True)):
                param.to_local().copy_(weight)
                for name, value in state["moments"].get(i, {}).items():
                    like = name != "step"
                    optimizer.state[param][name] = (
                        torch.distributed.tensor.DTensor.from_local(
                            value, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
                        )
                        if like
                        else value
                    )

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=take,
        state_dict=shards,
        use_async_quorum=False,
        replica_id=f"group_{group}_",
        init_sync=False,
    )

    def average(gradients: torch.Tensor) -> None:
        manager.allreduce(gradients).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)
    # The first quorum waits for both groups once both have heartbeats.
    Path(f"{answer}.there.{group}.{rank}").touch()
    while life == 0 and not all(Path(f"{answer}.there.{i}.{j}").exists() for i in range(2) for j in range(2)):
        time.sleep(0.1)
    values, num_groups = [], []
    while num_groups[KILLED:].count(2) < AFTER:
        step = manager.current_step()
        if group == 1 and life == 0 and step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        manager.start_quorum()
        step = manager.current_step()
        num_groups += [0] * (step - len(num_groups)) + [manager.num_participants()]
        ids = tiny.batches(1, 2, 10 * step + rank + (2 * group if step < KILLED else 0))[0]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if manager.should_commit():
            optimizer.step()
        values.append((step, loss.item(), num_groups[-1]))
    weights = torch.cat([param.to_local().flatten() for param in model.parameters()]).double()
    end = f"{weights.sum().item().hex()} {weights.square().sum().item().hex()}"
    # Under its name only when it is whole: the other group waits for the name.
    part = Path(f"{answer}.end.{group}.{rank}.part")
    part.write_text(end)
    part.rename(f"{answer}.end.{group}.{rank}")
    if group == 0:
        assert [count for _, _, count in values[:KILLED]] == [2] * KILLED, values
        assert 1 in num_groups, "group 0 did no step alone"
        while not Path(f"{answer}.end.1.{rank}").exists():
            time.sleep(0.1)
        same = Path(f"{answer}.end.1.{rank}").read_text() == end
        assert same, "the group that came back has other weights"
        # The first steps, as many as every run has: 4 with both groups, some alone, AFTER with both again.
        report.write([loss for _, loss, _ in values[: KILLED + 1 + AFTER]], model)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        supervise(sys.argv[1])
    else:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
