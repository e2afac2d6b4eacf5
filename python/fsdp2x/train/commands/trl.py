"""`fsdp2x trl METHOD`: starts TRL's script on all local devices. `trl_rank.py` is what each rank runs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.launch import choose_ranks, is_launched, run_ranks
from fsdp2x.train.commands.shared import positive

_DESCRIPTION = """\
Train with TRL's own script and all its arguments, sharded by fsdp2x. It uses all GPUs of this host, CPU ranks if there
are none, or torchrun's ranks. `fsdp2x trl sft --help` lists TRL's arguments.

  --config FILE   YAML file with TRL's arguments.
  --nproc N       Number of ranks. Default: one per GPU, else 2.

dataset_name is a local folder, a local file (JSONL, parquet, CSV), or a name in the HuggingFace cache. Nothing is
downloaded unless you set HF_HUB_OFFLINE=0. Sharding is on unless the file says `fsdp: false`."""


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "trl",
        help="train chats, preferences, and rewards with TRL",
        usage="fsdp2x trl {sft,grpo,dpo,reward} --config FILE [--nproc N] [TRL's arguments]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--supervisor", type=int, metavar="PID", help=argparse.SUPPRESS)
    command.add_argument("method", choices=("sft", "grpo", "dpo", "reward"))
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from fsdp2x.train.parse import read_yaml

    if importlib.util.find_spec("trl") is None:
        raise ConfigError("fsdp2x trl needs TRL, which is not installed. Run pip install 'fsdp2x[trl]'.")
    own = argparse.ArgumentParser(prog="fsdp2x trl", add_help=False, allow_abbrev=False)
    own.add_argument("--config")
    own.add_argument("--nproc", type=positive)
    options, words = own.parse_known_args(args.words)
    if is_launched() or {"-h", "--help"} & set(words):
        from fsdp2x.train.commands.trl_rank import run_rank

        return run_rank(args.method, options.config, words, args.supervisor)
    settings = read_yaml(options.config) if options.config else {}
    own.add_argument("--output_dir", "--output-dir", default=settings.get("output_dir", "trainer_output"))
    own.add_argument("--use_cpu", "--use-cpu", nargs="?", const=True, default=settings.get("use_cpu", False))
    trls, _ = own.parse_known_args(words)
    on_cpu = str(trls.use_cpu).lower() in ("true", "yes", "1")
    world, num_threads = choose_ranks(options.nproc, on_cpu, "--use_cpu")
    try:
        # Ranks end at once after Ctrl-C, unless TRL's enable_jit_checkpoint saves a checkpoint first.
        return run_ranks(["trl", args.method, *args.words], world, num_threads, finish=False)
    except KeyboardInterrupt as stop:
        stop.args = (f"{stop} {_how_to_continue(Path(trls.output_dir))}",)
        raise


def _how_to_continue(output: Path) -> str:
    # The trainer's state is the last file of a checkpoint.
    saved = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return f"Continue with --resume_from_checkpoint {saved[-1].parent}" if saved else f"{output} has no checkpoint."
