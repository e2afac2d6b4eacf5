"""Measures a training step as rank 0 of 8 with simulated collectives on one GPU: fsdp2x against FSDP2.

    python benchmarks/gpu/bench_world.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_world.py --quick
    python benchmarks/gpu/bench_world.py --device cpu --json FILE    # a dry run: a timeline by arithmetic

The process group is torch's fake one. In the place of each gather and reduction, a kernel of some blocks moves the
bytes of this rank and lasts as long as links of ``--links`` GB/s need. It runs on the stream that a process group would
use, so it overlaps with compute and takes memory bandwidth and multiprocessors from it. Collectives of one communicator
run one after another, as NCCL's do. All ranks are alike, so weights and losses have no meaning, but the first losses of
both sides must agree.

The dry run records the order in which both sides enqueue work on streams, and their events. A model of 1/64 of the
width runs. Compute lasts as long as the full model's operations need on an H200, and copies and collectives as long as
its bytes need. The host is assumed to be fast. "exposed" is communication during which nothing else runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_host  # noqa: E402
import harness  # noqa: E402
from gpu import bench_memory, bench_step, device_work, gpu_device, gpu_results, hf_shapes  # noqa: E402

SIDES = ("stock", "fsdp2x")
CASES = ("llama-8b:2048", "llama-8b:4096", "llama-8b:8192", "qwen3-0.6b:512")
QUICK = ("llama-8b:2048", "llama-8b:8192")
DRY_RUN = ("llama-8b:2048", "llama-8b:8192")
QUICK_LAYERS, DRY_RUN_LAYERS = 8, 4
WORLD, POLICY = 8, "bf16"
# Of one H200, for the dry run: products in bf16 with 2048 rows, and memory bandwidth.
FLOPS, MEMORY_GB_PER_S = 650e12, 4300
SHRINK = 64  # of each width in the dry run
FULL_BYTES = 140 << 30
PROGRAM = ROOT / "build" / "gpu" / "tests" / "cpp" / "libsimulated_collective.so"
PHASES = ("step", "host", "communication", "exposed")


# ---- on a GPU


class Links:
    """Collectives as kernels on the current stream, each after the one before it."""

    def __init__(self, gb_per_s: float, blocks: int) -> None:
        if not PROGRAM.is_file():
            raise SystemExit(f"{PROGRAM} is not built: run `make gpu-kernels` where nvcc is")
        self._launch = ctypes.CDLL(str(PROGRAM)).simulate_collective
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._launch.argtypes = [
            pointer,
            pointer,
            size,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
            pointer,
        ]
        self._gb_per_s, self._blocks = gb_per_s, blocks
        self._last: torch.cuda.Event | None = None

    def gather(self, output: torch.Tensor, input: torch.Tensor, **options) -> None:
        self._run(input, output, input.nbytes, output.numel() // input.numel(), reduces=False)

    def reduce(self, output: torch.Tensor, input: torch.Tensor, op=torch.distributed.ReduceOp.SUM, **options) -> None:
        world = input.numel() // output.numel()
        self._run(input, output, output.nbytes, world, reduces=True)
        if op == torch.distributed.ReduceOp.SUM:
            output.mul_(world)

    def _run(self, source: torch.Tensor, output: torch.Tensor, segment: int, world: int, reduces: bool) -> None:
        if segment % 16 or source.data_ptr() % 16 or output.data_ptr() % 16:
            raise ValueError(f"a segment of {segment} bytes is not aligned to 16 bytes: choose another shape")
        stream = torch.cuda.current_stream()
        if self._last is not None:
            stream.wait_event(self._last)
        duration = int(segment * world / self._gb_per_s)
        pointers = source.data_ptr(), output.data_ptr()
        error = self._launch(*pointers, segment, world, reduces, duration, self._blocks, stream.cuda_stream)
        if error:
            raise RuntimeError(f"the simulated collective failed with CUDA error {error}")
        self._last = stream.record_event()

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Puts them in the place of torch.distributed's, which both sides call."""
        from fsdp2x.base import torch_private
        from fsdp2x.base.native import _C
        from fsdp2x.sharding import transport

        def gather_group(group, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            for output, source in zip(outputs, sources, strict=True):
                self.gather(output, source)

        with (
            mock.patch.object(transport, "pack_below_bytes", lambda gathers, world: _C.PACK_BELOW_BYTES),
            mock.patch.object(torch_private, "all_gather_group", gather_group),
            bench_host.collectives(self.gather, self.reduce),
        ):
            yield


def measure(case: bench_step.Case, device: gpu_device.Device, steps: int, links: Links) -> dict:
    samples = {side: harness.Samples() for side in SIDES}
    losses: dict[str, list[torch.Tensor]] = {}
    with gpu_device.alone_in(device, case.world) as mesh, links.instead():
        for number in range(bench_step.ROUNDS):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                losses[side] = []
                rounds = -(-steps // bench_step.ROUNDS)
                work = bench_step.run_side(side, case, device, mesh, rounds, samples[side], losses[side])
                add_communication(samples[side], work)
    bench_memory.check_first_losses(case, {side: found[0].item() for side, found in losses.items()})
    device.clear()
    return {"case": asdict(case), **{side: sample.summary() for side, sample in samples.items()}}


def add_communication(samples: harness.Samples, work: list[device_work.Work]) -> None:
    """Adds how long collectives ran, and for how much of that nothing else did."""
    collectives = [one for one in work if one.kind in COLLECTIVES or "simulate(" in one.name]
    known = set(collectives)
    busy = device_work.busy_us(collectives)
    hidden = device_work.shared_us(collectives, [one for one in work if one not in known])
    samples.add("communication", busy / 1e6)
    samples.add("exposed", (busy - hidden) / 1e6)


# ---- without one: the order of a step, and a timeline of it

# What a side enqueues: (operation, lane, subject, seconds). "record" and "wait" have an event as subject.
Entry = tuple[str, str, str, float]
COLLECTIVES = ("all_gather", "reduce_scatter")
LANES = ("compute", "copy_in", "gather", "reduce", "all_reduce", "copy_out")


@dataclass(frozen=True)
class Costs:
    """Seconds of the full model's work, from the bytes of the small one."""

    shape: hf_shapes.Shape  # the full one
    tokens: int
    gb_per_s: float

    def collective(self, num_bytes: int) -> float:
        return num_bytes * SHRINK**2 / self.gb_per_s / 1e9

    def copy(self, num_bytes: int) -> float:
        return num_bytes * SHRINK**2 / MEMORY_GB_PER_S / 1e9

    def forward(self, name: str) -> float:
        """Of a layer, or of the head."""
        numel = self.shape.vocab * self.shape.hidden if name == "head" else self.shape.block_numel
        return 2 * numel * self.tokens / FLOPS


class Mark(torch.autograd.Function):
    """Calls ``note`` when backward reaches the module that made ``x``, behind the hooks of its output."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grad, None


def note_compute(model: nn.Module, note: Callable[[str, str], None]) -> None:
    """Calls ``note(phase, part)`` where a layer or the head begins to compute, behind the hooks of its unit."""
    modules = {f"layer {number}": layer.mlp for number, layer in enumerate(model.model.layers)}
    for name, module in {**modules, "head": model.lm_head}.items():

        def marked(x: torch.Tensor, name=name, forward=module.forward) -> torch.Tensor:
            note("forward", name)
            return Mark.apply(forward(x), functools.partial(note, "backward", name))

        module.forward = marked


class StockRecord:
    """What FSDP2 enqueues on torch's streams, which on the CPU do nothing."""

    def __init__(self, costs: Costs) -> None:
        self.entries: list[Entry] = []
        self._costs, self._events, self._lanes = costs, itertools.count(), iter(LANES)
        self._current = self._make_stream()

    def _make_stream(self, priority: int = 0):
        record, lane = self, next(self._lanes)

        class Stream:
            name = lane

            def record_event(self):
                event = Event()
                event.record(self)
                return event

            def wait_event(self, event) -> None:
                record.entries.append(("wait", self.name, event.name, 0.0))

            def wait_stream(self, other) -> None:
                self.wait_event(other.record_event())

        class Event:
            name = ""

            def record(self, stream=None) -> None:
                self.name = str(next(record._events))
                record.entries.append(("record", (stream or record._current).name, self.name, 0.0))

        self._event = Event
        return Stream()

    @contextlib.contextmanager
    def _within(self, stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def note(self, operation: str, part: str) -> None:
        seconds = self._costs.forward(part) * (2 if operation == "backward" else 1)
        self.entries.append((operation, self._current.name, part, seconds))

    def _gather(self, output, input, **options) -> None:
        bench_host.gather_alike(output, input)
        self.entries.append(("all_gather", self._current.name, "", self._costs.collective(output.nbytes)))

    def _reduce(self, output, input, **options) -> None:
        bench_host.reduce_alike(output, input, **options)
        self.entries.append(("reduce_scatter", self._current.name, "", self._costs.collective(input.nbytes)))

    def clear(self) -> None:
        self.entries.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        record = self

        class Copies(TorchDispatchMode):
            """Copies by FSDP2's operations, and casts on its streams."""

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                name = func.name()
                casts = record._current.name != "compute" and name.startswith(("aten::_to_copy", "aten::_foreach_copy"))
                if casts or name.startswith(("fsdp::all_gather_copy_in", "fsdp::split_with", "fsdp::chunk_cat")):
                    given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
                    read = sum(one.nbytes for one in given)
                    out = (kwargs or {}).get("out")
                    seconds = record._costs.copy(read + (out.nbytes if isinstance(out, torch.Tensor) else read))
                    record.entries.append(("copy", record._current.name, name, seconds))
                return result

        fakes = {"Stream": self._make_stream, "Event": lambda: self._event(), "stream": self._within}
        with (
            mock.patch.multiple(torch.cpu, current_stream=lambda device=None: self._current, **fakes),
            bench_host.collectives(self._gather, self._reduce),
            Copies(),
        ):
            yield


class OwnRecord:
    """What fsdp2x enqueues, from the recorder of its tests."""

    def __init__(self, costs: Costs) -> None:
        sys.path.append(str(ROOT / "tests" / "support"))
        import streams
        from fsdp2x.base import torch_private
        from fsdp2x.base.native import _C

        self._costs = costs
        self._recorder = streams.install(pack_below_bytes=_C.PACK_BELOW_BYTES // SHRINK**2)
        gather_each = lambda _, outputs, sources: [*map(bench_host.gather_alike, outputs, sources)]  # noqa: E731
        mock.patch.object(torch_private, "all_gather_group", gather_each).start()

    def note(self, operation: str, part: str) -> None:
        self._recorder.note_work(f"{operation}:{part}", [], [])

    def clear(self) -> None:
        self._recorder.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with bench_host.collectives(bench_host.gather_alike, bench_host.reduce_alike):
            yield

    @property
    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for operation, lane, subject, reads, writes in self._recorder.entries:
            read, written = (sum(num_bytes for _, num_bytes in ranges) for ranges in (reads, writes))
            phase, _, part = operation.partition(":")
            if operation in ("record", "wait"):
                found.append((operation, lane, subject, 0.0))
            elif part:
                seconds = self._costs.forward(part) * (2 if phase == "backward" else 1)
                found.append((phase, lane, part, seconds))
            elif operation.startswith(COLLECTIVES):
                kind = operation.partition(" ")[0]
                found.append((kind, lane, subject, self._costs.collective(max(read, written))))
            elif operation in ("copy", "pack", "write_rows", "divide", "assign", "zero", "add"):
                found.append((operation, lane, subject, self._costs.copy(read + written)))
        return found


def timeline(entries: list[Entry]) -> list[device_work.Work]:
    """When each operation would run on a device with a fast host. Collectives of one communicator take turns."""
    clocks, events, links, found = dict.fromkeys((*LANES, "host"), 0.0), {}, 0.0, []
    for operation, lane, subject, seconds in entries:
        if operation == "record":
            events[subject] = clocks[lane]
        elif operation == "wait":
            clocks[lane] = max(clocks[lane], events.get(subject, 0.0))
        else:
            start = max(clocks[lane], links) if operation in COLLECTIVES else clocks[lane]
            clocks[lane] = end = start + seconds
            links = end if operation in COLLECTIVES else links
            found.append(device_work.Work(operation, subject, LANES.index(lane), 1e6 * start, 1e6 * end))
    return found


def rehearse(case: bench_step.Case, device: gpu_device.Device, gb_per_s: float) -> dict:
    """A timeline of forward and backward for each side, and its sums."""
    costs = Costs(case.shape, case.tokens, gb_per_s)
    wide = case.shape
    widths = {name: getattr(wide, name) // SHRINK for name in ("hidden", "intermediate", "head_dim", "vocab")}
    small, result = replace(wide, **widths), {"case": asdict(case)}
    first = {}
    for side in SIDES:
        record = (StockRecord if side == "stock" else OwnRecord)(costs)
        with gpu_device.alone_in(device, case.world) as mesh:
            with record.recording():
                model = bench_step.SIDES[side](hf_shapes.build(small, device.type), mesh, case.policy)
                note_compute(model, record.note)
                for number in range(3):
                    if number == 2:
                        record.clear()
                    model.zero_grad()
                    loss = model(**hf_shapes.batch(small, 8, device.type)).loss
                    loss.backward()
                    first.setdefault(side, loss.item())
                work = timeline(record.entries)
        samples = harness.Samples()
        samples.add("step", max(one.end_us for one in work) / 1e6)
        add_communication(samples, work)
        result[side] = {**samples.summary(), "timeline": [[*one.__dict__.values()] for one in work]}
    bench_memory.check_first_losses(case, first)
    return result


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians of a step, and of its communication."""
    rows = [["shape", "layers", "tokens", "ranks", "what", "stock FSDP2, ms", "fsdp2x, ms", "ratio"]]
    for result in results:
        case = result["case"]
        head = [case["name"].partition(":")[0], str(case["shape"]["layers"]), str(case["tokens"]), str(case["world"])]
        for phase in PHASES:
            if phase in result["stock"]:
                stock, ours = (result[side][phase]["median_ms"] for side in SIDES)
                ratio = f"{stock / ours:.2f}x" if ours > 0 else ""
                rows.append([*head, phase, f"{stock:.2f}", f"{ours:.2f}", ratio])
    return rows


def targets_of(results: list[dict]) -> list[gpu_results.Target]:
    """Whole steps."""
    targets = []
    for result in results:
        case = result["case"]
        stock, ours = (result[side]["step"]["median_ms"] for side in SIDES)
        what = f"{case['name']}, {case['shape']['layers']} layers, {case['world']} ranks simulated: step"
        targets.append(gpu_results.times(what, stock, ours, 1.0))
    return targets


def show(side: str, result: dict) -> None:
    """Prints when each layer's work begins and ends."""
    print(f"{side}: start and end in ms, by stream")
    for kind, part, lane, start, end in result["timeline"]:
        print(f"  {start / 1e3:8.2f} {end / 1e3:8.2f}  {LANES[lane]:<8} {kind} {part}")


def main() -> int:
    parser = gpu_results.parser(__doc__)
    parser.add_argument("--cases", nargs="+", help=f"shape:tokens; default {' '.join(CASES)}")
    parser.add_argument("--links", type=float, default=370, help="GB/s of a collective's full bytes; default NVLink's")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of a collective's kernel")
    parser.add_argument("--steps", type=int, default=9, help=f"in {bench_step.ROUNDS} rounds")
    arguments = parser.parse_args()
    device = gpu_device.open_device(arguments.device)
    if device is None:
        return 0
    links = None if device.is_dry_run else Links(arguments.links, arguments.blocks)
    results = []
    for name in arguments.cases or (DRY_RUN if device.is_dry_run else QUICK if arguments.quick else CASES):
        case = bench_step.case_of(name, POLICY, WORLD, FULL_BYTES if device.is_dry_run else device.free_bytes())
        most = DRY_RUN_LAYERS if device.is_dry_run else QUICK_LAYERS if arguments.quick else case.shape.layers
        case = replace(case, shape=case.shape.with_layers(min(most, case.shape.layers)))
        if links is None:
            results.append(rehearse(case, device, arguments.links))
            for side in SIDES:
                show(side, results[-1][side])
        else:
            try:
                results.append(measure(case, device, arguments.steps, links))
            except bench_step.NoRow as error:
                print(f"no row: {error}", flush=True)
                continue
        gpu_results.publish(arguments, device, "world", results, rows_of(results[-1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
