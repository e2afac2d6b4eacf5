"""Tunes a real chat model on two cores: convert, SFT, LoRA, resume, GRPO, chat. `make demo-real` runs this.

    python examples/smollm2/demo.py              everything, at most 20 minutes
    python examples/smollm2/demo.py --seeds 0 1  GRPO from two random seeds
    python examples/smollm2/demo.py --short      every command with few rows and steps, about 3 minutes

Each step is a command that you can run yourself; the driver prints it, follows its log, and checks the result. In
``--out``: ``summary.json``, ``plots.png``, logs, and the tuned models as HuggingFace folders.
"""

from __future__ import annotations

import argparse
import ast
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

    @contextlib.contextmanager
    def started(self, words: list, log: str, *, ranks: int = 1) -> Iterator[subprocess.Popen]:
        """Runs ``python *words`` during the block, and prints the command as you would type it."""
        words = [str(word) for word in words]
        shown = shlex.join(words[1:] if words[0] == "-m" else ["python", *words]).replace(str(ROOT) + "/", "")
        print(f"          $ {shown}", flush=True)
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        # Passive: threads that wait by spinning would take the cores from each other on a busy machine.
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        with open(self.out / log, "w") as file:
            command = [sys.executable, *words]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)

    def run(self, words: list, log: str) -> str:
        """Runs a command to its end and returns its output."""
        with self.started(words, log) as process:
            status = process.wait(timeout=900)
        text = (self.out / log).read_text()
        if status == UNAVAILABLE:
            raise SystemExit(UNAVAILABLE)
        check(status == 0, f"{Path(words[0]).name} ended with status {status}; see {self.out / log}\n{text[-1500:]}")
        return text

    def train(
        self, method: str, name: str, settings: dict, *, ranks: int = 2, done: int = 0, interrupt: int = 0
    ) -> dict[int, float]:
        """Runs ``fsdp2x trl METHOD``, and interrupts it as soon as the checkpoint of step `interrupt` is complete.

        Returns the loss or reward of each step, after the `done` ones of an earlier run.
        """
        folder, log, key = self.out / name, f"{name}-{ranks}.log", "reward" if method == "grpo" else "loss"
        words = ["-m", "fsdp2x", "trl", method, "--config", HERE / f"{method}.yaml", "--nproc", ranks]
        words += [word for pair in {**settings, "output_dir": folder}.items() for word in (f"--{pair[0]}", pair[1])]
        saved = folder / f"checkpoint-{interrupt}" / "trainer_state.json"
        values: dict[int, float] = {}
        deadline = time.monotonic() + 1200
        with self.started([*words, "--disable_tqdm", "true"], log, ranks=ranks) as process:
            while True:
                status = process.poll()  # before the last look at the log
                for step, line in enumerate(logged(self.out / log, key), done + 1):
                    if step not in values:
                        values[step] = float(line[key])
                        if step % 8 == 0 or step in (1, settings["max_steps"]):
                            say(f"   step {step:3d}  {key} {values[step]:.4f}")
                if status is not None or time.monotonic() > deadline:
                    break
                if interrupt and saved.exists():
                    say(f"   interrupting after step {interrupt}, as Ctrl-C does")
                    process.send_signal(signal.SIGINT)
                    process.wait(timeout=120)
                time.sleep(0.2)
        expected = 128 + signal.SIGINT if interrupt else 0
        tail = (self.out / log).read_text()[-1500:]
        check(status == expected, f"fsdp2x trl {method} ended with {status}, expected {expected}; {log}:\n{tail}")
        return {step: value for step, value in values.items() if not interrupt or step <= interrupt}

    def answer(self, name: str, folder: Path, *files: str, show: int = 3) -> None:
        """Exact matches of a model on held-out questions, of all files unless some are given."""
        files, result = files or ("questions.jsonl", "sort_test.jsonl"), self.out / f"answers-{name}.json"
        words = [HERE / "answers.py", folder, *(self.out / "data" / file for file in files), "--json", result]
        words += ["--limit", 4] if self.size.is_short else []
        self.run(words, f"answers-{name}.log")
        found = json.loads(result.read_text())
        self.summary["answers"][name] = found["counts"]
        for kind, count in found["counts"].items():
            say(f"   {kind}: {count['exact']} of {count['questions']} exact, {count['names']} name the answer")
        for row in found["rows"][:show]:
            print(f"          | {row['question']}\n          |   {row['answer']!r}, expected {row['expected']!r}")

    # ---- steps

    def run_all(self) -> None:
        size, training = self.size, self.summary["training"]
        with self.step("Download and convert the model"):
            said = self.run([HERE / "convert.py", BASE], "convert.log")
            say("   " + said.strip().splitlines()[-1])
        with self.step("Make the data"):
            said = self.run([HERE / "make_data.py", self.out / "data", "--facts", size.facts], "data.log")
            print("".join(f"          {line}\n" for line in said.splitlines()), end="", flush=True)
        with self.step("Answers before training"):
            self.answer("before", BASE)
        rows = {"dataset_name": self.out / "data" / "train.jsonl"}
        full = {**rows, "max_steps": size.sft_steps, "save_steps": size.resume_from}
        with self.step("SFT of all weights on 2 ranks, interrupted"):
            losses = self.train("sft", "sft", full, interrupt=size.resume_from)
        with self.step("The rest of it on 1 rank, and answers"):
            last = self.out / "sft" / f"checkpoint-{size.resume_from}"
            resume = {"resume_from_checkpoint": last, "per_device_train_batch_size": 16}
            rest = self.train("sft", "sft", full | resume, ranks=1, done=size.resume_from)
            check(len(rest) == size.sft_steps - size.resume_from, f"{len(rest)} steps after {last.name}")
            training["sft"] = {"resumed_at": size.resume_from + 1, "losses": losses | rest}
            for checkpoint in (self.out / "sft").glob("checkpoint-*"):
                shutil.rmtree(checkpoint)  # with AdamW's moments it takes three times the model's space
            self.answer("sft", self.out / "sft")
        with self.step("LoRA on 2 ranks, and answers"):
            adapters = {"use_peft": "true", "lora_target_modules": "all-linear", "learning_rate": "1e-3"}
            adapters |= {"max_steps": size.lora_steps, "save_strategy": "no"}
            training["lora"] = {"losses": self.train("sft", "lora", rows | adapters)}
            self.answer("lora", self.out / "lora", show=0)
        for seed in size.seeds:
            with self.step(f"GRPO on 2 ranks, seed {seed}, and answers"):
                settings = {"dataset_name": self.out / "data" / "sort_train.jsonl", "seed": seed}
                settings |= {"model_name_or_path": self.out / "sft", "max_steps": size.grpo_steps}
                training[f"grpo-{seed}"] = {"rewards": self.train("grpo", f"grpo-{seed}", settings)}
                self.answer(f"grpo-{seed}", self.out / f"grpo-{seed}", "sort_test.jsonl", show=0)
        with self.step("Chat with the result in plain transformers"):
            asked = [row["question"] for row in json.loads((self.out / "answers-sft.json").read_text())["rows"]]
            texts = [asked[0], asked[1], asked[-1], "What is the capital of France?"]
            said = self.run([HERE / "chat.py", self.out / f"grpo-{size.seeds[0]}", "--say", *texts], "chat.log")
            chat = self.summary["chat"] = said[said.index("> ") :].splitlines()
            print("".join(f"          {line}\n" for line in chat), end="", flush=True)
            check(all(f"> {text}" in chat for text in texts), "chat.py did not answer all texts")

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
        say(f"done. {self.out}: summary.json, plots.png, models as HuggingFace folders, *.log")


def logged(path: Path, key: str) -> list[dict]:
    """TRL's complete lines of a log that another process is writing, one for each step."""
    lines = path.read_text().splitlines(keepends=True)
    found = [ast.literal_eval(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
    return [line for line in found if key in line]


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
