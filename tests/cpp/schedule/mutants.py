"""Plants faults in the schedule, one at a time: `python mutants.py` builds each and prints which programs find it.

Each fault changes one place of ``csrc/core/schedule``. A fault that no program finds ends with status 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCHEDULE = ROOT / "csrc/core/schedule"
SOURCES = ("schedule", "gathers", "reductions", "forward_order", "states")

# (what is wrong, file, text, instead)
FAULTS = (
    ("a gather that raises while it begins is not canceled", "gathers.cpp",
     "group->gather_state_ = GatherState::begun;\n      effects_.begin_gather(*group, shards_stand_still);",
     "effects_.begin_gather(*group, shards_stand_still);\n      group->gather_state_ = GatherState::begun;"),
    ("a gather that is finished counts as one that runs", "gathers.cpp",
     "group->gather_state_ = GatherState::filled;", ""),
    ("a gather is not released", "gathers.cpp", "if (state == GatherState::none) continue;", "continue;"),
    ("a gather that was prefetched in vain stays", "schedule.cpp",
     "if (unit->param_state_ == ParamState::gathering) gathers_.cancel(*unit);\n  }\n  effects_.end_forward();",
     "}\n  effects_.end_forward();"),
    ("a forward that raised leaves its units gathered", "schedule.cpp",
     "if (unit->num_running_ > 0) continue;\n    reshard(*unit);", "if (unit->num_running_ > 0) continue;"),
    ("a unit's forward never ends", "schedule.cpp",
     "unit.num_running_ > 0) --unit.num_running_;", "unit.num_running_ > 9) --unit.num_running_;"),
    ("units are not resharded at the end of a backward", "schedule.cpp",
     "reductions_.pack_pending(unit);\n    if (unit.options_.reshard_after_backward) reshard(unit);",
     "reductions_.pack_pending(unit);"),
    ("a rank without a gradient does not take part", "reductions.cpp",
     "return !effects_.has_outstanding_calls(unit) && effects_.is_collective(group);", "return false;"),
    ("a unit that was reduced once is not awaited again", "reductions.cpp",
     "for (ScheduledGroup* const group : unit->groups_) group->is_reduced_ = false;", ""),
    ("a lost sum is not reported", "reductions.cpp",
     "if ((was_packed || num_downloads > 0) && group->contributions_.holds_earlier) mark_lost(*group);", ""),
    ("a lost all-reduce is not reported", "reductions.cpp",
     "if (sum.backward != backward_number() || sum.holds_earlier) mark_lost(group);", ""),
    ("a sum keeps gradients of a backward that raised", "reductions.cpp",
     "if (group->contributions_.backward == backward_number()) {", "if (false) {"),
    ("autograd keeps gradients of a backward that raised", "reductions.cpp",
     "group->is_reduced_ = false;\n    effects_.drop_unpacked(*group);\n  }\n}\n\nvoid Reductions::drop_all",
     "group->is_reduced_ = false;\n  }\n}\n\nvoid Reductions::drop_all"),
    ("rows that a hook has left are kept", "reductions.cpp",
     "effects_.drop_reduced(group);\n    if (holds_earlier) mark_lost(group);", "if (holds_earlier) mark_lost(group);"),
    ("downloads of a backward that raised arrive", "reductions.cpp",
     "if (num_downloads > 0) effects_.drop_download(*group);", ""),
    ("the end of a backward forgets the last reductions", "reductions.cpp",
     "finish(reduction.unit, *reduction.group, /*flush=*/true);\n    if", "if"),
    ("rows arrive only with the next backward", "reductions.cpp",
     "while (!downloads_.empty()) finish_download(downloads_.begin());", ""),
    ("a backward that raised is not abandoned", "schedule.cpp",
     "if (backward_has_raised()) abandon_backward();\n}", "}"),
    ("a unit stays in backward", "schedule.cpp",
     "if (unit->param_state_ == ParamState::gathering) gathers_.cancel(*unit);\n    unit->set_phase(Phase::idle);",
     "if (unit->param_state_ == ParamState::gathering) gathers_.cancel(*unit);"),
)  # fmt: skip


def found(folder: Path, fault: tuple[str, str, str, str] | None) -> str:
    """Returns the violation that the programs report. Empty: none."""
    copy = folder / "core/schedule"
    copy.mkdir(parents=True, exist_ok=True)
    for source in SCHEDULE.glob("*.?pp"):
        text = source.read_text()
        if fault is not None and source.name == fault[1]:
            assert text.count(fault[2]) == 1, f"{fault[0]}: its place stands {text.count(fault[2])} times in {fault[1]}"
            text = text.replace(fault[2], fault[3])
        (copy / source.name).write_text(text)
    program = folder / "program"
    sources = [str(copy / f"{name}.cpp") for name in SOURCES]
    includes = [f"-I{folder}", f"-I{ROOT / 'csrc'}", f"-I{HERE.parent}"]
    subprocess.run(
        ["g++", "-std=c++20", "-O1", *includes, str(HERE / "find.cpp"), *sources, "-o", str(program)], check=True
    )
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    return run.stdout.strip() if run.returncode == 0 else f"ends with status {run.returncode}"


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        assert not (text := found(Path(folder), None)), text
        for fault in FAULTS:
            text = found(Path(folder), fault)
            missed += not text
            print(f"{fault[0]}: {text or 'NOT FOUND'}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
