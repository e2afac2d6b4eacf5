"""The commands that the examples say run as they stand, with a model and a text put in and few steps of fewer ranks."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import distributed
from training import losses, shared_folder, write_model

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "examples").glob("*.yaml"))
README = ROOT / "examples" / "README.md"
# Added to each: a run of a few seconds on two CPUs. Evaluation alone has no steps to shorten.
SMALL = (
    "parallel.device=cpu",
    "logging.progress=off",
    "train.eval_blocks=2",
    "data.block_size=32",
    "data.max_bytes=4000",
)
FEW_STEPS = ("train.steps=2", "train.accumulation=1", "train.global_batch_size=null", "train.batch_size=2")


def head_commands(config):
    """Those that the comments at the beginning say, from `torchrun` or `fsdp2x` on."""
    head = [line.removeprefix("#").strip() for line in config.read_text().splitlines() if line.startswith("#")]
    starts = [(line, re.search("torchrun |fsdp2x config ", line)) for line in head]
    return [line[start.start() :] for line, start in starts if start]


def readme_commands():
    blocks = re.findall(r"^```\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    assert all(line.startswith(("torchrun ", "fsdp2x ")) for line in lines)
    return lines


def arguments(command, folder):
    """Returns the command for `fsdp2x`. Checks its launcher and drops it, as the ranks already run."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        assert re.fullmatch(r"--nproc_per_node=\d+", words[1]) and words[2:4] == ["-m", "fsdp2x.train"], command
        words = ["fsdp2x", "train", *words[4:]]
    assert words[0] == "fsdp2x", command
    names = {"FOLDER": folder / "model", "FILES": folder / "text", "my.txt": folder / "text/0.txt",
             "my_text.txt": folder / "text/0.txt", "/usr/lib/python3.11": folder / "text"}  # fmt: skip
    for index, word in enumerate(words[1:]):
        key, equals, value = word.partition("=")
        if value in names:
            words[index + 1] = f"{key}{equals}{names[value]}"
        elif word.startswith("examples/"):
            words[index + 1] = str(ROOT / word)
    return words[1:]


def run(words):
    from fsdp2x.train.cli import main

    if words[-2:] == [">", "mine.yaml"]:
        if dist.get_rank() == 0:
            with open("mine.yaml", "w") as file, contextlib.redirect_stdout(file):
                assert main(words[:-2]) == 0
        dist.barrier()
        return
    small = (*SMALL, "data.pattern=[]") if words[0] == "train" else ()
    if words[0] == "train" and "evaluate" not in Path(words[1]).read_text():
        small += FEW_STEPS
    size = re.search(r"fsdp_size: *(\d+)", Path(words[1]).read_text()) if words[0] == "train" else None
    if size is not None and int(size[1]) > dist.get_world_size():
        small += (f"parallel.fsdp_size={dist.get_world_size()}",)
    assert main([*words, *small]) == 0, words
    dist.barrier()


def test_every_file_is_in_the_table_with_its_command():
    table = dict(re.findall(r"^\| (`[^|]+) \| `([^`]+)` \|", README.read_text(), flags=re.MULTILINE))
    told = {name: command for names, command in table.items() for name in re.findall(r"`([^`]+)`", names)}
    files = {path.name for path in README.parent.iterdir() if path.suffix in (".py", ".yaml")}
    assert set(told) == files | {f"{path.parent.name}/" for path in README.parent.glob("*/*.yaml")}
    for config in CONFIGS:
        assert told[config.name] in (head_commands(config)[0], "make demo")
    for names, command in table.items():  # of a program of several files one is started
        assert command.startswith("make ") or any(
            f"examples/{name}" in command for name in re.findall(r"`([^`]+)`", names)
        )


@distributed(timeout=120)
@pytest.mark.parametrize("name", [config.name for config in CONFIGS])
def test_the_commands_in_the_head_of_a_config(ctx, name):
    from fsdp2x.train.metrics import read_metrics

    with shared_folder(ctx) as folder, pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            write_model(folder / "model")
        dist.barrier()
        patch.chdir(folder)  # where the output goes by default
        commands = [arguments(command, folder) for command in head_commands(ROOT / "examples" / name)]
        assert str(ROOT / "examples" / name) in commands[0]
        for words in commands:
            run(words)
        (metrics,) = folder.rglob("metrics.jsonl")
        events = {line["event"] for line in read_metrics(metrics)}
        assert events >= ({"eval"} if name == "reference.yaml" else {"train", "save"})


@distributed(world_sizes=(1,), timeout=120)
def test_the_commands_of_the_readme_one_after_the_other(ctx):
    with shared_folder(ctx) as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        commands = readme_commands()
        assert {command.split()[0] for command in commands} == {"torchrun", "fsdp2x"}
        for command in commands:
            run(arguments(command, folder))
        assert list(losses(folder / "out/demo")) and (folder / "out/model/model.safetensors").is_file()
