"""Shared code of one-GPU tests: where they run, a mesh, training, and benchmarks as meters."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2x.base.native import _C
from reference import install_streams

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import device_work  # noqa: E402
import hf_shapes  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and finds none")


def _backends() -> tuple[str, ...]:
    """Those of NCCL: torch 2.15 has two."""
    has_two = hasattr(dist.distributed_c10d, "_create_nccl2_process_group")
    return ("nccl-legacy", "nccl2") if has_two else ("nccl",)


# Runs the same body on the device with each of its backends, and as a rehearsal on the CPU. The rehearsal records
# streams and events, and runs reference kernels.
each_backend = pytest.mark.parametrize(
    "place, backend",
    [
        *(pytest.param("cuda", name, marks=needs_gpu) for name in _backends()),
        pytest.param("streams", "gloo", marks=pytest.mark.full),
    ],
)
POLICIES = hf_shapes.POLICIES
# Tolerances for two sides that add in a different order, by policy.
CLOSE = {"fp32": {"rtol": 1e-4, "atol": 1e-6}, "bf16": {"rtol": 2e-2, "atol": 1e-3}}


def on_gpu(ctx):
    """The ranks' mesh, all of them on the first GPU."""
    torch.cuda.set_device(0)
    return init_device_mesh("cuda", (ctx.world,))


def device_of(place: str) -> str:
    """The type of the device that `place` means; the first GPU becomes the current one, the CPU gets its recorder."""
    if place == "cuda":
        torch.cuda.set_device(0)
        return "cuda"
    install_streams()
    return "cpu"


def train(model, loss_of: Callable, num: int = 4, around=None) -> list[torch.Tensor]:
    """Losses and local gradients of `num` steps of torch's AdamW; `loss_of(model, step)` inside `around()`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(num):
        with around() if around is not None else contextlib.nullcontext():
            loss = loss_of(model, step)
            loss.backward()
            results += [loss.detach(), *[param.grad.to_local().clone() for param in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return results


def requested_bytes(which: str = "current") -> int:
    """Returns the bytes of all tensors on the device, without the allocator's rounding."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def clean_base(dtype: torch.dtype | None = None) -> int:
    """Returns the bytes allocated once cuBLAS has its workspaces (64 MiB on Hopper), also for autograd's thread."""
    plain = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024)).cuda().to(dtype)
    plain(torch.randn(8, 1024, device="cuda", dtype=dtype)).sum().backward()
    del plain
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return requested_bytes()


@contextlib.contextmanager
def skipped_without_windows():
    """NCCL may give a rank alone no window of symmetric memory, without NVLink or NVLS."""
    try:
        yield
    except RuntimeError as error:
        if "window" not in str(error).lower():
            raise
        pytest.skip(f"NCCL registers no window here: {str(error).splitlines()[0]}")


def needs_kernels() -> None:
    """Skips where the extension was built without nvcc: torch's operations stand in for its kernels, piece by piece."""
    if not _C.has_device_kernels():
        pytest.skip("fsdp2x was built without CUDA kernels: build it where nvcc is, with CUDA=ON")
    assert _C.can_run_kernels(torch.device("cuda", torch.cuda.current_device()))


def needs_memory(num_bytes: float) -> None:
    """Skips if the device has less free memory."""
    free = torch.cuda.mem_get_info()[0]
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of the device, {free / 2**30:.0f} GiB are free")


def needs_traces() -> None:
    """Skips where torch's profiler does not see the device: CUPTI is missing or not allowed."""
    square = torch.ones(64, 64, device="cuda")
    for _ in range(2):
        trace = device_work.trace_of(lambda: square @ square)
    if not device_work.work_of(trace):
        pytest.skip("torch's profiler records no kernels here")


def measured(script: str, entry: str, *arguments: str, timeout: float = 280) -> list[dict]:
    """Runs a GPU benchmark in a separate process on the device and returns its results."""
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, str(BENCHMARKS / script), "--json", str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=_environment())
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(path.read_text())["results"][entry]


def _environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in launcher}
