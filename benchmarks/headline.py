"""Writes the numbers that pages quote, from recorded results, between marks of these pages.

    python benchmarks/headline.py          # writes them
    python benchmarks/headline.py check    # names the pages that have other numbers, and exits with 1 if there are any

A ratio says how many times as long as fsdp2x a rival takes, or how many times as much memory. Above 1, fsdp2x is
better.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import history
from step_cases import CASES

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PAGES = {
    "README.md": ("fine-tuning", "gpu", "steps"),
    "docs/index.md": ("fine-tuning", "gpu"),
    "docs/faq.md": ("gpu",),
    "benchmarks/README.md": ("steps", "steps of 4 ranks", "fine-tuning table", "memory", "jobs", "gpu table"),
}
LINE = 120  # characters


def result(name: str) -> Mapping:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def median_ms(side: Mapping, phase: str = "step") -> float:
    return side[phase]["median_ms"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def times(values: Iterable[float], digits: int = 1) -> str:
    """Returns one ratio, or the least and the most."""
    found = sorted(values)
    low, high = f"{found[0]:.{digits}f}", f"{found[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def tuned() -> list[dict[str, float]]:
    """Returns the ratios of each recorded SmolLM2 benchmark at 2 ranks."""
    found = []
    for name in ("sft_cpu", "sft_cpu_2ranks"):
        sides = next(one for one in result(name) if one["world"] == 2)

        def over(what: str, more: str, less: str, sides: Mapping = sides) -> float:
            pairs = zip(sides[more][what], sides[less][what], strict=True)
            return statistics.median(value / other for value, other in pairs)

        found.append(
            {
                "FSDP2": over("steps_per_s", "fsdp2x", "stock"),
                "DDP": over("steps_per_s", "fsdp2x", "ddp"),
                "FSDP2, both over gloo": over("steps_per_s", "fsdp2x_gloo", "stock"),
                "DDP, both over gloo": over("steps_per_s", "fsdp2x_gloo", "ddp"),
                "peak memory of FSDP2": over("peak_mib", "stock", "fsdp2x"),
                "peak memory of DDP": over("peak_mib", "ddp", "fsdp2x"),
            }
        )
    return found


def fine_tuning() -> str:
    rows = tuned()

    def over(name: str) -> str:
        return times(row[name] for row in rows)

    return (
        f"Fine-tuning SmolLM2-135M on 2 CPU ranks, **FSDP2 takes {over('FSDP2')} times as long**, and "
        f"{over('FSDP2, both over gloo')} times if both use gloo. DDP takes {over('DDP')} times as long, and "
        f"{over('DDP, both over gloo')} times over gloo. FSDP2 needs {over('peak memory of FSDP2')} times as much "
        "memory. The ranges are of two machines."
    )


def fine_tuning_table() -> str:
    rows = tuned()
    machines = ("commit 592167ac", "with AVX-512, commit bd5e52d5")
    cells = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in zip(machines, rows, strict=True)]
    return table(["machine", *rows[0]], cells)


def of_gpu() -> Mapping:
    return result("nvidia-h200-2026-11-27")


def gpu() -> str:
    ratios = [
        median_ms(one["stock"]) / median_ms(one["fsdp2x"])
        for one in of_gpu()["step"]
        if one["case"]["policy"] == "bf16"
    ]
    return (
        f"On one H200, FSDP2 takes {times(ratios)} times as long for a bf16 step. That is at world size 1, where "
        "nothing is communicated. **No run on several GPUs exists yet.**"
    )


def gpu_table() -> str:
    def row(one: Mapping) -> list[str]:
        case, stock, ours = one["case"], one["stock"], one["fsdp2x"]
        step, host = (median_ms(stock, phase) / median_ms(ours, phase) for phase in ("step", "host"))
        name, tokens = case["name"].split(":")
        return [f"{name}, {tokens} tokens, {case['policy']}", f"{median_ms(ours):.0f}", f"{step:.2f}", f"{host:.2f}"]

    def memory(one: Mapping) -> list[str]:
        case, stock, ours = one["case"], one["stock"], one["fsdp2x"]
        peak, resting = (stock[what] / ours[what] for what in ("step", "resting"))
        return [f"rank 0 of {case['world']}, {case['policy']}", f"{peak:.2f}", f"{resting:.2f}"]

    steps = table(("shape", "fsdp2x, ms", "FSDP2's step", "FSDP2's CPU time"), map(row, of_gpu()["step"]))
    parts = table(
        ("llama-1b, 512 tokens", "FSDP2's peak", "FSDP2's memory between steps"), map(memory, of_gpu()["memory"])
    )
    return f"{steps}\n\n{parts}"


def memory() -> str:
    def row(one: Mapping, what: str, title: str) -> list[str]:
        ours = one["fsdp2x"][what]
        ratios = [f"{one[side][what] / ours:.2f}" for side in ("stock", "ddp", "zero3")]
        return [f"{CASES[one['case']].title}, {title}", f"{ours / 2**20:,.0f}", *ratios]

    rows = [
        row(one, what, title)
        for one in result("memory_cpu_2ranks")
        for what, title in (("resting", "between steps"), ("peak", "peak"))
    ]
    return table(("2 ranks", "fsdp2x, MiB", "FSDP2", "DDP, unsharded", "DeepSpeed ZeRO-3"), rows)


def steps() -> str:
    return history.steps_table(history.read(history.HISTORY))


def steps_of_4_ranks() -> str:
    sides = {"stock": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP, unsharded"}

    def row(case: str, found: Mapping) -> list[str]:
        own, gloo = median_ms(found["fsdp2x"]), median_ms(found["fsdp2x_gloo"])
        over_gloo = [f"{median_ms(found[side]) / gloo:.1f}" for side in ("stock", "ddp")]
        return [CASES[case].title, *(f"{median_ms(found[side]) / own:.1f}" for side in sides), *over_gloo]

    head = ("4 ranks on 2 cores", *sides.values(), "FSDP2, both over gloo", "DDP, both over gloo")
    return table(head, [row(*one) for one in result("step_cpu_4ranks_gloo").items()])


def jobs() -> str:
    """Other jobs than a step: what was measured, the rival, and how many times as long it takes."""
    adamw, muon = result("optimizer_cpu_2ranks"), result("muon_cpu_2ranks")
    exported, pushed, packed = result("export_cpu_2ranks"), result("sync_cpu_2ranks"), result("sequence_cpu_2ranks")
    saved, scored = result("checkpoint_cpu_2ranks"), result("score_cpu")["fp32"]["sides"]
    experts = result("moe_cpu_2ranks")

    def over(sides: Mapping, rival: str, ours: str, phase: str = "step") -> float:
        return median_ms(sides[rival], phase) / median_ms(sides[ours], phase)

    def loaded(rival: str) -> list[float]:
        found = [result(f"load_{cache}_cpu_2ranks")["ways"] for cache in ("warm", "cold")]
        return [ways[rival]["seconds"] / ways["fsdp2x"]["seconds"] for ways in found]

    now, later = (next(sides for name, sides in saved.items() if name.startswith(how)) for how in ("at", "in"))
    rows: list[tuple[str, str, Iterable[float]]] = [
        ("clip and AdamW", "torch on FSDP2's shards", [over(one, "stock", "fsdp2x") for one in adamw.values()]),
        ("Muon", "torch's Muon", [over(one["sides"], "torch", "fsdp2x") for one in muon.values()]),
        ("load HuggingFace files", "accelerate", loaded("accelerate")),
        ("load HuggingFace files", "rank 0 and broadcasts", loaded("rank 0 broadcast")),
        ("save model and AdamW", "DCP", [over(now, "stock", "fsdp2x", "save")]),
        ("save in the background: stall", "DCP", [over(later, "stock", "fsdp2x", "stall")]),
        ("full tensors", "`full_tensor()`", [over(exported, "full_tensor", way) for way in ("shm", "process_group")]),
        ("push weights to an engine", "one bucket at a time by gloo", [over(pushed, "one bucket", "push")]),
        ("packed rows", "padded rows, sorted by length", [over(packed["packing"], "sorted", "packed")]),
        (
            "experts",
            "transformers' loop over experts",
            [over(one, "eager", "grouped_mm") for one in experts.values() if "eager" in one],
        ),
        ("log-probabilities", "from logits, with 47 times the memory", [over(scored, "logits", "score")]),
    ]
    return table(("job", "rival", "times as long"), [(job, rival, times(found)) for job, rival, found in rows])


TEXTS: dict[str, Callable[[], str]] = {
    "fine-tuning": fine_tuning,
    "fine-tuning table": fine_tuning_table,
    "gpu": gpu,
    "gpu table": gpu_table,
    "jobs": jobs,
    "memory": memory,
    "steps": steps,
    "steps of 4 ranks": steps_of_4_ranks,
}


def filled(text: str, names: Iterable[str]) -> str:
    """Returns a page's text with its numbers.

    Raises:
        ValueError: the page has no marks for one of them, or has them twice.
    """
    for name in names:
        begin, end = f"<!-- numbers, {name}: begin -->", f"<!-- numbers, {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one line {begin} and one line {end}")
        number = TEXTS[name]()
        if not number.startswith("|"):
            number = textwrap.fill(number, LINE, break_long_words=False, break_on_hyphens=False)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{number}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"), nargs="?", default="write")
    action = parser.parse_args().action
    status = 0
    for page, names in PAGES.items():
        path = ROOT / page
        before = path.read_text()
        now = filled(before, names)
        if action == "write":
            path.write_text(now)
        elif now != before:
            print(f"{page}: numbers differ from the recorded results; run python benchmarks/headline.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
