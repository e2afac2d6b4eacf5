"""Reinforcement learning in one command: a policy learns to sort six digits from rewards alone, on two cores.

    python examples/grpo_toy.py                two trainer ranks, one engine process, in turns
    python examples/grpo_toy.py --async        the engine is one step ahead of the trainers
    python examples/grpo_toy.py --colocate     no engine process: each rank samples while its trainer sleeps
    python examples/grpo_toy.py --engine vllm --vllm_python ENV/bin/python     a vLLM server as the engine
    python examples/grpo_toy.py --config FILE.yaml [KEY=VALUE ...]      settings in a spelling of `grpo_config.py`

A few steps on sorted examples first, so that some samples are right; then GRPO: eight samples a prompt, reward 1 for a
response that is right in every digit, DAPO's loss, a KL to the policy of the start. After each push trainers and engine
compare their log-probabilities. Ends with an error unless the reward rises by 0.2. In ``--out``: ``metrics.jsonl``, a
line per step, and ``reward.png``, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from grpo_loop import PHASES, Loop, Settings
from grpo_vllm import VllmServer

# ---- a rank


def rank_main(settings: Settings, address: str, out: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Behind the engine's deadlines, so that it is these that are told of.
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * settings.timeout_s))
    loop = Loop(settings, address)
    try:
        file = open(out / "metrics.jsonl", "w", buffering=1) if loop.rank == 0 else open(os.devnull, "w")
        with file:
            for line in loop.run():
                file.write(json.dumps(line) + "\n")
                if loop.rank == 0:
                    say(line)
    finally:
        loop.close()
    dist.destroy_process_group()


def say(line: dict) -> None:
    if line["event"] == "step" and line["step"] % 10 and line["step"] != 1:
        return
    shown = {name: value for name, value in line.items() if name not in ("event", "step", "seconds")}
    numbers = "  ".join(f"{name} {value:.3g}" for name, value in shown.items())
    print(f"{line['event']} {line.get('step', ''):>4} {numbers}", flush=True)


# ---- the launcher


def launch(settings: Settings, out: Path, world: int, limit_s: float, vllm_python: str) -> list[dict]:
    """Runs engine and trainers to their end; the lines of the metrics. Leaves no process behind."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    (out / "model").mkdir(exist_ok=True)
    (out / "model" / "config.json").write_text(json.dumps(settings.model))
    address = f"@fsdp2x-grpo-{secrets.token_hex(6)}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    words += [f"--log-dir={out / 'torchrun'}"]
    engine: subprocess.Popen | VllmServer | None = None
    trainers = None
    try:
        if settings.engine == "vllm":
            engine = VllmServer(vllm_python, out / "model", out)
            engine.await_ready()
            address = engine.url
        elif not settings.colocate:
            command = [sys.executable, "-m", "fsdp2x", "rollout", str(out / "model"), "--address", address]
            engine = subprocess.Popen([*command, "--once", "300"], env=environment)
        words += [str(Path(__file__).resolve()), "--rank-of", address, "--out", str(out)]
        words += ["--settings", json.dumps(dataclasses.asdict(settings))]
        trainers = subprocess.Popen(words, env=environment)
        watch(trainers, engine, limit_s)
    finally:
        for process in (trainers, engine):
            if process is not None:
                stop(process)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def watch(trainers: subprocess.Popen, engine: subprocess.Popen | VllmServer | None, limit_s: float) -> None:
    """Until both have ended as they should, where the engine ends by itself; ends this program otherwise."""
    deadline = time.monotonic() + limit_s
    while trainers.poll() is None and time.monotonic() < deadline:
        if engine is not None and engine.poll():
            # The trainers see it themselves, unless it never came.
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainers.wait(timeout=20)
            sys.exit(f"grpo_toy: FAILED: the engine ended with status {engine.returncode}")
        time.sleep(0.05)
    if trainers.poll() is None:
        sys.exit(f"grpo_toy: FAILED: not done in {limit_s:g} s")
    if trainers.returncode:
        sys.exit(f"grpo_toy: FAILED: the trainers ended with status {trainers.returncode}")
    if isinstance(engine, subprocess.Popen) and engine.wait(timeout=60):
        sys.exit(f"grpo_toy: FAILED: the engine ended with status {engine.returncode}")


def stop(process: subprocess.Popen | VllmServer) -> None:
    if isinstance(process, VllmServer):
        process.stop()
    elif process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summarize(lines: list[dict]) -> dict[str, float]:
    """Mean rewards of the first and the last ten steps, and the median second of a step in each phase."""
    import statistics

    steps = [line for line in lines if line["event"] == "step"]
    rewards = [line["reward"] for line in steps]
    found = {"first": statistics.fmean(rewards[:10]), "last": statistics.fmean(rewards[-10:])}
    found |= {name: statistics.median(line["seconds"][name] for line in steps) for name in PHASES}
    found["step"] = statistics.median(line["wall_s"] for line in steps)
    checked = [line["difference"] for line in lines if "difference" in line]
    return {**found, "difference": max(checked), "staleness": max(line["staleness_max"] for line in steps)}


def plot(lines: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", flush=True)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line for line in lines if line["event"] == "step"]
    x = [line["step"] for line in steps]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True, sharex=True)
    rewards = [line["reward"] for line in steps]
    smooth = [sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
    axes[0, 0].plot(x, rewards, linewidth=0.8, alpha=0.5, label="reward")
    axes[0, 0].plot(x, smooth, linewidth=1.6, label="mean of 10 steps")
    axes[0, 0].set(ylabel="share of samples that are right", ylim=(0, 1))
    axes[0, 1].plot(x, [line.get("kl", 0.0) for line in steps], label="KL to the start")
    axes[0, 1].set(ylabel="nats per token")
    axes[1, 0].plot(x, [line["staleness"] for line in steps], label="mean")
    axes[1, 0].plot(x, [line["staleness_max"] for line in steps], "--", label="largest")
    axes[1, 0].set(xlabel="step", ylabel="staleness (versions)", ylim=(-0.05, 1.2))
    axes[1, 1].stackplot(x, *([line["seconds"][name] for line in steps] for name in PHASES), labels=PHASES)
    axes[1, 1].set(xlabel="step", ylabel="seconds")
    for each in axes.flat:
        each.legend(frameon=False, fontsize=8)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments() -> tuple[Settings, argparse.Namespace]:
    """Of a file first, then those of the command line, which come before them."""
    words, flags = split_at(sys.argv[1:], "--")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with --config: keys of the file")
    parser.add_argument("--config", metavar="FILE", help="YAML in any of the spellings that examples/README.md names")
    parser.add_argument("--out", type=Path, help="default out/grpo")
    parser.add_argument("--async", dest="is_async", action="store_true", help="sample one step ahead")
    parser.add_argument("--colocate", action="store_true", help="engine and trainer take turns with the memory")
    parser.add_argument("--engine", choices=("rollout", "vllm"), help="what samples")
    parser.add_argument("--vllm_python", default=sys.executable, help="an interpreter that has vLLM; default this one")
    for field in dataclasses.fields(Settings):
        if type(field.default) in (int, float):
            say_so = f"default {field.default:g}; see Settings"
            parser.add_argument(f"--{field.name}", type=type(field.default), help=say_so)
    parser.add_argument("--processes", type=int, help="trainer ranks, default 2")
    parser.add_argument("--limit", type=float, default=1200.0, metavar="S", help="seconds for everything")
    parser.add_argument("--rank-of", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rank_of:
        return Settings(**json.loads(args.settings)), args
    if args.overrides and args.config is None:
        parser.error(f"{args.overrides[0]}: keys of a file need one: --config FILE")
    found = read_file(parser, args.config, args.overrides, flags) if args.config or flags else {}
    names = {field.name for field in dataclasses.fields(Settings)}
    found |= {name: value for name, value in vars(args).items() if name in names and value not in (None, False)}
    args.out = Path(args.out or found.pop("out", "out/grpo"))
    args.processes = args.processes if args.processes is not None else found.pop("processes", 2)
    settings = Settings(**{name: value for name, value in found.items() if name in names})
    if settings.is_async and settings.colocate:
        parser.error("--async samples while the trainers train, --colocate while they sleep: choose one")
    if settings.steps < 1 or args.processes < 1:
        parser.error("--steps and --processes are at least 1")
    return settings, args


def split_at(words: list[str], mark: str) -> tuple[list[str], list[str]]:
    place = words.index(mark) if mark in words else len(words)
    return words[:place], words[place + 1 :]


def read_file(parser: argparse.ArgumentParser, file: str | None, overrides: list[str], flags: list[str]) -> dict:
    """The settings in a file, or in flags behind ``--``; says what of it has no effect."""
    import grpo_config

    try:
        found = (
            grpo_config.read_config(file, overrides) if file else grpo_config.translate(grpo_config.read_words(flags))
        )
    except grpo_config.ConfigError as error:
        parser.error(str(error))
    for line in found.without_effect():
        print(line, flush=True)
    return found.settings


def main() -> None:
    settings, args = parse_arguments()
    if args.rank_of:
        rank_main(settings, args.rank_of, args.out)
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    lines = launch(settings, args.out, args.processes, args.limit, args.vllm_python)
    plot(lines, args.out / "reward.png")
    found = summarize(lines)
    print("  ".join(f"{name} {value:.3g}" for name, value in found.items()), f" total {time.monotonic() - began:.1f} s")
    if settings.steps >= 80 and found["last"] < found["first"] + 0.2:
        sys.exit("grpo_toy: FAILED: the mean reward of ten steps did not rise by 0.2")


if __name__ == "__main__":
    main()
