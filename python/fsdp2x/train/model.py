"""Builds the model of a run from a HuggingFace config or a local directory, changes it by the config, and shards it."""

from __future__ import annotations

import datetime
import difflib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.api import (
    AutoWrap,
    Checkpoint,
    HostOffloadPolicy,
    OffloadMode,
    add_lora,
    apply_tiled_mlp,
    bars_of_rank_0,
    build_empty,
    freeze_module_prefix,
    from_pretrained,
    fully_shard,
    how_to_download,
    plain_config,
    plan_units,
    read_config,
    read_hf_config,
)
from fsdp2x.base.failures import CheckpointError, reworded, run_on_all_ranks
from fsdp2x.moe import apply_expert_patch, expert_parallel, find_experts, use_grouped_gemm
from fsdp2x.train.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from fsdp2x.train.metrics import memory_bytes
from fsdp2x.train.parse import refuse_unknown
from fsdp2x.train.schedule import decay_groups
from fsdp2x.train.strategy import MeshPlan, plan_expert_mesh
from fsdp2x.train.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Older spellings that transformers' configs still accept, but no longer list.
OLDER_KEYS = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "torch_dtype",
    "num_labels",
    "tokenizer_class",
}


def with_defaults(config: TrainConfig, device_type: str) -> TrainConfig:
    """Returns the config with values for settings that depend on others: model.dtype, model.load, data.held_out.

    Raises:
        ConfigError: `model.path` has no readable config.json.
    """
    model, data = config.model, config.data
    unset: dict[str, Any] = {}
    if model.dtype == "auto":
        unset["dtype"] = "float32"
        if config.lora.rank and model.path is not None and device_type == "cuda":
            written = read_config(find_folder(model) / "config.json")
            named = str(written.get("dtype") or written.get("torch_dtype")).removeprefix("torch.")
            unset["dtype"] = "bfloat16" if named == "bfloat16" else "float32"
    if model.load == "auto":
        reads_rows = model.path is not None and config.parallel.expert_parallel == 1
        unset["load"] = "rows" if reads_rows else "whole"
    if data.held_out is None:
        evaluates = config.train.eval_every or config.train.mode == "evaluate"
        data = data.model_copy(update={"held_out": 0.05 if evaluates else 0.0})
    return config.model_copy(update={"model": model.model_copy(update=unset), "data": data})


def build_model(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> torch.nn.Module:
    """Returns a causal language model on the CPU with equal weights on every rank. Raises `ConfigError`."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with _built_by_transformers(config), bars_of_rank_0():
        if config.path is not None:
            folder = check_folder(config)
            torch.manual_seed(seed)  # for a head that the files may lack
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
            _check_whole(model, folder, sorted(report["missing_keys"]))
        else:
            hf_config = make_hf_config(config, tokenizer)
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False, **options)
    check_vocabulary(model, tokenizer)
    return model


def _check_whole(model: torch.nn.Module, folder: Path, missing: list[str]) -> None:
    """Raises if weights are missing, which transformers would silently initialize."""
    named = read_config(folder / "config.json").get("architectures") or []
    if missing and type(model).__name__ in named:
        raise ConfigError(f"model.path: the files in {folder} lack {len(missing)} weights: {', '.join(missing[:5])}")


def build_on_meta(
    config: ModelConfig, dtype: torch.dtype, tokenizer: Tokenizer | None = None, attn_implementation: str | None = None
) -> torch.nn.Module:
    """Builds the model without weights, in a moment. Without a tokenizer, the vocabulary is a default.

    Raises:
        ConfigError: the settings make no model.
    """
    from transformers import AutoModelForCausalLM

    with _built_by_transformers(config):
        if config.path is None:
            made = make_hf_config(config, tokenizer)
            return build_empty(AutoModelForCausalLM, made, dtype, attn_implementation, keeps_float32=False)
        # Rows are read into the class that the folder names.
        model_class = None if config.load == "rows" else AutoModelForCausalLM
        return build_empty(model_class, read_hf_config(find_folder(config)), dtype, attn_implementation)


def _built_by_transformers(config: ModelConfig) -> AbstractContextManager[None]:
    """Turns any exception of transformers into a `ConfigError` of one sentence."""
    what = "model.config" if config.path is None else f"model.path={config.path}"

    def say(error: Exception) -> str:
        said = " ".join(str(error).split())[:400]
        return f"{what}: transformers cannot build the model: {type(error).__name__}: {said}"

    return reworded(ConfigError, say, Exception)


def find_folder(config: ModelConfig) -> Path:
    """Returns the folder of `model.path`. Raises `ConfigError`."""
    folder = Path(config.path or "").expanduser()
    if not (folder / "config.json").is_file():
        hint = how_to_download(folder)
        raise ConfigError(f"model.path: got {config.path!r}, expected a local directory with a config.json.{hint}")
    with reworded(ConfigError, "model.path", CheckpointError):
        read_config(folder / "config.json")
    return folder


def check_folder(config: ModelConfig) -> Path:
    """Does the same, and checks that it has readable weights."""
    folder = find_folder(config)
    if config.load == "whole" and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path: {config.path} has no *.safetensors. Use model.load=rows for other weights.")
    with reworded(ConfigError, "model.path", CheckpointError):
        Checkpoint([folder]).close()  # raises if files contradict themselves or their index
    return folder


def check_vocabulary(model: Any, tokenizer: Tokenizer) -> None:
    num_rows = model.get_input_embeddings().weight.shape[0]
    if num_rows < tokenizer.vocab_size:
        raise ConfigError(
            f"model: its vocabulary has {num_rows} entries, but the tokenizer {tokenizer.vocab_size}. Raise vocab_size "
            "of a new model, or set data.tokenizer to the tokenizer that the model was trained with."
        )


def make_hf_config(config: ModelConfig, tokenizer: Tokenizer | None) -> Any:
    """Returns a transformers config. Vocabulary and end-of-text ids follow the tokenizer, if any, unless given."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings = dict(config.config or {})
    model_type = settings.pop("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        (near,) = difflib.get_close_matches(str(model_type), sorted(CONFIG_MAPPING_NAMES), n=1, cutoff=0.0)
        raise ConfigError(f"model.config.model_type: transformers has no {model_type!r}. Did you mean {near}?")
    defaults = AutoConfig.for_model(model_type)
    known = {*defaults.to_dict(), *defaults.attribute_map, *OLDER_KEYS}
    refuse_unknown({f"model.config.{key}": key for key in settings if key not in known}, known)
    if tokenizer is not None:
        settings.setdefault("vocab_size", tokenizer.vocab_size)
    for name in ("bos_token_id", "eos_token_id"):
        settings.setdefault(name, tokenizer.eos_id if tokenizer is not None else None)
    return AutoConfig.for_model(model_type, **settings)


@dataclass(frozen=True)
class Model:
    """The sharded model of a run, with the sizes and shapes of its full parameters from before sharding.

    `bytes_before`: memory of the process before, on a CPU, where it has the interpreter and its libraries.
    """

    module: torch.nn.Module
    bytes_before: int
    num_parameters: int
    decays: dict[str, bool]
    assets_config: Any


def make_model(
    config: TrainConfig,
    tokenizer: Tokenizer,
    plan: MeshPlan,
    device: torch.device,
    param_dtype: torch.dtype | None,
) -> Model:
    """Reads, prepares and shards the model. Collective. With `model.load=rows`, ranks read the rows of their shards.

    Raises:
        ConfigError: settings do not fit the model.
    """
    parallel = config.parallel
    whole = run_on_all_ranks(lambda: _read_whole(config, tokenizer), raising=ConfigError)
    noted: dict[str, Any] = {"bytes_before": 0 if device.type == "cuda" else memory_bytes(device)}
    options = sharding(parallel, plan, device, param_dtype)

    def ready(whole: torch.nn.Module) -> torch.nn.Module:
        check_vocabulary(whole, tokenizer)
        noted["assets_config"] = plain_config(whole)
        whole = prepare(whole, config)
        noted.update(num_parameters=sum(p.numel() for p in whole.parameters()), decays=decay_groups(whole))
        return whole

    if whole is None:
        empty = build_on_meta(config.model, torch.float32)
        policy = _told_policy(empty, parallel)
        with reworded(ConfigError, "model"):
            model = from_pretrained(
                find_folder(config.model),
                dtype=getattr(torch, config.model.dtype),
                attn_implementation=config.model.attn_implementation,
                prepare=ready,
                auto_wrap=policy,
                **options,
            )
        _set_wire(model, parallel)
        return Model(model, **noted)
    model = ready(whole.to(device))
    policy = _told_policy(model, parallel)
    if parallel.expert_parallel > 1:
        spread_experts(model, parallel, device, options)
        policy = True if policy is None else policy  # None would see that a part is already sharded
    with reworded(ConfigError, "parallel"):
        fully_shard(model, auto_wrap=policy, **options)
    _set_wire(model, parallel)
    return Model(model, **noted)


def _read_whole(config: TrainConfig, tokenizer: Tokenizer) -> torch.nn.Module | None:
    if config.model.load == "whole":
        return build_model(config.model, tokenizer, config.train.seed)
    if config.parallel.expert_parallel > 1:
        raise ConfigError("parallel.expert_parallel: ranks must load full experts first. Set model.load=whole.")
    check_folder(config.model)
    return None


def _set_wire(model: Any, parallel: ParallelConfig) -> None:
    if parallel.wire_weights is not None or parallel.wire_gradients is not None:
        with reworded(ConfigError, "parallel.wire_weights, parallel.wire_gradients"):
            model.set_wire_dtype(weights=parallel.wire_weights, gradients=parallel.wire_gradients)


def _told_policy(model: torch.nn.Module, parallel: ParallelConfig) -> bool | list[str] | None:
    if dist.get_rank() == 0:
        for name, why in idle_expert_units(model, parallel).items():
            logger.warning("parallel.expert_units=%s: %s", name, why)
    with reworded(ConfigError, "parallel"):
        return unit_policy(model, parallel)


def prepare(model: torch.nn.Module, config: TrainConfig) -> torch.nn.Module:
    """Makes all changes of the model before sharding, and returns the model to shard."""
    wanted, lora = config.model, config.lora
    if wanted.tiled_mlp:
        with reworded(ConfigError, "model.tiled_mlp"):
            apply_tiled_mlp(model, num_shards=wanted.tiled_mlp)
    if wanted.expert_patch:
        with reworded(ConfigError, "model.expert_patch"):
            apply_expert_patch(model)
    if wanted.grouped_gemm:
        with reworded(ConfigError, "model.grouped_gemm"):
            use_grouped_gemm(model)
    if lora.rank:
        with reworded(ConfigError, "lora"):
            model = add_lora(model, lora.model_dump())
    if wanted.freeze:
        with reworded(ConfigError, "model.freeze"):
            num_frozen = freeze_module_prefix(model, wanted.freeze)
        logger.info("%d parameters are frozen: %s", num_frozen, ", ".join(wanted.freeze))
    if config.train.mode == "evaluate":
        model.requires_grad_(False)
    elif config.train.activation_checkpointing:
        recompute_activations(model)
    if config.train.compile:
        num_compiled = compile_blocks(model, config.parallel, config.train.compile_backend)
        logger.info("torch.compile(backend=%s) of %d blocks", config.train.compile_backend, num_compiled)
    return model


def recompute_activations(model: Any) -> None:
    """Turns on the model's own activation checkpointing, without reentrance. Call it before `shard`."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name in older transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_blocks(model: torch.nn.Module, config: ParallelConfig, backend: str) -> int:
    """Compiles each repeated block that will be a unit, in place. Returns their number."""
    blocks = _repeated_blocks(model, unit_policy(model, config))
    if not blocks:
        raise ConfigError("train.compile: the model has no repeated blocks among its units. Set train.compile=false.")
    for block in blocks:
        block.compile(backend=backend)
    return len(blocks)


def unit_policy(model: torch.nn.Module, config: ParallelConfig) -> bool | list[str] | None:
    """Returns `auto_wrap` for `fully_shard`: with expert_units, the model's own blocks and these classes inside."""
    idle = idle_expert_units(model, config)
    experts = [name for name in config.expert_units if name not in idle]
    if not experts:
        return config.auto_wrap
    if isinstance(config.auto_wrap, list):
        return [*config.auto_wrap, *experts]
    if config.auto_wrap is False:
        return experts
    blocks = _repeated_blocks(model, config.auto_wrap)
    return [*dict.fromkeys(type(block).__name__ for block in blocks), *experts]


def _repeated_blocks(model: torch.nn.Module, policy: AutoWrap) -> list[torch.nn.Module]:
    """Returns the modules of units that are one of a numbered list."""
    return [
        module
        for unit in plan_units(model, policy)
        for module, name in zip(unit.modules, unit.names, strict=True)
        if name.rpartition(".")[2].isdigit()
    ]


def idle_expert_units(model: torch.nn.Module, config: ParallelConfig) -> dict[str, str]:
    """Returns classes of `parallel.expert_units` that transformers 5 fused, and why they have no effect."""
    if not config.expert_units:
        return {}
    present = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    fused = next(iter(find_experts(model)), None)
    if fused is None:
        return {}
    why = (
        f"no effect: the {fused.num_experts} experts of a layer are fused in one {type(fused.experts).__name__}, which "
        "needs no separate unit"
    )
    return {name: why for name in config.expert_units if name not in present}


def spread_experts(model: torch.nn.Module, config: ParallelConfig, device: torch.device, options: dict) -> None:
    """Spreads experts over the axis `ep`, each sharded over the other ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    shape, axes = plan_expert_mesh(config, dist.get_world_size())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
    allowed = ("mp_policy", "reshard_after_forward", "transport", "timeout")
    with reworded(ConfigError, "parallel.expert_parallel"):
        expert_parallel(model, mesh, **{k: options[k] for k in allowed})


def sharding(config: ParallelConfig, plan: MeshPlan, device: torch.device, param_dtype: torch.dtype | None) -> dict:
    """Returns arguments of `fsdp2x.fully_shard` except the model and `auto_wrap`. Collective: it makes the mesh."""
    policy = HostOffloadPolicy(offload_mode(config.offload), pin_memory=device.type != "cpu")
    return {
        "mesh": plan.make(device.type),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=getattr(torch, config.reduce_dtype) if config.reduce_dtype else None
        ),
        "offload_policy": policy,
        "reshard_after_forward": plan.reshard_after_forward,
        "transport": config.transport,
        # On a device the process group ends what hangs, by its own timeout.
        "timeout": datetime.timedelta(seconds=config.timeout_s) if device.type == "cpu" else None,
    }


def offload_mode(setting: bool | OffloadMode) -> OffloadMode:
    """Returns the mode of `HostOffloadPolicy` for `parallel.offload`."""
    if isinstance(setting, bool):
        return "all" if setting else "none"
    return setting
