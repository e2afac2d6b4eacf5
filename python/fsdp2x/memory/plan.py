"""`fsdp2x plan`: the memory of a training run before it exists, from a config on the meta device.

Reads a HuggingFace config.json or the model, parallel and optimizer sections of a training YAML; builds the model
without weights and without a process group, and hands it to the planner and the report that running models use.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.memory.facts import Ranks
from fsdp2x.memory.optimizers import PLANNED, planned_bytes
from fsdp2x.memory.report import MemoryReport, readable, report_of
from fsdp2x.memory.sources import facts_of_plan
from fsdp2x.runtime.offload import OFFLOAD_MODES, Offload
from fsdp2x.wrap import AutoWrap

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_DECIMAL_UNITS = {"K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


class PlanError(ValueError):
    """A config or an option that cannot be planned for; the message says what was got and what is expected."""


def plan_memory(
    model: nn.Module,
    world_size: int,
    *,
    replicas: int = 1,
    transport: str = "process_group",
    device: str | None = None,
    offload: str = "none",
    optimizer: str = "adamw",
    auto_wrap: AutoWrap = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> MemoryReport:
    """What ``memory_report`` would say on rank 0, which has the most rows, after ``fully_shard`` with these arguments.

    ``model`` stays as it is, and may be on the meta device. ``world_size`` counts all ranks, ``replicas`` of whose
    groups hold copies of the same shards. ``transport="shm"``: all ranks of a group on one host. ``device``: "cuda",
    with NCCL, or "cpu"; None: the CPU where memory is shared, else CUDA. ``offload``: a mode of ``HostOffloadPolicy``.
    ``optimizer``: one of adamw, sgd, sgd_momentum, none.

    Raises:
        ValueError: sizes that do not divide each other; shared memory on CUDA; an optimizer that cannot be offloaded;
            what ``fully_shard`` refuses of ``auto_wrap`` and ``reshard_after_forward``.
    """
    if world_size < 1 or replicas < 1 or world_size % replicas:
        raise PlanError(f"{replicas} replicas do not divide a world of {world_size} rank(s)")
    if optimizer not in PLANNED:
        raise PlanError(f"optimizer: got {optimizer!r}, expected one of {', '.join(PLANNED)}")
    if transport not in ("process_group", "shm"):
        raise PlanError(f"transport: got {transport!r}, expected process_group or shm")
    if offload not in OFFLOAD_MODES:
        raise PlanError(f"offload: got {offload!r}, expected one of {', '.join(OFFLOAD_MODES)}")
    device = device or ("cpu" if transport == "shm" else "cuda")
    if device not in ("cuda", "cpu"):
        raise PlanError(f"device: got {device!r}, expected cuda or cpu")
    if device == "cuda" and transport == "shm":
        raise PlanError("transport: got shm, which ranks on the CPU share; expected process_group with device cuda")
    if offload == "optimizer" and device == "cuda" and optimizer == "sgd_momentum":
        raise PlanError("offload: got optimizer, which AdamW alone can do; expected gradients or all with sgd_momentum")
    world = world_size // replicas
    if device == "cuda":
        ranks = Ranks("shards", world, 0, "process_group", replicas, has_streams=True)
    else:
        ranks = Ranks("shards", world, 0, "local" if world == 1 else transport, replicas)
    facts = facts_of_plan(
        model,
        ranks,
        auto_wrap=auto_wrap,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        ignored_params=ignored_params,
        offload=Offload(offload),
    )
    return report_of(facts, planned_bytes(optimizer, facts))


@dataclass(frozen=True)
class Request:
    """What is to be planned. None: what the config, or `fully_shard`, says."""

    config: str
    overrides: Sequence[str] = ()
    world_size: int = 1
    replicas: int = 1
    dtype: str | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool | int | None = None
    auto_wrap: bool | list[str] | None = None
    transport: str | None = None
    device: str | None = None
    offload: str | None = None
    optimizer: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The report and what it is of."""

    model: str
    num_parameters: int
    request: Request
    report: MemoryReport

    @property
    def fits(self) -> bool | None:
        """Whether a rank's peak on its device, without activations, is within the memory; None when none was given."""
        limit = self.request.memory_bytes
        return None if limit is None else self.report.device_peak_bytes <= limit

    def to_dict(self) -> dict[str, Any]:
        request = self.request
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "world_size": request.world_size,
            "policy": {
                name: getattr(request, name)
                for name in (
                    *("dtype", "param_dtype", "reduce_dtype", "reshard_after_forward", "auto_wrap", "optimizer"),
                    *("device", "offload"),
                )
            },
            "memory_bytes": request.memory_bytes,
            "fits": self.fits,
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        request, report = self.request, self.report
        computes = f", computed in {request.param_dtype}" if request.param_dtype else ""
        head = f"{self.model}: {self.num_parameters:,} parameters in {request.dtype}{computes}, {request.optimizer}"
        head += f", on {request.device}" + (f", offload {request.offload}" if request.offload != "none" else "")
        lines = [head, "", str(report)]
        if self.fits is not None:
            room = request.memory_bytes - report.device_peak_bytes
            verdict = f"fits, {readable(room)} left for activations" if self.fits else f"too big by {readable(-room)}"
            lines.append(f"{readable(request.memory_bytes)} a rank: {verdict}")
        return "\n".join(lines)


def make_plan(request: Request) -> Plan:
    """Reads the config, builds the model on the meta device and plans it.

    Raises:
        PlanError, ConfigError: the config cannot be read, or does not go with the request.
    """
    request, config = _read(request)
    request = replace(
        request,
        dtype=request.dtype or _dtype_name(getattr(config, "dtype", None)) or "float32",
        transport=request.transport or ("shm" if request.device == "cpu" else "process_group"),
        offload=request.offload or "none",
        optimizer=request.optimizer or "adamw",
    )
    request = replace(request, device=request.device or ("cpu" if request.transport == "shm" else "cuda"))
    model = _build_on_meta(config, getattr(torch, request.dtype))
    try:
        report = plan_memory(
            model,
            request.world_size,
            replicas=request.replicas,
            transport=request.transport,
            device=request.device,
            offload=request.offload,
            optimizer=request.optimizer,
            auto_wrap=request.auto_wrap,
            reshard_after_forward=request.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=request.param_dtype and getattr(torch, request.param_dtype),
                reduce_dtype=request.reduce_dtype and getattr(torch, request.reduce_dtype),
            ),
        )
    except (ValueError, NotImplementedError) as error:
        raise PlanError(str(error)) from None
    return Plan(type(model).__name__, sum(param.numel() for param in model.parameters()), request, report)


def parse_bytes(text: str) -> int:
    """`80GiB`, `80G` and `85899345920` are the same; `80GB` is 80 * 10**9.

    Raises:
        PlanError: neither a number nor a number with such a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", text, flags=re.IGNORECASE)
    if found is None:
        raise PlanError(f"memory: got {text!r}, expected a size such as 80GiB, 512MiB or a number of bytes")
    number, unit, suffix = found[1], found[2].upper(), (found[3] or "").lower()
    factor = _DECIMAL_UNITS[unit] if suffix == "b" and unit else _UNITS[unit]
    return int(float(number) * factor)


def _read(request: Request) -> tuple[Request, Any]:
    """The request with what a training YAML adds, and a transformers config."""
    path = Path(request.config).expanduser()
    if path.is_dir() or path.suffix == ".json":
        if request.overrides:
            raise PlanError(f"{request.overrides[0]}: key=value settings go with a training YAML, not with {path.name}")
        return request, _read_hf_config(path)
    return _read_training_config(request, path)


def _read_hf_config(path: Path) -> Any:
    from transformers import AutoConfig

    from fsdp2x.hf.config import read_config
    from fsdp2x.reading.errors import CheckpointError

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"config {path}: there is no file {file}")
    try:
        read_config(file)
        # A name of a file, never of a hub's repository; code that a config names is not run.
        return AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except CheckpointError as error:
        raise PlanError(f"config {error}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise PlanError(f"config {file}: transformers cannot read it: {reason}") from None


def _read_training_config(request: Request, path: Path) -> tuple[Request, Any]:
    from fsdp2x.train import parse_config
    from fsdp2x.train.dialects import translate_file
    from fsdp2x.train.model import make_hf_config, offload_mode
    from fsdp2x.train.strategy import plan_mesh
    from fsdp2x.train.tokenizer import make_tokenizer

    settings = translate_file(path, request.overrides).settings
    data = settings.get("data")
    if isinstance(data, dict) or data is None:  # where the text is does not matter here
        settings["data"] = {**(data or {}), "files": ["text"]}
    training = parse_config(settings)
    model, parallel = training.model, training.parallel
    if model.path is not None:
        config = _read_hf_config(Path(model.path).expanduser())
    else:
        name = training.data.tokenizer or "bytes"
        config = make_hf_config(model.config, None if name == "characters" else make_tokenizer(name))
    mesh = plan_mesh(parallel, request.world_size, request.world_size)
    shares_memory = "shm" in (request.transport, parallel.transport)
    device = request.device or ("cpu" if parallel.device == "cpu" or shares_memory else "cuda")
    optimizer = training.optimizer
    asked = {
        "dtype": model.dtype,
        "param_dtype": None if parallel.param_dtype == "auto" else parallel.param_dtype,
        "reduce_dtype": parallel.reduce_dtype,
        "reshard_after_forward": mesh.reshard_after_forward,
        "auto_wrap": parallel.auto_wrap,
        "transport": parallel.transport
        if parallel.transport != "auto"
        else ("shm" if device == "cpu" else "process_group"),
        "device": device,
        "offload": offload_mode(parallel.offload),
        "optimizer": "sgd_momentum" if optimizer.name == "sgd" and optimizer.momentum else optimizer.name,
    }
    missing = {name: value for name, value in asked.items() if getattr(request, name) is None}
    if request.replicas == 1:
        missing["replicas"] = mesh.num_replicas
    return replace(request, **missing), config


def _build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    import transformers

    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    try:
        with torch.device("meta"):
            if not (isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)):
                return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return named(config)
            finally:
                torch.set_default_dtype(before)
    except (ValueError, TypeError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        raise PlanError(f"config of {type(config).__name__}: no model can be built: {text}") from None


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
