"""Tunes a real chat model on two cores: convert, SFT, LoRA, resume, export, GRPO, chat. `make demo-real` runs this.

    python examples/smollm2/demo.py              everything, at most 20 minutes
    python examples/smollm2/demo.py --seeds 0 1  GRPO from two random seeds, each takes about 8 minutes
    python examples/smollm2/demo.py --short      every command with few rows and steps, about 3 minutes

Each step is a command that you can run yourself; the driver prints it, follows its metrics, and checks the result. In
``--out``: ``summary.json``, ``plots.png``, logs, and the tuned models as HuggingFace folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = ROOT / "build" / "smollm2" / "base"
UNAVAILABLE = 3  # the status of convert.py when the registry does not give the packages
START = time.monotonic()


@dataclass(frozen=True)
class Size:
    """How much is trained; `resume_from` is the step after which full SFT is interrupted."""

    facts: int
    sft_steps: int
    resume_from: int
    lora_steps: int
    grpo_steps: int
    seeds: tuple[int, ...] = (0,)
    is_short: bool = False


FULL = Size(facts=24, sft_steps=48, resume_from=40, lora_steps=48, grpo_steps=20)
SHORT = Size(facts=4, sft_steps=6, resume_from=4, lora_steps=2, grpo_steps=2, is_short=True)


class Failed(SystemExit):
    def __init__(self, why: str) -> None:
        super().__init__(f"demo-real: FAILED: {why}")


def say(message: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {message}", flush=True)


def check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


class Demo:
    """The steps of one run and what they found, in `summary`."""

    def __init__(self, out: Path, size: Size) -> None:
        self.out, self.size = out, size
        self.summary: dict = {"seconds": {}, "answers": {}, "training": {}}

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        say(f"{len(self.summary['seconds']) + 1}. {title}")
        yield
        took = self.summary["seconds"][title] = round(time.monotonic() - began, 1)
        say(f"   took {took:.0f} s")

    # ---- commands

    def start(self, words: list, log: str, *, ranks: int = 0, threads: int = 1) -> subprocess.Popen:
        """Starts ``python *words``, or its ranks under torchrun; prints the command as you would type it."""
        words = [str(word) for word in words]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
        shown = (f"torchrun --nproc_per_node={ranks} " if ranks else "python ") + shlex.join(words)
        print(f"          $ {shown.replace(str(ROOT) + '/', '')}", flush=True)
        # Passive: threads that wait by spinning would take the cores from each other on a busy machine.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        with open(self.out / log, "w") as file:
            command = [sys.executable, *launcher, *words]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)

    def run(self, words: list, log: str, *, threads: int = 1) -> str:
        """Runs a command to its end and returns its output."""
        process = self.start(words, log, threads=threads)
        try:
            status = process.wait(timeout=900)
        finally:
            process.terminate()
            process.wait(timeout=60)
        text = (self.out / log).read_text()
        if status == UNAVAILABLE:
            raise SystemExit(UNAVAILABLE)
        check(status == 0, f"{Path(words[0]).name} ended with status {status}; see {self.out / log}\n{text[-1500:]}")
        return text

    def train(self, command: str, name: str, overrides: dict, *, ranks: int, until: int, interrupt: bool = False):
        """Runs ``fsdp2x COMMAND`` until it has done step `until`, and interrupts it there or awaits its end.

        Returns the lines of metrics.jsonl that it wrote.
        """
        folder = self.out / name
        metrics = folder / "metrics.jsonl"
        seen = before = len(read_lines(metrics))
        words = ["-m", "fsdp2x", command, HERE / f"{'grpo' if command == 'grpo' else 'sft'}.yaml"]
        words += [f"{key}={value}" for key, value in {**overrides, "logging.output": folder}.items()]
        words += ["--resume_from", folder / "checkpoints"] if before else []
        log = f"{name}-resumed.log" if before else f"{name}.log"
        process = self.start(words, log, ranks=ranks if ranks > 1 else 0)
        deadline, done = time.monotonic() + 1200, False
        try:
            while process.poll() is None and time.monotonic() < deadline:
                lines = read_lines(metrics)
                for line in lines[seen:]:
                    report(line, until)
                    done = done or (line["event"] == "train" and line["step"] >= until)
                seen = len(lines)
                if done and interrupt:
                    say(f"   interrupting after step {until}, as Ctrl-C does")
                    process.send_signal(signal.SIGINT)
                    process.wait(timeout=120)
                time.sleep(0.2)
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait(timeout=60)
        lines = read_lines(metrics)
        for line in lines[seen:]:
            report(line, until)
        tail = (self.out / log).read_text()[-1500:]
        check(interrupt or process.returncode == 0, f"fsdp2x {command} ended with {process.returncode}; {log}:\n{tail}")
        check(lines[-1]["step"] >= until, f"fsdp2x {command} ended before step {until}; {log}:\n{tail}")
        return lines[before:]

    def export(self, name: str, *options: str) -> Path:
        """Exports the last checkpoint and deletes it: with AdamW's moments it takes three times the model's space."""
        target = self.out / f"{name}-model"
        self.run(["-m", "fsdp2x", "export", self.out / name / "checkpoints", target, *options], f"{name}-export.log")
        shutil.rmtree(self.out / name / "checkpoints")
        return target

    def answer(self, name: str, folder: Path, *files: str, show: int = 3) -> None:
        """Exact matches of a model on held-out questions, of all files unless some are given."""
        files, result = files or ("questions.jsonl", "sort_test.jsonl"), self.out / f"answers-{name}.json"
        words = [HERE / "answers.py", folder, *(self.out / "data" / file for file in files), "--json", result]
        words += ["--limit", 4] if self.size.is_short else []
        self.run(words, f"answers-{name}.log", threads=os.cpu_count() or 1)
        found = json.loads(result.read_text())
        self.summary["answers"][name] = found["counts"]
        for kind, count in found["counts"].items():
            say(f"   {kind}: {count['exact']} of {count['questions']} exact, {count['names']} name the answer")
        for row in found["rows"][:show]:
            print(f"          | {row['question']}\n          |   {row['answer']!r}, expected {row['expected']!r}")

    # ---- steps

    def run_all(self) -> None:
        size, summary = self.size, self.summary
        with self.step("Download and convert the model"):
            said = self.run([HERE / "convert.py", BASE], "convert.log", threads=os.cpu_count() or 1)
            say("   " + said.strip().splitlines()[-1])
        with self.step("Make the data"):
            said = self.run([HERE / "make_data.py", self.out / "data", "--facts", size.facts], "data.log")
            print("".join(f"          {line}\n" for line in said.splitlines()), end="", flush=True)
        with self.step("Answers before training"):
            self.answer("before", BASE)
        common = {"data.files": self.out / "data" / "train.jsonl"}
        full = {**common, "train.steps": size.sft_steps}
        with self.step("SFT of all weights on 2 ranks, interrupted"):
            lines = self.train("train", "sft", full, ranks=2, until=size.resume_from, interrupt=True)
            summary["training"]["sft"] = losses(lines)
        with self.step("The rest of it on 1 rank"):
            lines = self.train("train", "sft", full, ranks=1, until=size.sft_steps)
            first = next(line["step"] for line in lines if line["event"] == "train")
            check(first > size.resume_from, f"resumed at step {first}, expected one after {size.resume_from}")
            summary["training"]["sft"] |= {"resumed_at": first} | {
                "losses": summary["training"]["sft"]["losses"] | losses(lines)["losses"]
            }
        with self.step("Export it; answers after SFT"):
            tuned = self.export("sft")
            self.answer("sft", tuned)
        with self.step("LoRA on 2 ranks"):
            adapters = {"lora.rank": 16, "lora.alpha": 32, "optimizer.lr": "1e-3", "train.steps": size.lora_steps}
            lines = self.train("train", "lora", {**common, **adapters}, ranks=2, until=size.lora_steps)
            summary["training"]["lora"] = losses(lines)
        with self.step("Export it; answers after LoRA"):
            self.answer("lora", self.export("lora", "--merge"), show=0)
        for seed in size.seeds:
            with self.step(f"GRPO on 2 ranks, seed {seed}"):
                settings = {"model.path": tuned, "data.files": self.out / "data" / "sort_train.jsonl"}
                settings |= {"train.seed": seed, "train.steps": size.grpo_steps}
                lines = self.train("grpo", f"grpo-{seed}", settings, ranks=2, until=size.grpo_steps)
                rewards = {line["step"]: line["reward"] for line in lines if line["event"] == "train"}
                summary["training"][f"grpo-{seed}"] = {"rewards": rewards}
        for seed in size.seeds:
            with self.step(f"Export it; answers after GRPO, seed {seed}"):
                self.answer(f"grpo-{seed}", self.export(f"grpo-{seed}"), "sort_test.jsonl", show=0)
        with self.step("Chat with the result in plain transformers"):
            asked = [row["question"] for row in json.loads((self.out / "answers-sft.json").read_text())["rows"]]
            texts = [asked[0], asked[1], asked[-1], "What is the capital of France?"]
            said = self.run([HERE / "chat.py", self.out / f"grpo-{size.seeds[0]}-model", "--say", *texts], "chat.log")
            summary["chat"] = said[said.index("> ") :].splitlines()
            print("".join(f"          {line}\n" for line in summary["chat"]), end="", flush=True)
            check(all(f"> {text}" in summary["chat"] for text in texts), "chat.py did not answer all texts")

    def judge(self) -> None:
        """Ends with an error unless training did what this demo says; a short run only has to get this far."""
        training, answers = self.summary["training"], self.summary["answers"]
        if not self.size.is_short:
            for name in ("sft", "lora"):
                values = list(training[name]["losses"].values())
                check(
                    values[-1] < 0.2 * values[0], f"{name}: the loss fell from {values[0]:.2f} to {values[-1]:.2f} only"
                )
                before, after = trained_share(answers["before"]), trained_share(answers[name])
                check(after > max(0.6, before + 0.4), f"{name}: {after:.2f} exact matches, {before:.2f} before")
            # A step rewards eight prompts, which is noisy; the held-out lists are the same for all models.
            before = answers["sft"]["sort"]["exact"]
            after = statistics.fmean(answers[f"grpo-{seed}"]["sort"]["exact"] for seed in self.size.seeds)
            check(after >= before + 2, f"GRPO: {after:g} held-out lists are sorted, {before} before")
        plot(self.summary, self.out / "plots.png")
        self.summary["total_seconds"] = round(time.monotonic() - START, 1)
        (self.out / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n")
        say(f"done. {self.out}: summary.json, plots.png, *-model (HuggingFace folders), *.log")


def read_lines(path: Path) -> list[dict]:
    """Complete lines of a file that another process is writing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def report(line: dict, until: int) -> None:
    event, step = line["event"], line["step"]
    if event == "train" and (step % 8 == 0 or step in (1, until)):
        what = f"reward {line['reward']:.3f}" if "reward" in line else f"loss {line['loss']:.4f}"
        say(f"   step {step:3d}  {what}  {line['tokens_per_s']:.0f} tokens/s")
    elif event in ("resume", "interrupt"):
        say(f"   {event} at step {step}")


def losses(lines: list[dict]) -> dict:
    return {"losses": {line["step"]: line["loss"] for line in lines if line["event"] == "train"}}


def trained_share(counts: dict) -> float:
    """Share of exact matches among questions about trained facts."""
    found = [counts[kind] for kind in ("module", "purpose") if kind in counts]
    return sum(count["exact"] for count in found) / sum(count["questions"] for count in found)


def plot(summary: dict, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        say("   matplotlib is not installed: no plots")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, match, reward) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    training, answers = summary["training"], summary["answers"]
    for name, label in (("sft", "all weights"), ("lora", "LoRA")):
        values = training[name]["losses"]
        loss.plot(list(values), list(values.values()), label=label)
    loss.axvline(training["sft"]["resumed_at"] - 0.5, color="gray", linestyle="--", label="resumed on 1 rank")
    loss.set(title="SFT", xlabel="step", ylabel="loss (nats per token)", yscale="log")
    kinds = ("module", "purpose", "control", "sort")
    for i, (name, counts) in enumerate(answers.items()):
        shares = [counts[kind]["exact"] / counts[kind]["questions"] if kind in counts else 0 for kind in kinds]
        match.bar([x + 0.16 * i for x in range(len(kinds))], shares, width=0.16, label=name)
    match.set(title="Held-out questions", ylabel="exact matches", ylim=(0, 1))
    match.set_xticks([x + 0.08 * (len(answers) - 1) for x in range(len(kinds))], kinds)
    for name in [name for name in training if name.startswith("grpo")]:
        values = training[name]["rewards"]
        smooth = [statistics.fmean(list(values.values())[max(0, i - 3) : i + 1]) for i in range(len(values))]
        (drawn,) = reward.plot(list(values), list(values.values()), linewidth=0.7, alpha=0.5)
        reward.plot(list(values), smooth, color=drawn.get_color(), label=f"seed {name[5:]}, mean of 4 steps")
    reward.set(title="GRPO", xlabel="step", ylabel="reward of samples", ylim=(0, 1))
    for axes in (loss, match, reward):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "smollm2", help="Default: out/smollm2.")
    parser.add_argument("--short", action="store_true", help="Few rows and steps, no claim about quality.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Random seeds of GRPO. Default: 0.")
    parser.add_argument("--skip", action="store_true", help="Skip with success if the registry cannot be reached.")
    args = parser.parse_args()
    # `timeout` and CI end a program with SIGTERM: as an exception it passes the blocks that stop the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    size = SHORT if args.short else FULL
    demo = Demo(args.out.resolve(), replace(size, seeds=tuple(args.seeds)))
    try:
        demo.run_all()
    except SystemExit as end:
        if end.code != UNAVAILABLE:
            raise
        why = (args.out / "convert.log").read_text().strip().splitlines()[-1]
        if not args.skip:
            raise Failed(why) from None
        print(f"demo-real: SKIPPED: {why}")
        return
    demo.judge()


if __name__ == "__main__":
    main()
