"""Finds out what one GPU allows: memory of another process by CUDA IPC, MPS, and two ranks of NCCL.

Writes to probe.json in the folder FSDP2X_OUT why each is impossible, or "". Without a GPU, shared memory and gloo stand
in. NCCL takes two ranks on one GPU since 2.30. To try another NCCL than torch's, set LD_PRELOAD to its library.
"""

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_parts import TWO_RANKS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIMEOUT_S = 40


def add_one(values: torch.Tensor, done) -> None:
    values += 1
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    done.set()


def ipc() -> None:
    """Another process writes to this one's memory."""
    values, context = torch.zeros(1 << 20, device=DEVICE), mp.get_context("spawn")
    done = context.Event()
    process = context.Process(target=add_one, args=(values, done))
    process.start()
    assert done.wait(TIMEOUT_S - 10), "the other process has not answered"
    process.join(10)
    assert values.sum().item() == values.numel(), values


def rank() -> None:
    """The collectives of a step, between two ranks on the first device."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S - 10))
    mine = torch.full((1024,), 1.0 + dist.get_rank(), device=DEVICE)
    gathered, reduced = torch.empty(2048, device=DEVICE), torch.empty(512, device=DEVICE)
    for _ in range(3):
        dist.all_gather_into_tensor(gathered, mine)
        dist.reduce_scatter_tensor(reduced, mine)
        dist.all_reduce(mine.clone())
        dist.broadcast(gathered, src=0)
    assert gathered.sum().item() == 3 * 1024 and reduced.sum().item() == 3 * 512, (gathered, reduced)
    dist.destroy_process_group()


def attempt(*command: str, **environment: str) -> str:
    """Returns why the command failed. Empty: it did not."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"not done after {TIMEOUT_S} s"
    print(output)
    errors = [line.strip() for line in output.splitlines() if "Error" in line]
    return "" if process.returncode == 0 else (errors or ["no message"])[-1][:200]


def main() -> None:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29524", __file__, "rank"]
    mps = shutil.which("nvidia-cuda-mps-control")
    failures = {  # the page quotes the last line
        "MPS": "" if mps else "nvidia-cuda-mps-control is not installed",
        "memory of another process": attempt(__file__, "ipc"),
        "two ranks on one device": attempt(*launch, **TWO_RANKS),
    }
    for what, why in failures.items():
        print(f"{DEVICE} can run {what}: {'yes' if not why else 'no, ' + why}")
    path = Path(os.environ.get("FSDP2X_OUT", ".")) / "probe.json"
    path.write_text(json.dumps(failures, indent=1) + "\n")


if __name__ == "__main__":
    {"ipc": ipc, "rank": rank}.get(sys.argv[1] if len(sys.argv) > 1 else "", main)()
