"""The whole job in one command: train, be killed, resume bit for bit, export, reload with transformers alone, and plot.

`make demo` runs this. It trains a small Qwen3 on the bytes of the Python standard library, sharded over 2 processes or
over all GPUs. It exits with an error at the first wrong result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "demo.yaml"
PROMPT = "import os\n\n\ndef "
WANTED_RATIO = 0.75  # highest validation loss over unigram entropy
START = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the config's")
    parser.add_argument("--processes", type=int, help="ranks; by default 2 on a CPU, or one per GPU")
    parser.add_argument("--stage", choices=["finish", "reload"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage == "finish":
        finish(args.out, args.steps)
    elif args.stage == "reload":
        reload(args.out)
    else:
        # `timeout` and CI end a program with SIGTERM. As an exception it runs the blocks that stop the ranks.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        demo(args.out, args.steps, args.processes)


def settings(out: Path, steps: int | None) -> list[str]:
    """Returns the overrides that the script adds to demo.yaml."""
    import torch

    added = [f"data.files={json.dumps([sysconfig.get_paths()['stdlib']])}", f"logging.output={json.dumps(str(out))}"]
    if torch.cuda.is_available():  # attention's backward there adds in any order, and a resumed run is to be equal
        added.append("train.deterministic=true")
    if steps:
        added += [
            f"train.steps={steps}",
            f"checkpoint.save_every={steps // 2}",
            f"train.eval_every={max(steps // 4, 1)}",
        ]
    return added


def demo(out: Path, steps: int | None, processes: int | None) -> None:
    import torch

    from fsdp2x.train import load_config
    from fsdp2x.train.metrics import read_metrics

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config = load_config(CONFIG, settings(out, steps))
    steps, half = config.train.steps, config.checkpoint.save_every
    kill_at = half + max(2, steps // 60)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes = processes or num_gpus or 2

    say(f"1. text: the Python standard library in {config.data.files[0]}")
    entropy, num_bytes = unigram_entropy(config)
    say(f"   {num_bytes:,} bytes for training; byte-unigram entropy {nats_and_bits(entropy)}")

    where = f"{num_gpus} GPUs" if num_gpus else "the CPU"
    say(f"2. training on {where} with {processes} processes, {steps} steps; checkpoint after step {half}")
    first = launch(processes, ["-m", "fsdp2x.train", str(CONFIG), *settings(out, steps)], out / "first.log")
    try:
        watch(first, out, until=kill_at, after=0)
        started = next(line for line in read_metrics(out / "metrics.jsonl") if line["event"] == "start")
        for pid in started["pids"]:
            os.kill(pid, signal.SIGKILL)
        first.wait(timeout=60)
    finally:
        first.terminate()  # torchrun ends its ranks
        first.wait(timeout=60)
    latest = (out / "checkpoints" / "latest").read_text().strip()
    say(f"3. killed all {processes} processes after step {kill_at}; the latest checkpoint is {latest}")
    check(latest == f"step-{half:06d}", f"the latest checkpoint is {latest}, expected that of step {half}")

    say(f"4. resuming from {latest}")
    resume = [str(HERE / "demo.py"), "--stage", "finish", "--out", str(out), "--steps", str(steps)]
    second = launch(processes, resume, out / "second.log")
    try:
        watch(second, out, until=steps, after=half)
        second.wait(timeout=300)
    finally:
        second.terminate()  # torchrun ends its ranks
        second.wait(timeout=60)
    check(second.returncode == 0, f"the resumed run ended with status {second.returncode}; see {out / 'second.log'}")
    lines = read_metrics(out / "metrics.jsonl")
    compare_resumed(lines, half, kill_at)
    held_out = [line for line in lines if line["event"] == "eval"][-1]["loss"]
    say(f"5. held-out loss        {nats_and_bits(held_out)} per byte")
    say(f"   byte-unigram entropy {nats_and_bits(entropy)} per byte")
    if steps >= load_config(CONFIG, settings(out, None)).train.steps:
        check(
            held_out < WANTED_RATIO * entropy, f"the held-out loss is not below {WANTED_RATIO} of the unigram entropy"
        )

    say("6. exporting to HuggingFace form, and reloading with transformers alone in a fresh process")
    run([sys.executable, "-m", "fsdp2x", "export", str(out / "checkpoints"), str(out / "export")], out / "export.log")
    run([sys.executable, str(HERE / "demo.py"), "--stage", "reload", "--out", str(out)], out / "reload.log")
    result = json.loads((out / "reload.json").read_text())
    say(f"   largest difference of {result['num_logits']:,} logits: {result['max_difference']:.3g}")
    check(result["max_difference"] < 1e-4, "the exported model computes other logits than the sharded one")
    say("   a sample, after the prompt " + repr(PROMPT) + ":")
    print("\n".join("   | " + line for line in result["sample"].splitlines()), flush=True)

    plot(lines, entropy, out / "loss.png")
    say("done, every check passed. In " + str(out) + ":")
    for name, what in {
        "metrics.jsonl": "one line per step, evaluation and checkpoint",
        "loss.png": "training and held-out loss, and the unigram entropy",
        f"checkpoints/step-{steps:06d}": "the sharded checkpoint (fsdp2x train --resume_from)",
        "export": "the HuggingFace model (from_pretrained)",
    }.items():
        check((out / name).exists(), f"{out / name} is missing")
        print(f"   {out / name}  {what}", flush=True)


def finish(out: Path, steps: int | None) -> None:
    """A rank of the second run: resumes, trains to the end, keeps the sharded model's logits of one block."""
    import logging

    import torch

    from fsdp2x.train import Trainer, load_config

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer = Trainer(load_config(CONFIG, settings(out, steps), resume_from=str(out / "checkpoints")))
    try:
        trainer.run()
        trainer.model.eval()
        tokens = trainer.blocks.held_out[:1].to(torch.int64)
        with torch.no_grad():
            logits = trainer.model(input_ids=tokens.to(trainer.world.device), use_cache=False).logits
        if trainer.world.is_main:
            from safetensors.torch import save_file

            save_file(
                {"tokens": tokens.contiguous(), "logits": logits.float().cpu().contiguous()}, out / "logits.safetensors"
            )
        torch.distributed.barrier()
    finally:
        trainer.close()


def reload(out: Path) -> None:
    """The fresh process: transformers only."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out / "export", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "export", local_files_only=True)
    check("fsdp2x" not in sys.modules, "the reloading process imported fsdp2x")
    kept = load_file(out / "logits.safetensors")
    with torch.no_grad():
        logits = model(input_ids=kept["tokens"]).logits.float()
    prompt = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 50, "max_new_tokens": 240}
    text = tokenizer.decode(model.generate(**prompt, **options)[0], skip_special_tokens=True)
    result = {
        "max_difference": float((logits - kept["logits"]).abs().max()),
        "num_logits": logits.numel(),
        "sample": text,
    }
    (out / "reload.json").write_text(json.dumps(result))


def unigram_entropy(config) -> tuple[float, int]:
    """Entropy in nats of the byte distribution of the training text, and its number of bytes."""
    import torch

    from fsdp2x.train.data import read_blocks
    from fsdp2x.train.tokenizer import ByteTokenizer

    tokens = read_blocks(config.data, ByteTokenizer(), config.train.seed).train.flatten()
    counts = torch.bincount(tokens[tokens < 256], minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum()), int(counts.sum())


def launch(processes: int, command: list[str], log: Path) -> subprocess.Popen:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        f"--log-dir={log.parent / 'torchrun'}",
        *command,
    ]
    with open(log, "w") as file:
        return subprocess.Popen(torchrun, stdout=file, stderr=subprocess.STDOUT, env=environment())


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}


def run(command: list[str], log: Path) -> None:
    with open(log, "w") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(), timeout=300
        ).returncode
    check(status == 0, f"{' '.join(command)} ended with status {status}; see {log}")


def watch(process: subprocess.Popen, out: Path, *, until: int, after: int) -> None:
    """Prints what the run reports until it has done step `until`; `after` is the step it starts from."""
    from fsdp2x.train.metrics import read_metrics

    begun = time.monotonic()
    metrics, seen, restarted = out / "metrics.jsonl", 0, after == 0
    while True:
        ended = process.poll() is not None
        lines = read_metrics(metrics) if metrics.exists() else []
        for line in lines[seen:]:
            restarted = restarted or line["event"] == "resume"
            if not restarted:
                continue
            if line["event"] == "start":
                ranks = f"{line['world_size']} ranks ({line['backend']})"
                say(f"   {line['num_parameters']:,} parameters over {ranks}, {line['tokens_per_step']} tokens a step")
            elif line["event"] == "train" and (line["step"] % 25 == 0 or line["step"] == after + 1):
                say(f"   step {line['step']:4d}  loss {line['loss']:.4f}  {line['tokens_per_s']:.0f} tokens/s")
            elif line["event"] == "eval":
                say(f"   step {line['step']:4d}  held-out loss {line['loss']:.4f}")
            elif line["event"] == "save":
                say(f"   step {line['step']:4d}  saved {line['path']} in {line['seconds']:.2f} s")
            if line["event"] == "train" and line["step"] >= until:
                return
        seen = len(lines)
        check(not ended, f"the run ended early with status {process.returncode}; see the logs in {out}")
        check(time.monotonic() - begun < 1800, "the run has not come so far in 30 minutes")
        time.sleep(0.02)


def compare_resumed(lines: list[dict], half: int, kill_at: int) -> None:
    """Steps after the checkpoint were done twice, before the kill and after resuming: equal bit for bit."""
    cut = next(i for i, line in enumerate(lines) if line["event"] == "resume")
    losses = [
        {line["step"]: line["loss_hex"] for line in part if line["event"] == "train"}
        for part in (lines[:cut], lines[cut:])
    ]
    for name, part in zip(("uninterrupted", "resumed      "), losses, strict=True):
        value = part[half + 1]
        say(f"   loss of step {half + 1}, {name}: {float.fromhex(value)!r} = {value}")
    for step in range(half + 1, kill_at + 1):
        before, after = losses[0][step], losses[1][step]
        check(before == after, f"step {step}: the resumed loss {after} is not the uninterrupted one {before}")
    say(f"   steps {half + 1} to {kill_at} are equal bit for bit")


def plot(lines: list[dict], entropy: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    for event, label, style in (("train", "training", "-"), ("eval", "held out", "o-")):
        points = {line["step"]: line["loss"] for line in lines if line["event"] == event}
        axes.plot(list(points), list(points.values()), style, label=label, linewidth=1.2, markersize=4)
    axes.axhline(entropy, color="gray", linestyle="--", linewidth=1, label="byte-unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def nats_and_bits(nats: float) -> str:
    return f"{nats:.4f} nats = {nats / math.log(2):.4f} bits"


def say(message: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {message}", flush=True)


def check(condition: bool, otherwise: str) -> None:
    if not condition:
        sys.exit(f"demo: FAILED: {otherwise}")


if __name__ == "__main__":
    main()
