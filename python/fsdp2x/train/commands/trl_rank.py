"""A rank of `fsdp2x trl`: runs TRL's script with sharding, local data, and errors that name the nearest argument."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp2x.base.failures import ConfigError, reworded
from fsdp2x.train.commands import launch
from fsdp2x.train.parse import read_yaml

# Formats of data files, by the names of the datasets library.
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_NO_DOWNLOAD = "fsdp2x trl downloads nothing. Correct the path, use `hf download`, or set HF_HUB_OFFLINE=0."
_NO_SPLIT = "Set test_split_size, dataset_test_split, or data_files: {train: FILE, test: FILE}."


def run_rank(method: str, config: str | None, words: list[str], supervisor: int | None) -> int:
    """Trains and returns the exit status. Errors go to the supervisor, or else to standard error."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger().setLevel(logging.WARNING)
    return launch.run_rank(lambda: _train(method, config, words), supervisor, {ConfigError: 2})


def _train(method: str, config: str | None, words: list[str]) -> None:
    import transformers.trainer
    import trl

    from fsdp2x import install

    install()
    script = importlib.import_module(f"trl.scripts.{method}")
    parsed = _parse(script.make_parser(prog=f"fsdp2x trl {method}"), config, words)
    script_args, training_args, model_args, mixture = parsed
    for key, package in (("load_in_4bit", "bitsandbytes"), ("load_in_8bit", "bitsandbytes"), ("use_peft", "peft")):
        if getattr(model_args, key) and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key} needs {package}, which is not installed. Run pip install {package}.")
    for key, arguments in (("model_name_or_path", model_args), ("reward_model_name_or_path", script_args)):
        _require_local(key, getattr(arguments, key, None), model_args.model_revision)
    trl.get_dataset = _local_data(script_args, training_args, mixture)
    transformers.trainer.DEFAULT_CALLBACKS.append(_reporter())
    script.main(*parsed)


def _parse(parser: Any, config: str | None, words: list[str]) -> tuple:
    """Returns TRL's dataclasses, or raises ``ConfigError``. TRL alone ignores unknown keys of a file."""
    import torch

    from fsdp2x.train.distributed import explain_emulation

    def fail(message: str) -> None:
        raise ConfigError(message)

    parser.error = fail
    parser.allow_abbrev = False
    settings = read_yaml(config) if config else {}
    known = [field.name for kind in parser.dataclass_types for field in dataclasses.fields(kind) if field.init]
    wrong = [(f"config file {config}: unknown key", str(key)) for key in settings if key not in (*known, "env")]
    wrong += [("unrecognized argument", word) for word in parser.parse_known_args(words)[1]]
    for what, name in wrong[:1]:
        near = difflib.get_close_matches(name.partition("=")[0].strip("-").replace("-", "_"), known, n=1)
        raise ConfigError(f"{what} {name}." + (f" Did you mean {near[0]}?" if near else ""))
    parser.set_defaults_with_config(fsdp=True)
    if not torch.accelerator.is_available():
        parser.set_defaults_with_config(use_cpu=True)
        if explain_emulation(torch.bfloat16, torch.device("cpu")) is not None:
            parser.set_defaults_with_config(bf16=False)
    with reworded(ConfigError, str(config or "TRL"), ConfigError, ValueError, TypeError, ImportError):
        return parser.parse_args_and_config([*(["--config", config] if config else []), *words])


def _require_local(key: str, name: str | None, revision: str) -> None:
    """Raises ``ConfigError`` for a model that is neither a folder nor in HuggingFace's cache."""
    from huggingface_hub import try_to_load_from_cache

    if name is None or os.path.isdir(name) or os.environ["HF_HUB_OFFLINE"] in ("0", ""):
        return
    with contextlib.suppress(ValueError):  # a path is no name in the cache
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
    raise ConfigError(f"{key}: {name} is neither a folder nor in the HuggingFace cache. {_NO_DOWNLOAD}")


def _local_data(script_args: Any, training_args: Any, mixture: Any) -> Callable:
    """Returns a function in place of TRL's ``get_dataset`` that also reads local files and test splits."""
    from trl.scripts import utils

    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if not mixture.datasets and script_args.dataset_name:
        mixture.datasets = [utils.DatasetConfig(script_args.dataset_name, name=script_args.dataset_config, split=train)]
        mixture.streaming = script_args.dataset_streaming
        script_args.dataset_name = None
    for one in mixture.datasets:
        if os.path.isfile(one.path) and Path(one.path).suffix in _FORMATS:
            one.path, one.data_files = _FORMATS[Path(one.path).suffix], one.path

    def loaded(entries: list[Any]) -> Any:
        try:
            return utils.get_dataset(dataclasses.replace(mixture, datasets=entries))
        except (OSError, ValueError) as error:  # OSError: of a missing file, and of the hub's client
            names = ", ".join(str(one.data_files or one.path) for one in entries)
            hint = _NO_SPLIT if "split" in str(error) else _NO_DOWNLOAD if isinstance(error, OSError) else ""
            raise ConfigError(f"dataset {names}: {error} {hint}") from None

    def get_dataset(_: Any) -> dict[str, Any]:
        found = loaded(mixture.datasets)
        if training_args.eval_strategy != "no" and "test" not in found:
            parts = [dataclasses.replace(one, split=test, fraction=None) for one in mixture.datasets]
            found["test"] = loaded(parts)["train"]
        return {train: found["train"], test: found.get("test")}

    return get_dataset


def _reporter() -> type:
    """Returns a callback that says what is sharded, after a step, because the engine then knows its transport."""
    from transformers import TrainerCallback

    from fsdp2x.api import FSDPModule, describe

    class Reporter(TrainerCallback):
        is_new = True

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if self.is_new and state.is_world_process_zero:
                report = describe(model) if isinstance(model, FSDPModule) else None  # type: ignore
                how = f"{len(report.units)} units, transport {report.transport}" if report else "not sharded"
                print(f"fsdp2x: {type(model).__name__} on {args.world_size} rank(s), {how}", flush=True)
            self.is_new = False

    return Reporter
