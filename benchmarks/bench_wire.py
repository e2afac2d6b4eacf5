"""Measures wire formats over gloo: step time and bytes that a rank sends, against shared memory and FSDP2.

    python benchmarks/bench_wire.py [--quick] [--world 2] [--case comm] [--links 1000 10000] [--steps 7] [--json FILE]

Starts its own ranks on one host, where gloo moves bytes at the speed of memory. No network does. So each side is timed
once more for each link of ``--links``, in Mbit/s. Every collective then also waits as long as the bytes that its rank
sends would take on this link. This is an upper bound, because nothing overlaps with this wait. The case, model, and
optimizer (fsdp2x's AdamW) are those of ``bench_step.py``. fp32, one thread a rank. Losses are shown but need not agree.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import harness
import peers
from bench_step import build_model, make_step
from step_cases import CASES, Case

QUICK = Case(hidden=64, layers=2, tokens=8, intermediate=176)
# Name -> transport and formats; None: stock FSDP2.
SIDES = {
    "stock FSDP2": None,
    "shared memory": ("shm", {}),
    "gloo": ("process_group", {}),
    "gloo, weights int8": ("process_group", {"weights": "int8"}),
    "gloo, weights fp8": ("process_group", {"weights": "fp8"}),
    "gloo, int8 and bfloat16": ("process_group", {"weights": "int8", "gradients": "bfloat16"}),
    "gloo, int8 and int8": ("process_group", {"weights": "int8", "gradients": "int8"}),
}
COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    "all_to_all_single",
)


class _Later(dist.Work):
    """A work that has ended when its collective and its link have."""

    def __init__(self, work, ends: float) -> None:
        super().__init__()
        self._work, self._ends = work, ends

    def wait(self, *timeout) -> bool:
        self._work.wait(*timeout)
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        return True


class Link:
    """Collectives that count what this rank sends, and take as long as a link of ``mbits`` a second; 0: any."""

    def __init__(self) -> None:
        self.mbits, self.sent_bytes = 0, 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        found = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
        for name, function in found.items():
            setattr(dist, name, self._over(name, function))
        try:
            yield
        finally:
            for name, function in found.items():
                setattr(dist, name, function)

    def _over(self, name: str, function):
        def call(*args, **kwargs):
            source = args[1] if len(args) > 1 else kwargs.get("input_tensor", kwargs.get("input"))
            world = dist.get_world_size()
            num_bytes = (source.nbytes if "gather" in name else source.nbytes // world) * (world - 1)
            self.sent_bytes += num_bytes
            begins = time.perf_counter()
            work = function(*args, **kwargs)
            if not self.mbits:
                return work
            ends = begins + num_bytes * 8 / (self.mbits * 1e6)
            if work is not None:
                return _Later(work, ends)
            time.sleep(max(0.0, ends - time.perf_counter()))
            return None

        return call


def run(case: Case, steps: int, links: list[int]) -> list[dict]:
    import fsdp2x

    whole = build_model(case)
    models, losses = {}, {name: [] for name in SIDES}
    for name, settings in SIDES.items():
        model = copy.deepcopy(whole)
        if settings is None:
            models[name] = peers.shard_stock(model)
            continue
        fsdp2x.fully_shard(model, transport=settings[0])
        model.set_wire_dtype(**settings[1])
        models[name] = model
    timed = {}
    for name, model in models.items():
        adamw = torch.optim.AdamW if SIDES[name] is None else fsdp2x.optim.AdamW
        timed[name] = make_step(model, adamw, case.tokens, losses[name])
    rows = []
    link = Link()
    with link.installed():
        sent = {}
        for name, step in timed.items():
            for _ in range(2):
                link.sent_bytes = 0
                harness.start_together()
                step(harness.PhaseTimer(harness.Samples(), counted=False))
            sent[name] = link.sent_bytes
        for mbits in (0, *links):
            link.mbits = mbits
            samples = harness.alternate(timed, warmup=1, count=steps)
            rows += [
                {"link_mbits": mbits, "side": name, "sent_bytes": sent[name], **samples[name].summary()}
                for name in timed
            ]
    for row in rows:
        row["loss"] = losses[row["side"]][-1].item()
    return rows


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians and ranges of a step, and how many times faster than gloo without a format."""
    rows = [["link", "side", "sent a step, MB", "step, ms", "range", "against gloo"]]
    for row in results:
        plain = next(one for one in results if one["link_mbits"] == row["link_mbits"] and one["side"] == "gloo")
        step = row["step"]
        link = f"{row['link_mbits']} Mbit/s" if row["link_mbits"] else "none: one host"
        rows.append(
            [
                link,
                row["side"],
                f"{row['sent_bytes'] / 1e6:.1f}" if row["sent_bytes"] else "",
                f"{step['median_ms']:.0f}",
                f"{step['min_ms']:.0f}-{step['max_ms']:.0f}",
                f"{plain['step']['median_ms'] / step['median_ms']:.2f}x",
            ]
        )
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a model that is too small to be measured")
    parser.add_argument("--case", choices=list(CASES), default="comm")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--links", type=int, nargs="*", default=[1000, 10000], help="Mbit/s, see above")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=args.world, timeout_s=1800)
    rank = harness.start_group()
    results = run(QUICK if args.quick else CASES[args.case], args.steps, args.links)
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "wire", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
