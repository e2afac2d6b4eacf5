"""Reinforcement learning on two cores: writes the rows of the toy and runs `fsdp2x train`, `export` and `grpo`.

    python examples/grpo_toy/grpo_toy.py                        two trainer ranks and an engine process, in turns
    python examples/grpo_toy/grpo_toy.py rollout.ahead=1        the engine is one step ahead of the trainers
    python examples/grpo_toy/grpo_toy.py rollout.engine=colocated     each rank samples while its trainer sleeps

Settings are those of `grpo.yaml`. Ends with an error unless the mean reward of ten steps rises by 0.2.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path("out/grpo")
DIGITS = 6


def write_rows(folder: Path, seed: int = 0) -> None:
    """Prompts with answers, held-out prompts, and rows to train on before, all of six random digits."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, key, count in (("prompts", "answer", 2048), ("held_out", "answer", 256), ("sorted", "completion", 8192)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                digits = draw.choices("0123456789", k=DIGITS)
                file.write(json.dumps({"prompt": f"{''.join(digits)}=", key: "".join(sorted(digits))}) + "\n")


def run(*words: str, ranks: int = 1) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else ["-m"]
    done = subprocess.run([sys.executable, *start, *words], env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        sys.exit(f"grpo_toy: FAILED: {words[0]} ended with status {done.returncode}")


def main(overrides: Sequence[str]) -> None:
    write_rows(OUT)
    run("fsdp2x.train", str(HERE / "warmup.yaml"), "logging.overwrite=true", ranks=2)
    run("fsdp2x", "export", str(OUT / "warmup"), str(OUT / "policy"), "--force")
    run("fsdp2x.grpo", str(HERE / "grpo.yaml"), "logging.overwrite=true", *overrides, ranks=2)
    lines = [json.loads(line) for line in (OUT / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["event"] == "train"]
    first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
    right = [f"{line['reward']:.2f} after step {line['step']}" for line in lines if line["event"] == "eval"]
    print(f"reward {first:.2f} to {last:.2f}; held-out prompts sorted: {', '.join(right)}")
    if len(rewards) >= 80 and last < first + 0.2:
        sys.exit("grpo_toy: FAILED: the mean reward of ten steps did not rise by 0.2")


if __name__ == "__main__":
    main(sys.argv[1:])
