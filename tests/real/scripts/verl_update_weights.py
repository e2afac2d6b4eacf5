"""Weights that verl's FSDP engine sends to rollouts: from its generator, or to two rollouts by examples/integrations.

Changes for a CPU: verl_cpu.py. Rollouts are threads of rank 0, and neither Ray nor an inference engine runs. The order
of calls is that of verl's manager, as in tests/support/verl_engine.py. The script compares its base class with the real
one.
"""

import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

# First: it tells verl what it runs on.
import verl_cpu  # noqa: F401

# isort: split
import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.engine import EngineRegistry

import report

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "examples" / "integrations"), str(ROOT / "tests" / "support")]
import verl_engine  # noqa: E402


def digest(tensor):
    """As a number that JSON keeps."""
    text = tensor.detach().bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    return float(int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))


dist.init_process_group("gloo")
model = tiny.qwen3(num_hidden_layers=8)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
engine_class = EngineRegistry.get_engine_cls("language_model", "fsdp2")
actor = engine_class.__new__(engine_class)
actor.module, actor.model_config = model, SimpleNamespace(lora={}, hf_config=model.config)
actor._uses_fsdp2_cpu_offload_policy = actor._is_offload_param = actor._qat_enabled = False
is_example = sys.argv[2] == "example"
if is_example:
    import_external_libs("verl_checkpoint_engine")
    trainer = CheckpointEngineRegistry.new("fsdp2x", is_master=dist.get_rank() == 0, bucket_size=1 << 20)
    assert isinstance(trainer, CheckpointEngine)
    for backend in (verl_engine.CheckpointEngine, type(trainer)):
        verl_engine.same_methods(backend, CheckpointEngine)
values, seconds = [], []
for step in range(4):
    start = time.perf_counter()
    if is_example:
        engines = [CheckpointEngineRegistry.new("fsdp2x", bucket_size=1 << 20) for _ in range(2 - 2 * dist.get_rank())]
        rollouts = [verl_engine.Rollout(engine) for engine in engines]
        verl_engine.update_weights(trainer, actor, rollouts, step)
        sent = [{name: digest(tensor) for name, tensor in rollout.weights.items()} for rollout in rollouts]
    else:
        sent = [{name: digest(tensor) for name, tensor in actor.get_per_tensor_param()[0]}]
    seconds.append(time.perf_counter() - start)
    # Only rank 0 has rollouts, and both of them have the same weights.
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sent)
    assert all(one == everyone[0][0] for one in everyone[0]) and len(everyone[0][0]) > 90
    values += [value for _, value in sorted(everyone[0][0].items())]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.7)
report.ends[:] = [sum(seconds[:i]) for i in range(5)]
report.write(values, model)
dist.destroy_process_group()
