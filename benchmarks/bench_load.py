"""Measures seconds until a sharded model has the weights of safetensors files, with fsdp2x and five other ways.

    python benchmarks/bench_load.py [--hidden 512] [--layers 16] [--repeats 3] [--cold] [--json FILE]

Starts its own 2 ranks and first writes a Qwen3 (bf16) into a temporary folder. Each sample is a new process per rank.
The clock starts after its imports and after it joined its group. It builds the model on the meta device, shards it, and
loads it.

    fsdp2x            from_pretrained: each rank reads its rows
    fsdp2x broadcast  the same, read by rank 0 and sent
    transformers      from_pretrained(distributed_config=...): FSDP2 shards whose memory is the mapped file
    every rank        each rank loads the full model with transformers, then shards with FSDP2
    rank 0 broadcast  rank 0 loads the full model; torch's set_model_state_dict(broadcast_from_rank0=True)
    accelerate        cpu_ram_efficient_loading: full model on rank 0, fsdp2_load_full_state_dict

Before its clock starts, a process allocates and frees as much memory as the files take. A virtual machine may return
free memory to its host. The first use of such a page then waits for the host, for seconds per GB.

The first step after it is one forward, backward, and SGD update of 128 tokens. Shards that are mapped files read and
copy their pages there, so compare the sum of both.

Also reports the peaks of private memory and of mapped files over the start (MB, largest rank), and bytes read through
read calls (percent of the files, largest rank). Mapped files do not count as read. ``--cold`` drops the files from the
page cache before each sample.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from bench_step import qwen3_sizes
from peers import shard_stock

WAYS = ("fsdp2x", "fsdp2x broadcast", "transformers", "every rank", "rank 0 broadcast", "accelerate")


def write_model(folder: Path, hidden: int, layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**qwen3_sizes(hidden, layers, 3 * hidden, vocab=8192), dtype="bfloat16")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="500MB")


def load(way: str, folder: str):
    """One sharded model; every way ends with the same units and values."""
    import transformers

    import fsdp2x

    if way.startswith("fsdp2x"):
        mode = "broadcast" if way.endswith("broadcast") else "each"
        return fsdp2x.from_pretrained(folder, mode=mode, progress=False)
    cls = transformers.AutoModelForCausalLM
    if way == "every rank":
        return shard_stock(cls.from_pretrained(folder))
    if way == "transformers":
        from transformers.distributed import DistributedConfig

        return cls.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()))
    rank = dist.get_rank()
    if way == "rank 0 broadcast":
        from accelerate import init_empty_weights
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = cls.from_pretrained(folder).state_dict() if rank == 0 else {}
        with init_empty_weights():
            model = cls.from_config(transformers.AutoConfig.from_pretrained(folder))
        # The files have no rotary frequencies, and to_empty leaves in buffers what the memory held.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        shard_stock(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        set_model_state_dict(model, state, options=options)
        return model
    return load_with_accelerate(cls, folder)


def load_with_accelerate(cls: type, folder: str):
    """Loads by accelerate's FSDP2 path. On a CPU, accelerate takes this path only with these settings."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = cls.from_pretrained(folder)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))[0]


class PeakMemory:
    """Largest private memory of this process and largest part of mapped files in it, over what it had at the start.

    Sampled every few milliseconds.
    """

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._sample()

    def _sample(self) -> None:
        self._peak = tuple(map(max, self._peak, _resident_bytes()))

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self.private, self.mapped = (peak - start for peak, start in zip(self._peak, self._start, strict=True))


def _resident_bytes() -> tuple[int, ...]:
    """Private bytes, and those of mapped files and shared memory."""
    found = dict(re.findall(r"(Rss\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return int(found["RssAnon"]) << 10, (int(found["RssFile"]) + int(found["RssShmem"])) << 10


def _read_bytes() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def own_memory(folder: str) -> None:
    """Uses what the files take, in huge pages, and frees it: memory that the machine then has."""
    from fsdp2x.io.checkpoint.disk import page_aligned

    page_aligned(sum(file.stat().st_size for file in Path(folder).iterdir())).fill_(1)


def sample(way: str, folder: str) -> None:
    """Runs one sample in this process. Rank 0 prints the result."""
    if way == "accelerate":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
    rank = harness.start_group()
    import accelerate  # noqa: F401
    import transformers
    from transformers import Qwen3ForCausalLM  # noqa: F401

    from fsdp2x import from_pretrained  # noqa: F401, the first name imports what all of them need

    transformers.utils.logging.disable_progress_bar()
    own_memory(folder)
    dist.barrier()
    read, start = _read_bytes(), time.perf_counter()
    with PeakMemory() as memory:
        model = load(way, folder)
        dist.barrier()
        seconds = time.perf_counter() - start
    read = _read_bytes() - read
    mine = {"seconds": seconds, "peak_bytes": memory.private, "mapped_bytes": memory.mapped, "read_bytes": read}
    start = time.perf_counter()
    loss = step(model)
    dist.barrier()
    mine["first_step_seconds"] = time.perf_counter() - start
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    # The same bits everywhere: the loss tells of all weights and buffers, and the learning rate is 0.
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    check = [loss, float(weight.full_tensor().double().square().sum())]
    if rank == 0:
        worst = {key: max(one[key] for one in everyone) for key in mine}
        print("SAMPLE " + json.dumps({**worst, "check": check}), flush=True)
    dist.destroy_process_group()


def step(model: torch.nn.Module) -> float:
    """One training step that changes no value. Returns its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.arange(128).view(1, -1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def drop_from_cache(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_samples(folder: Path, repeats: int, cold: bool, ways: list[str]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {way: [] for way in ways}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for repeat in range(repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):
            if cold:
                drop_from_cache(folder)
            with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as logs:
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"--log-dir={logs}"]
                command = [sys.executable, *torchrun, __file__, "--sample", way, "--folder", str(folder)]
                done = subprocess.run(command, env=env, timeout=600, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("SAMPLE ")]
            if done.returncode or not lines:
                raise RuntimeError(f"{way} failed:\n{done.stderr[-3000:]}")
            found[way].append(json.loads(lines[0].removeprefix("SAMPLE ")))
    checks = {way: [one.pop("check") for one in samples] for way, samples in found.items()}
    if any(check != checks[ways[0]][0] for samples in checks.values() for check in samples):
        raise RuntimeError(f"the ways loaded different values (loss, squares of a weight): {checks}")
    return found


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians of each way, and how many times as long as the first (fsdp2x) it takes."""
    ways, file_bytes = results["ways"], results["file_bytes"]
    has_step = all("first_step_seconds" in one for one in ways.values())  # older results do not
    rows = [["way", "files, MB", "cache", "ms", "times fsdp2x"]]
    rows[0] += ["with first step, ms", "times fsdp2x"] if has_step else []
    rows[0] += ["peak private, MB", *(["peak mapped, MB"] if has_step else []), "read, % of the files"]
    first = next(iter(ways.values()))
    for way, result in ways.items():
        row = [way, f"{file_bytes / 1e6:.0f}", results["cache"]]
        for parts in (["seconds"], ["seconds", "first_step_seconds"]) if has_step else (["seconds"],):
            mine, base = (sum(one[part] for part in parts) for one in (result, first))
            row += [f"{1e3 * mine:.0f}", f"{mine / base:.2f}x"]
        row += [f"{result[key] / 1e6:.0f}" for key in ("peak_bytes", "mapped_bytes") if key in result]
        rows.append([*row, f"{100 * result['read_bytes'] / file_bytes:.0f}"])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--sample", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample is not None:
        sample(args.sample, args.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-model-") as made:
        folder = Path(made)
        write_model(folder, args.hidden, args.layers)
        file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        found = run_samples(folder, args.repeats, args.cold, args.ways)
    results = {"file_bytes": file_bytes, "cache": "cold" if args.cold else "warm", "ways": {}}
    for way, samples in found.items():
        results["ways"][way] = {key: statistics.median(one[key] for one in samples) for key in samples[0]}
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "load", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
