"""Every public function and method: called with its defaults on several ranks, and with arguments of wrong kinds.

New names of `__all__` and of FSDPModule are found by themselves; what they need to be called is a line in NEEDS.
"""

import contextlib
import importlib
import inspect
import traceback
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
import models
from fsdp2x.base.arguments import _accepts
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.convert import hf_to_dcp
from fsdp2x.train import ConfigError
from fsdp2x.train.selftest import build
from harness import distributed
from training import settings, shared_folder, write_model

PACKAGES = (
    "", ".checkpoint", ".convert", ".export", ".memory", ".moe", ".optim", ".sequence", ".train", ".train.selftest",
)  # fmt: skip
# Results and exceptions of functions, and torch's own classes: users do not call them.
NOT_CALLED = {
    "CPUOffloadPolicy", "CheckpointError", "ConfigError", "TrainingError", "DataParallelMeshDims", "ExpertGroup",
    "FSDPModule", "GradientReductionHandle", "LoadReport", "Loaded", "MemoryReport", "MixedPrecisionPolicy",
    "OffloadPolicy", "PackedBatch", "Saved", "SequenceAttention", "SequenceLayout", "SequenceMesh", "SequenceShard",
    "TrainConfig", "SequenceParallel", "UnshardHandle", "Bucket",
}  # fmt: skip


def find_public():
    """Full name -> function or class; names that two packages export count once."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"fsdp2x{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and name not in NOT_CALLED and value not in found.values():
                found[f"fsdp2x{package}.{name}"] = value
    return found


def find_methods():
    return {
        f"FSDPModule.{name}": value
        for name, value in vars(fsdp2x.FSDPModule).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


PUBLIC, METHODS = find_public(), find_methods()
EVERYTHING = {**PUBLIC, **METHODS}


class World:
    """What calls need. Made anew for each of them."""

    def __init__(self, folder: Path, text: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.text, self.rank, self.world = folder, text, dist.get_rank(), dist.get_world_size()

    def plain(self):
        return models.Stack()

    def sharded(self):
        return fsdp2x.fully_shard(models.Stack(), auto_wrap=True)

    def hf(self, name="llama"):
        return fsdp2x.fully_shard(models.build(name))

    def trained(self):
        """A sharded model after a step, and its optimizer."""
        model = self.sharded()
        optimizer = fsdp2x.optim.AdamW(model.parameters())
        model(models.inputs(self.rank)).sum().backward()
        optimizer.step()
        return model, optimizer

    def adapter(self):
        model = fsdp2x.add_lora(models.build("llama"), {"rank": 2, "target_modules": ["q_proj"]})
        return fsdp2x.fully_shard(model)

    def asleep(self):
        model = self.sharded()
        fsdp2x.sleep(model)
        return model

    def saved(self):
        model, optimizer = self.trained()
        fsdp2x.checkpoint.save(self.folder / "saved", model, optimizer, step=1)
        return model, optimizer

    def written(self, write, name):
        """A folder that rank 0 has written."""
        if self.rank == 0:
            write(self.folder / name)
        dist.barrier()
        return self.folder / name

    def run(self):
        """The checkpoint of a training run."""
        path = self.folder / "run"
        config = settings(self.text, path, train={"steps": 1})
        fsdp2x.train.train(fsdp2x.train.parse_config(config))
        dist.barrier()
        return path

    def config(self):
        return settings(self.text, self.folder / "output", train={"steps": 1})

    def mesh(self):
        return init_device_mesh("cpu", (1, self.world), mesh_dim_names=("efsdp", "ep"))

    def own(self, name):
        """A folder of this rank's own, for what is not collective."""
        return self.folder / f"{name}-{self.rank}"


def _labels(world):
    return torch.ones(world.rank + 1, dtype=torch.int64)


def _logits(world):
    return torch.zeros(world.rank + 1, 4)


def _samples(world):
    return [{"input_ids": [1, 2, 3]}] * (3 if world.rank == 0 else 1)


def _params(world):
    return {"params": world.sharded().parameters()}


def _ranks_file(world):
    def write(path):
        (path / "1").mkdir(parents=True)
        from safetensors.torch import load_file

        torch.save(load_file(world.folder / "hf/model.safetensors"), path / "1/model_world_size_1_rank_0.pt")

    return world.written(write, "ranks")


# Name -> the arguments that it must be given.
NEEDS = {
    "fsdp2x.HostOffloadPolicy": lambda w: {},
    "fsdp2x.accumulate": lambda w: {"model": w.sharded(), "last": False},
    "fsdp2x.add_lora": lambda w: {"model": models.build("llama"), "settings": {"rank": 2}},
    "fsdp2x.apply_tiled_mlp": lambda w: {"model": models.build("llama")},
    "fsdp2x.check_module_states": lambda w: {"model": w.sharded()},
    "fsdp2x.clip_grad_norm_": lambda w: {"parameters": list(w.trained()[0].parameters()), "max_norm": 1.0},
    "fsdp2x.cpu_offload_by_budget": lambda w: {"module": w.plain(), "budget_bytes": 100},
    "fsdp2x.describe": lambda w: {"model": w.sharded()},
    "fsdp2x.freeze_module_prefix": lambda w: {"model": w.plain(), "prefixes": "head"},
    "fsdp2x.from_pretrained": lambda w: {"path_or_model_class": w.written(write_model, "hf")},
    "fsdp2x.full_tensors": lambda w: {"model": w.sharded()},
    "fsdp2x.fully_shard": lambda w: {"module": w.plain()},
    "fsdp2x.install": lambda w: {"auto_wrap": False},
    "fsdp2x.load_adapter": lambda w: {"model": (m := w.adapter()), "folder": fsdp2x.save_adapter(m, w.folder / "a")},
    "fsdp2x.load_hf": lambda w: {"model": (m := w.hf()), "path": fsdp2x.save_hf(m, w.folder / "hf")},
    "fsdp2x.local_optimizer": lambda w: {"optimizer": torch.optim.Adam(w.sharded().parameters())},
    "fsdp2x.memory_report": lambda w: {"model": w.sharded()},
    "fsdp2x.offload_activations": lambda w: {"model": w.sharded()},
    "fsdp2x.profile": lambda w: {"folder": w.folder / "profile"},
    "fsdp2x.rebind_optimizer": lambda w: dict(zip(("optimizer", "model"), _before_sharding(w), strict=True)),
    "fsdp2x.register_fsdp_forward_method": lambda w: {"module": w.sharded(), "method_name": "forward"},
    "fsdp2x.save_adapter": lambda w: {"model": w.adapter(), "folder": w.folder / "adapter"},
    "fsdp2x.save_hf": lambda w: {"model": w.hf(), "path": w.folder / "hf"},
    "fsdp2x.shard_vision_language": lambda w: {"model": models.tiny_vlm()},
    "fsdp2x.share_comm_ctx": lambda w: {"modules": [w.sharded(), w.sharded()]},
    "fsdp2x.sync_module_states": lambda w: {"model": w.sharded()},
    "fsdp2x.sleep": lambda w: {"model": w.sharded()},
    "fsdp2x.uninstall": lambda w: {},
    "fsdp2x.unsharded": lambda w: {"model": w.sharded()},
    "fsdp2x.wake": lambda w: {"model": w.asleep()},
    "fsdp2x.checkpoint.load": lambda w: {"path": w.folder / "saved", "model": w.saved()[0]},
    "fsdp2x.checkpoint.mark": lambda w: {"checkpoint": (w.saved(), w.folder / "saved/step-000001")[1]},
    "fsdp2x.checkpoint.read_parts": lambda w: {"folder": (w.saved(), w.folder / "saved/step-000001")[1]},
    "fsdp2x.checkpoint.resolve": lambda w: {"path": (w.saved(), w.folder / "saved")[1]},
    "fsdp2x.checkpoint.save": lambda w: {"path": w.folder / "saved", "model": w.sharded(), "step": 1},
    "fsdp2x.checkpoint.wait": lambda w: {"model": w.sharded()},
    "fsdp2x.convert.convert_checkpoint": lambda w: {"input_dir": (w.saved(), w.folder / "saved")[1],
                                                    "output_dir": w.own("out"), "form": "full"},
    "fsdp2x.convert.dcp_to_hf": lambda w: dict(zip(("input_dir", "output_dir", "origin_hf_dir"),
                                                   (_hf_dcp(w), w.own("out"), w.folder / "hf"), strict=True)),
    "fsdp2x.convert.export_checkpoint": lambda w: {"checkpoint": w.run(), "out": w.own("out")},
    "fsdp2x.convert.hf_to_dcp": lambda w: {"hf_dir": w.written(write_model, "hf"), "output_dir": w.own("out")},
    "fsdp2x.convert.ranks_to_hf": lambda w: {"hf_dir": w.written(write_model, "hf"), "ckpt_dir": _ranks_file(w),
                                             "save_dir": w.own("out"), "iteration": 1},
    "fsdp2x.export.stream": lambda w: {"model": w.sharded()},
    "fsdp2x.memory.PlanRequest": lambda w: {"world_size": 4},
    "fsdp2x.memory.plan_memory": lambda w: {"model": w.plain(), "world_size": 4},
    "fsdp2x.moe.apply_expert_patch": lambda w: {"model": models.build("qwen3_moe")},
    "fsdp2x.moe.expert_parallel": lambda w: {"model": models.build("qwen3_moe"), "mesh": w.mesh()},
    "fsdp2x.moe.find_experts": lambda w: {"model": models.build("qwen3_moe")},
    "fsdp2x.moe.shard_experts": lambda w: {"model": models.build("qwen3_moe")},
    "fsdp2x.moe.use_grouped_gemm": lambda w: {"model": models.build("qwen3_moe")},
    "fsdp2x.optim.AdamW": _params,
    "fsdp2x.optim.EMA": lambda w: {"optimizer": w.trained()[1]},
    "fsdp2x.optim.Muon": lambda w: {"params": [p for p in w.sharded().parameters() if p.ndim == 2]},
    "fsdp2x.optim.muon_param_groups": lambda w: {"model": w.hf()},
    "fsdp2x.train.selftest.run_suite": lambda w: {"device": torch.device("cpu"), "num_steps": 2},
    "fsdp2x.train.selftest.shard_layers": lambda w: {"model": _layers()},
    "fsdp2x.sequence.apply_context_parallel": lambda w: {"model": _two_heads(), "group": dist.group.WORLD},
    "fsdp2x.sequence.apply_ulysses": lambda w: {"model": _two_heads(), "group": dist.group.WORLD},
    "fsdp2x.sequence.count_label_tokens": lambda w: {"next_labels": _labels(w)},
    "fsdp2x.sequence.init_sequence_mesh": lambda w: {"sequence_size": w.world},
    "fsdp2x.sequence.mean_over_ranks": lambda w: {"value": torch.tensor(float(w.rank))},
    "fsdp2x.sequence.micro_batches": lambda w: {"samples": _samples(w), "max_tokens": 4},
    "fsdp2x.sequence.pack_by_budget": lambda w: {"lengths": [3] * (3 if w.rank == 0 else 1), "max_tokens": 4},
    "fsdp2x.sequence.pack_samples": lambda w: {"samples": _samples(w)},
    "fsdp2x.sequence.token_log_probs": lambda w: {"logits": _logits(w), "next_labels": _labels(w)},
    "fsdp2x.sequence.token_mean_loss": lambda w: {"logits": _logits(w), "next_labels": _labels(w), "num_tokens": 3.0},
    "fsdp2x.sequence.use_varlen_attention": lambda w: {"model": models.build("llama")},
    "fsdp2x.train.Trainer": lambda w: {"config": fsdp2x.train.parse_config(w.config())},
    "fsdp2x.train.load_config": lambda w: {"path": w.written(_write_config(w), "config.yaml")},
    "fsdp2x.train.parse_config": lambda w: {"settings": w.config()},
    "fsdp2x.train.train": lambda w: {"config": fsdp2x.train.parse_config(w.config())},
    "FSDPModule.set_all_reduce_hook": lambda w: {"hook": lambda rows: None},
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": lambda w: {"enable": True},
    "FSDPModule.set_copy_engine_all_gather": lambda w: {"enable": True},
    "FSDPModule.set_custom_all_gather": lambda w: {"comm": None},
    "FSDPModule.set_custom_reduce_scatter": lambda w: {"comm": None},
    "FSDPModule.set_force_sum_reduction_for_comms": lambda w: {"enable": True},
    "FSDPModule.set_gradient_divide_factor": lambda w: {"factor": 2.0},
    "FSDPModule.set_is_last_backward": lambda w: {"is_last_backward": True},
    "FSDPModule.set_keep_unsharded_storage": lambda w: {"keep": True},
    "FSDPModule.set_manual_backward_finalization": lambda w: {"enabled": True},
    "FSDPModule.set_modules_to_backward_prefetch": lambda w: {"modules": []},
    "FSDPModule.set_modules_to_forward_prefetch": lambda w: {"modules": []},
    "FSDPModule.set_post_optim_event": lambda w: {"event": _Event()},
    "FSDPModule.set_reduce_scatter_divide_factor": lambda w: {"factor": 2.0},
    "FSDPModule.set_reduce_scatter_max_input_buffers": lambda w: {"max_input_buffers": 2},
    "FSDPModule.set_reduce_scatter_unused_params": lambda w: {"reduce_scatter_unused_params": True},
    "FSDPModule.set_requires_all_reduce": lambda w: {"requires_all_reduce": True},
    "FSDPModule.set_requires_gradient_sync": lambda w: {"requires_gradient_sync": True},
    "FSDPModule.set_reshard_after_backward": lambda w: {"reshard_after_backward": True},
    "FSDPModule.set_reshard_after_forward": lambda w: {"reshard_after_forward": True},
    "FSDPModule.set_wire_dtype": lambda w: {"weights": None, "gradients": None, "recurse": False},
    "FSDPModule.set_unshard_in_backward": lambda w: {"unshard_in_backward": True},
}  # fmt: skip
# Calls that cannot be done here say so.
REFUSED = {
    "FSDPModule.set_copy_engine_all_gather": (NotImplementedError, "symmetric memory needs CUDA devices"),
    "FSDPModule.set_symm_mem_for_comm": (NotImplementedError, "symmetric memory needs CUDA devices"),
}


class _Event:
    def wait(self, stream=None):
        pass


def _before_sharding(world):
    model = world.plain()
    optimizer = torch.optim.Adam(model.parameters())
    return optimizer, fsdp2x.fully_shard(model)


def _hf_dcp(world):
    world.written(write_model, "hf")
    return world.written(lambda path: hf_to_dcp(world.folder / "hf", path), "dcp")


def _layers():
    return build(torch.device("cpu"))


def _two_heads():
    return models.build("llama", num_key_value_heads=2)


def _write_config(world):
    import yaml

    return lambda path: path.write_text(yaml.safe_dump(world.config()))


def required(function):
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name != "self"]


def test_everything_public_can_be_called():
    for name, function in EVERYTHING.items():
        if required(function) or name in NEEDS:
            assert name in NEEDS, f"{name}: say in NEEDS what it is called with"


def call(name, world, arguments):
    """Calls it, and uses what it returns as one does."""
    function = EVERYTHING[name]
    if name.startswith("FSDPModule."):
        arguments = {"self": arguments.get("self") or world.sharded(), **arguments}
    made = function(**arguments)
    if isinstance(made, contextlib.AbstractContextManager):
        with made:
            pass
    elif inspect.isgenerator(made):
        list(made)
    elif isinstance(made, torch.optim.Optimizer):
        for group in made.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        made.step()
    for end in ("close", "remove", "wait"):
        if hasattr(made, end) and not isinstance(made, torch.nn.Module | list):
            getattr(made, end)()
    return made


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("name", EVERYTHING)
def test_with_its_defaults(ctx, name):
    """On two ranks that have different amounts of everything: done, or one sentence; never a wait for each other."""
    with shared_folder(ctx) as folder:
        world = World(folder, folder / "text")
        arguments = NEEDS.get(name, lambda w: {})(world)
        try:
            if name in REFUSED:
                kind, said = REFUSED[name]
                with pytest.raises(kind, match=said):
                    call(name, world, arguments)
            else:
                call(name, world, arguments)
        finally:
            fsdp2x.uninstall()
        dist.barrier()


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=240)
@pytest.mark.parametrize("ambient", [torch.device("meta"), torch.float64])
def test_ambient_device_and_dtype(ctx, ambient):
    """Also for calls inside a block that makes a model without memory, or computes in double precision."""
    faults = []
    for name in sorted(EVERYTHING.keys() - REFUSED.keys()):
        with shared_folder(ctx) as folder:
            world = World(folder, folder / "text")
            arguments = NEEDS.get(name, lambda w: {})(world)
            arguments |= {"self": world.sharded()} if name in METHODS else {}
            try:
                with ambient if isinstance(ambient, torch.device) else default_dtype(ambient):
                    call(name, world, arguments)
            except Exception as error:
                faults.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            fsdp2x.uninstall()
            dist.barrier()
    assert not faults, "\n".join(faults)


# ---- wrong kinds


class Nothing:
    """A value of a type that no function accepts."""

    def __repr__(self):
        return "Nothing()"


WRONG = (Nothing(), "word", 3, 3.5, True, None, [Nothing()], torch.tensor([1.0, 2.0]))
# parse_config's argument is a file's content: errors name its keys, and None is an empty file.
OTHER_WORDS = {"fsdp2x.train.parse_config": ("config", "model")}
DOCUMENTED = (TypeError, ValueError, CheckpointError, ConfigError, NotImplementedError)


def cases():
    for name, function in EVERYTHING.items():
        target = function.__init__ if inspect.isclass(function) else function
        hints = typing.get_type_hints(inspect.unwrap(target))
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in ("self", "return") or parameter.kind is parameter.VAR_KEYWORD:
                continue
            if parameter.name in hints:
                yield name, parameter, hints[parameter.name]


def refusal(name, parameter, value, arguments, world):
    """Passes a wrong value and returns what is wrong with the error, or None if the error is good."""
    shown = f"{name}({parameter.name}={value!r:.60})"
    try:
        call(name, world, {**arguments, parameter.name: value})
    except Exception as error:
        said, where = str(error), traceback.extract_tb(error.__traceback__)[-1].filename
        if not isinstance(error, DOCUMENTED):
            return f"{shown}: {type(error).__name__}: {said[:200]}"
        words = (parameter.name, *OTHER_WORDS.get(name, ()))
        if not any(word in said for word in words) or "\n" in said.strip():
            return f"{shown}: does not name it in one sentence: {said[:200]}"
        if "/fsdp2x/" not in where:
            return f"{shown}: raised in {where}: {said[:200]}"
        return None
    return f"{shown}: was taken"


@distributed(world_sizes=(1,), timeout=120)
def test_arguments_of_wrong_kinds(ctx):
    """Each parameter of each function, given what its annotation excludes."""
    wrong, num_cases = [], 0
    with shared_folder(ctx) as folder:
        world = World(folder, folder / "text")
        needs = {}
        for name, parameter, hint in cases():
            if name in REFUSED and name.startswith("FSDPModule."):
                continue
            if name not in needs:
                needs[name] = NEEDS.get(name, lambda w: {})(World(folder / name, folder / "text"))
            accepts = _accepts(hint)
            for value in WRONG:
                if accepts(value) or (value is parameter.default):
                    continue
                num_cases += 1
                if problem := refusal(name, parameter, value, needs[name], world):
                    wrong.append(problem)
    assert not wrong, f"{len(wrong)} of {num_cases}\n" + "\n".join(wrong)
