"""`fsdp2x plan`: reads a request from a HuggingFace config.json or a training YAML, and makes the plan.

The model is built without weights and without a process group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.api import (
    Activations,
    ExchangedBytes,
    Peers,
    RankPart,
    TransportKind,
    columns,
    cpu_offload_by_budget,
    estimate_activations,
    find_decoder,
    head_counts,
    head_dims,
    mode_of,
    planned_facts,
    planned_report,
    readable,
)
from fsdp2x.base.arguments import dtype_of
from fsdp2x.base.failures import CheckpointError, reworded
from fsdp2x.memory import MemoryReport, PlanRequest
from fsdp2x.rl.head import CPU_TILE, DEVICE_TILE
from fsdp2x.train import ConfigError, TrainConfig
from fsdp2x.train.config import SequenceRanks
from fsdp2x.train.config_file import ConfigFile, parse_config
from fsdp2x.train.feeds import resolve_tiled_loss
from fsdp2x.train.model import build_on_meta, offload_mode, prepare, unit_policy, with_defaults
from fsdp2x.train.parse import set_path
from fsdp2x.train.strategy import plan_mesh, resolve_batching, usual_node
from fsdp2x.train.tokenizer import choose_tokenizer, make_tokenizer

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_DECIMAL_UNITS = {"K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


# Estimates of what a process of torch takes on a GPU outside of torch's allocator.
_CONTEXT_BYTES = 544 * 2**20  # CUDA's context with the loaded kernels, and a workspace of cuBLAS
_NCCL_BYTES = 512 * 2**20  # buffers of a communicator


@dataclass(frozen=True)
class SequencePlan:
    """Bytes of ranks that share sequences, for the longest micro-batches; the report has none of them.

    ``kept_bytes``: gathered keys and values at the peak; they count as activations. ``sent_bytes``: in a step.
    """

    ulysses: int
    context: int
    positions: int
    kept_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        ranks = SequenceRanks(self.ulysses, self.context)
        text = f"sequences over {ranks}: {self.positions // ranks.total:,} of {self.positions:,} positions a rank"
        text += f", {readable(self.sent_bytes)} sent in a step"
        return text + (f", {readable(self.kept_bytes)} of gathered keys and values" if self.kept_bytes else "")


@dataclass(frozen=True)
class MicroBatch:
    """What decides the activations of a rank's micro-batch: its positions, and how they are computed."""

    tokens: int = 4096
    activation_checkpointing: bool = False
    tiled_loss: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """The report and what it describes."""

    model: str
    num_parameters: int
    request: PlanRequest
    dtypes: Mapping[str, str | None]  # of parameters, compute, and reduction, by name
    report: MemoryReport
    sequences: SequencePlan | None = None  # if the ranks of a YAML share sequences
    staging_bytes: int = 0  # the most CPU memory that background saves take
    dtype_is_the_models: bool = False  # whether config.json names it, for lack of a setting
    batch: MicroBatch | None = None  # None without training
    activations: Activations | None = None  # None if unknown
    has_frozen: bool = False

    @property
    def total_bytes(self) -> int:
        """The most bytes that a rank's device holds, with activations as far as they are known."""
        return self.peak_bytes + self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        kept = 0 if self.sequences is None else self.sequences.kept_bytes
        return kept + (0 if self.activations is None else self.activations.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank's device holds, without activations."""
        return self.report.device_peak_bytes + (self.runtime_bytes if self.request.on_cuda else self.staging_bytes)

    @property
    def runtime_bytes(self) -> int:
        """Memory of a GPU that CUDA, cuBLAS, and NCCL take: an estimate."""
        groups = (self.request.world_size // self.request.replicas, self.request.replicas)
        return _CONTEXT_BYTES + _NCCL_BYTES * sum(size > 1 for size in groups) if self.request.on_cuda else 0

    def fits(self, memory_bytes: int | None) -> bool | None:
        """Returns whether that fits into the memory. None if no memory was given."""
        return None if memory_bytes is None else self.total_bytes <= memory_bytes

    def to_dict(self, memory_bytes: int | None = None) -> dict[str, Any]:
        names = (
            *("reshard_after_forward", "auto_wrap", "optimizer", "device", "expert_parallel"),
            *("expert_fsdp_size", "micro_batches", "before_last"),
        )
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "world_size": self.request.world_size,
            "policy": {**self.dtypes, **{name: getattr(self.request, name) for name in names}, "offload": self.offload},
            "memory_bytes": memory_bytes,
            "fits": self.fits(memory_bytes),
            "staging_bytes": self.staging_bytes,
            "runtime_bytes": self.runtime_bytes,
            "activations": None if self.activations is None else dataclasses.asdict(self.activations),
            "activation_bytes": self.activation_bytes,
            "total_bytes": self.total_bytes,
            "sequences": None if self.sequences is None else dataclasses.asdict(self.sequences),
            "report": self.report.to_dict(),
        }

    @property
    def offload(self) -> str | dict[str, str]:
        """The mode of all parameters, or those of the named ones."""
        offload = self.request.offload
        return offload if isinstance(offload, str) else {name: mode_of(one) for name, one in offload.items()}

    @property
    def headline(self) -> str:
        """The planned run in one line."""
        request, computed = self.request, self.dtypes["param_dtype"]
        computes = f", computed in {computed}" if computed else ""
        head = f"{self.model}: {self.num_parameters:,} parameters in {self.dtypes['dtype']}{computes}"
        head += f", {request.optimizer}, on {request.device}"
        if request.offload != "none":
            head += f", offload {self.offload if isinstance(self.offload, str) else f'{len(self.offload)} parameters'}"
        if request.expert_parallel > 1:
            head += f", experts over {request.expert_parallel} ranks"
        if request.micro_batches > 1:
            head += f", {request.micro_batches} micro-batches a step"
        return head

    def text(self, memory_bytes: int | None = None, *, explain: bool = False) -> str:
        """Returns the sum that decides whether the run fits, and with `explain` each unit and row."""
        lines = [self.headline]
        if self.dtype_is_the_models and self.request.optimizer != "none":
            lines += remark_on_dtype(str(self.dtypes["dtype"]), self.dtypes["param_dtype"])
        lines += ["", *columns(self.sums(memory_bytes), {0, 2})]
        if self.sequences is not None:
            lines.append(str(self.sequences))
        if explain:
            lines += ["", str(self.report), "", explanation(self.report)]
        return "\n".join(lines)

    def sums(self, memory_bytes: int | None) -> list[tuple[str, str, str]]:
        """Returns the rows of the summary: a label, bytes, and what they are."""
        report, on_cpu = self.report, not self.request.on_cuda
        state, peak = report.device_resting_bytes, report.device_peak_bytes
        parts = {"parameters": report.shard_bytes, "gradients": report.gradient_bytes}
        parts["optimizer"] = report.optimizer_bytes or 0
        shown = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
        rows: list[tuple[str, int | None, str]] = [
            ("model state", state, shown if not report.host_bytes else "after offload"),
            ("step buffers", peak - state, "gathered parameters, and gradients on their way"),
        ]
        if self.batch is not None:
            known = None if self.activations is None else self.activation_bytes
            rows.append(("activations", known, self._activations()))
        if self.runtime_bytes:
            rows.append(("CUDA and NCCL", self.runtime_bytes, "estimated: CUDA context, cuBLAS, and NCCL"))
        if self.staging_bytes and on_cpu:
            rows.append(("saves", self.staging_bytes, "copies for saves in the background"))
        in_cpu_memory = report.host_bytes + (0 if on_cpu else self.staging_bytes)
        rows.append(("total", self.total_bytes, self._verdict(memory_bytes)))
        if in_cpu_memory:
            rows.append(("in CPU memory", in_cpu_memory, "of each rank, not in the total"))
        rows.append(("sent in a step", report.traffic.total_bytes, "by each rank"))
        return [(name, "unknown" if size is None else readable(size), note) for name, size, note in rows]

    def _activations(self) -> str:
        batch, found = self.batch, self.activations
        assert batch is not None
        if found is None:
            return f"not estimated for {self.model}, and not in the total"
        how = " with activation checkpointing" if batch.activation_checkpointing else ""
        loss = "loss in tiles" if batch.tiled_loss else "logits and loss"
        return f"estimated: {found.tokens:,} tokens{how}; {loss} {readable(found.loss_bytes)}"

    def _verdict(self, memory_bytes: int | None) -> str:
        if memory_bytes is None:
            return "on each rank at the peak; --memory SIZE checks whether it fits"
        room = memory_bytes - self.total_bytes
        verdict = f"fits, {readable(room)} left" if room >= 0 else f"does not fit, {readable(-room)} too big"
        return f"of {readable(memory_bytes)} on each rank: {verdict}"


def make_plan(config: str, world_size: int | None = None, overrides: Sequence[str] = (), **given: Any) -> MemoryPlan:
    """Reads the config, builds the model on the meta device, and plans it.

    Args:
        config: config.json of a HuggingFace model or its folder, or a training YAML.
        world_size: number of all ranks. None: one for each GPU of this host, or one.
        overrides: settings that replace the YAML's. For a model, they are those of a run that trains it.
        given: arguments of `PlanRequest`; `dtype`, `param_dtype`, and `reduce_dtype` by name; `offload_budget`, a
            size for `cpu_offload_by_budget`; and fields of `MicroBatch`. They replace what the config says, if they are
            not None.

    Raises:
        ConfigError: the config cannot be read, or does not fit the request.
    """
    given = {name: value for name, value in given.items() if value is not None}
    world_size = world_size or torch.cuda.device_count() or 1
    given.setdefault("local_world_size", usual_node(world_size))
    told = {field.name: given.pop(field.name) for field in dataclasses.fields(MicroBatch) if field.name in given}
    path = Path(config).expanduser()
    stages_saves, sequences, batch = False, None, MicroBatch()
    is_model = not overrides and is_model_config(path)
    if is_model:
        model = _build(path, given.get("dtype"))
        asked = {"dtype": str(model.config.dtype).removeprefix("torch.")}
    else:
        file = _training_of(path, overrides)
        with file.located():
            training = parse_config(file.settings)
            if training.model.missing:
                raise ConfigError(f"{path} has no model. To plan it set {training.model.missing[0]}.")
            model, asked, sequences, batch = _asked_by(training, world_size, given)
        stages_saves = training.checkpoint.async_save and batch is not None
    if getattr(model.config, "quantization_config", None) is not None:  # type: ignore[union-attr]
        raise ConfigError(
            f"{config}: the model has a quantization_config, and plans do not count quantized weights. Remove it from "
            "a copy of config.json to plan the weights in --dtype."
        )
    if (budget := given.pop("offload_budget", None)) is not None:
        if "offload" in given:
            raise ConfigError("--offload-budget: it chooses what --offload offloads. Pass one of them.")
        bytes_of = parse_bytes(budget, "--offload-budget")
        given["offload"] = cpu_offload_by_budget(model, bytes_of, pin_memory=False)
    settings: dict[str, Any] = {**asked, **given}
    settings.setdefault(
        "transport", TransportKind.SHM if settings.get("device") == "cpu" else TransportKind.PROCESS_GROUP
    )
    settings.setdefault("device", "cpu" if settings["transport"] == TransportKind.SHM else "cuda")
    dtypes = {name: settings.pop(name, None) for name in ("dtype", "param_dtype", "reduce_dtype")}
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(dtypes["param_dtype"]), reduce_dtype=dtype_of(dtypes["reduce_dtype"])
    )
    with reworded(ConfigError, str, ValueError, NotImplementedError):
        request = PlanRequest(world_size, mp_policy=policy, **settings)
        report = planned_report(planned_facts(model, request), request)
    saved = report.shard_bytes - report.pad_bytes + (report.optimizer_bytes or 0) + report.unsharded_bytes
    numel = sum(param.numel() for param in model.parameters())
    staging, says_no_dtype = saved if stages_saves else 0, is_model and "dtype" not in given
    batch = None if batch is None or request.optimizer == "none" else dataclasses.replace(batch, **told)
    activations = None if batch is None else _activations(model, request, dtypes, batch)
    return MemoryPlan(
        type(model).__name__,
        numel,
        request,
        dtypes,
        report,
        sequences,
        staging,
        says_no_dtype,
        batch,
        activations,
        has_frozen=not all(param.requires_grad for param in model.parameters()),
    )


def _activations(
    model: nn.Module, request: PlanRequest, dtypes: Mapping[str, str | None], batch: MicroBatch
) -> Activations | None:
    itemsize = getattr(torch, dtypes["param_dtype"] or dtypes["dtype"] or "float32").itemsize
    tile = DEVICE_TILE if request.on_cuda else CPU_TILE
    return estimate_activations(
        model,
        batch.tokens,
        itemsize,
        recomputes=batch.activation_checkpointing,
        tile=tile if batch.tiled_loss else None,
    )


def _training_of(path: Path, overrides: Sequence[str]) -> ConfigFile:
    """Reads a training YAML, or takes the overrides for that of a run that trains the model of a config.json."""
    if not is_model_config(path):
        return ConfigFile.read(path, overrides)
    folder = path if path.is_dir() else path.parent
    if folder != path and path.name != "config.json":
        raise ConfigError(f"{overrides[0]}: key=value settings need a config.json or a training YAML, got {path.name}")
    if given := next((one for one in overrides if one.startswith("model.path=")), None):
        raise ConfigError(f"{given}: the model is that of {path}. Leave one of them out.")
    file = ConfigFile.read_any("", overrides)
    set_path(file.settings, ["model", "path"], str(folder), "")
    return file


def is_model_config(path: Path) -> bool:
    """Returns whether the path is a model's folder or config.json, not a training YAML."""
    return path.is_dir() or path.suffix == ".json"


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Returns the bytes of a size. `80GiB`, `80G` and `85899345920B` are the same; `80GB` is 80 * 10**9.

    `option`: its name in errors.

    Raises:
        ConfigError: it is not a number with such a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", text, flags=re.IGNORECASE)
    if found is None or not (found[2] or found[3]):
        example = f"{text.strip()}GiB" if found else "80GiB or 512MiB"
        raise ConfigError(f"{option}: expected a size with a unit, such as {example}, got {text!r}")
    number, unit, suffix = found[1], found[2].upper(), (found[3] or "").lower()
    factor = _DECIMAL_UNITS[unit] if suffix == "b" and unit else _UNITS[unit]
    return int(float(number) * factor)


def _build(path: Path, dtype: str | None) -> nn.Module:
    """Builds the model of a config.json without weights, in the requested dtype or the config's."""
    from fsdp2x.api import build_empty, read_hf_config, told_of

    with reworded(ConfigError, lambda error: f"config {error}", CheckpointError), told_of(path):
        config = read_hf_config(path)
        return build_empty(None, config, getattr(torch, dtype) if dtype else config.dtype or torch.float32)


# ---- conversion of a training YAML to a plan


def _asked_by(
    config: TrainConfig, world_size: int, given: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any], SequencePlan | None, MicroBatch | None]:
    """Returns what the settings of a run ask for.

    `given`: values that the caller has decided, such as the device, on which other settings depend.

    Returns:
        The model; arguments of `PlanRequest`, with `dtype` and dtypes of the policy by name; the exchanges of ranks
        that share sequences; and a rank's micro-batch if the run trains.

    Raises:
        ConfigError: a run would reject the settings, or their bytes cannot be predicted.
    """
    parallel, num_sequence_ranks = config.parallel, config.parallel.sequence_ranks.total
    local_world_size = given["local_world_size"]
    mesh = plan_mesh(parallel, world_size, local_world_size)
    trains = config.train.mode == "train"
    rows, length, num_micro_batches = _micro_batches(config, world_size // num_sequence_ranks)
    shares_memory = TransportKind.SHM in (given.get("transport"), parallel.transport)
    device = given.get("device") or ("cpu" if shares_memory or parallel.device == "cpu" else "cuda")
    config = with_defaults(config, device)
    in_few_bits = parallel.wire_weights is not None or parallel.wire_gradients is not None
    on_one_host = device == "cpu" and mesh.shard_size <= local_world_size
    asked = {
        "dtype": config.model.dtype,
        "param_dtype": _param_dtype(config, device),
        "reduce_dtype": parallel.reduce_dtype,
        "replicas": mesh.num_replicas,
        "reshard_after_forward": mesh.reshard_after_forward,
        "transport": (TransportKind.SHM if on_one_host and not in_few_bits else TransportKind.PROCESS_GROUP)
        if parallel.transport == "auto"
        else parallel.transport,
        "wire_weights": parallel.wire_weights,
        "wire_gradients": parallel.wire_gradients,
        "device": device,
        "offload": offload_mode(parallel.offload),
        "optimizer": config.optimizer.planned_name if trains else "none",
        "expert_parallel": parallel.expert_parallel,
        "expert_fsdp_size": parallel.expert_fsdp_size,
        "micro_batches": num_micro_batches if trains else 1,
        "before_last": parallel.accumulate,
    }
    dtype = getattr(torch, given.get("dtype") or config.model.dtype)
    tokenizer = None if config.model.path else make_tokenizer(choose_tokenizer(config.data.tokenizer, None))
    model = prepare(build_on_meta(config.model, dtype, tokenizer), config)
    asked["auto_wrap"] = unit_policy(model, parallel)
    computed = given.get("param_dtype") or asked["param_dtype"]
    itemsize = (getattr(torch, computed) if computed else dtype).itemsize
    sequences = _plan_sequences(model, config, rows, length, asked["micro_batches"], itemsize)
    if not trains:
        return model, asked, sequences, None
    tiles = resolve_tiled_loss(config.train.tiled_loss, model, torch.device(device))
    positions = -(-rows * length // num_sequence_ranks)
    return model, asked, sequences, MicroBatch(positions, config.train.activation_checkpointing, tiles)


def _plan_sequences(
    model: nn.Module, config: TrainConfig, rows: int, length: int, num_micro_batches: int, itemsize: int
) -> SequencePlan | None:
    """Counts full, padded rows. A run with short samples sends and keeps less."""
    ranks = config.parallel.sequence_ranks
    if ranks.total == 1:
        return None
    part = RankPart(Peers(size=ranks.total), ulysses=Peers(size=ranks.ulysses), context=Peers(size=ranks.context))
    positions = rows * (length + -length % part.multiple)
    with reworded(ConfigError, "parallel.sequence_parallel"):
        shape = find_decoder(model).config
        layer = ExchangedBytes.of(positions, head_counts(shape), head_dims(shape), ranks, itemsize)
    layers, trains = shape.num_hidden_layers, config.train.mode == "train"
    recomputes = trains and config.train.activation_checkpointing
    passes = (2 + recomputes) * num_micro_batches if trains else 1
    num_kept = layers if trains and not recomputes else 1
    return SequencePlan(*ranks, positions, layer.kept * num_kept, layer.sent * layers * passes)


def _param_dtype(config: TrainConfig, device: str) -> str | None:
    """Returns the compute dtype on a current GPU. float16, which older GPUs take, has as many bytes."""
    setting = config.parallel.param_dtype
    if setting not in (None, "auto"):
        return setting
    computes_in_half = device == "cuda" and (setting == "auto" or config.model.dtype == "float32")
    return "bfloat16" if computes_in_half else None


def _micro_batches(config: TrainConfig, num_readers: int) -> tuple[int, int, int]:
    """Returns rows and length of the longest micro-batch, and the micro-batches of a step.

    Packed samples take at most as many as the fullest rank needs.
    """
    batching, length = resolve_batching(config.train, num_readers), config.data.block_size
    if not config.data.packing:
        return batching.batch_size, length, batching.accumulation
    longest = config.data.max_tokens or length
    return 1, longest, -(-batching.batch_size * batching.accumulation // (longest // length))


# ---- explanations: rows and columns (`--explain`), float32 parameters


WORDS = {
    "shards": "this rank's rows of all parameters, in the dtype that the optimizer updates",
    "gradients": "the same for gradients, in the parameters' dtype, from a backward to the step",
    "optimizer": "the optimizer's state for this rank's rows, two moments for AdamW",
    "buffers, unsharded parameters": "what every rank holds in full: buffers and ignored parameters",
    "rows kept after forward": "with a number for reshard_after_forward: rows of a smaller world, until backward",
    "copies of shards on the device": "for units whose shards are in CPU memory, with offload gradients",
    "kept for wire formats": "this rank's encoded rows, and int8's rounding errors of the full model's gradients",
    "at rest": "the sum of the rows above: what is held between two steps",
    "gather slots": "full parameters of the units that are gathered at once, in the compute dtype",
    "slots and staging": "one pool over a process group: gather buffers, gathered data, and packed gradients",
    "scratch": "buffers in which ranks with shared memory exchange gradients",
    "waiting for the all-reduce": "gradients that are summed over the shards, not yet over the replicas (HSDP)",
    "gradients on their way to the host": "CPU buffers in which gradients are cast, with offload",
    "gradients of autograd": "full gradients that backward has made and that are not reduced yet",
    "of slots to autograd at once, beyond gradients": "peak of temporary buffers on a device, which share memory",
    "moments of a step": "moments that the optimizer brings to the device while it steps, with offload optimizer",
    "peak, without activations": "the most at any moment of a step; activations are not included",
    "of it in host memory": "the part in CPU memory, with offload",
    "of it on the device": "the rest",
    "sent in a step": "bytes that leave this rank: gathers of forward and backward, reductions of backward",
}
COLUMNS = {
    "elements": "numbers in the full unit",
    "shard": "bytes of this rank's rows",
    "pad": "bytes of padding in them, for rows that do not divide evenly",
    "slot": "bytes of the full unit while it is gathered",
    "scratch": "bytes that a reduction of the unit takes",
    "reshard": "whether it is freed after its forward, and gathered again in backward",
}


def remark_on_dtype(dtype: str, param_dtype: str | None) -> list[str]:
    """Returns a line if parameters are counted in the 16 bits of the model's config, which are those of its files.

    `fsdp2x train` keeps float32 parameters by default, and computes in fewer bits.
    """
    if dtype not in ("bfloat16", "float16"):
        return []
    options = f"--dtype float32 --param-dtype {param_dtype or dtype}"
    return [
        f"parameters are counted in {dtype}, as the config says; fsdp2x train keeps float32 ones by default: {options}"
    ]


def explanation(report: MemoryReport) -> str:
    """Explains the rows of this report, and the columns of its units."""
    names = [name for name, size, note in report.sizes() if size or note or name == "at rest"]
    rows = [(name, WORDS[name]) for name in names]
    heads = list(COLUMNS.items())
    return "\n".join(["columns of units", *columns(heads, {0, 1}), "", "rows", *columns(rows, {0, 1})])
