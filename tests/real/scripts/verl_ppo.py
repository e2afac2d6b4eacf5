"""PPO in verl's Ray workers: an actor and a critic of two workers each, a Qwen3 and one with a value for each token.

Started without torchrun: Ray starts the workers, in which verl_workers.py installs fsdp2x. For a CPU: verl_cpu.py, and
torch's attention in place of flash attention. Prompts and responses are drawn beforehand, in place of an engine for
inference; a response is worth the share of its even tokens.
"""

import os
import sys
from functools import partial

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))

import ray
import tiny
import torch
import verl_workers
from tensordict import TensorDict
from transformers import Qwen3Config, Qwen3ForTokenClassification
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

ROWS, PROMPT, RESPONSE, STEPS = 8, 4, 8, 4


def workers(kind: str, path: str) -> RayWorkerGroup:
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        use_torch_compile=False,
        ulysses_sequence_parallel_size=1,
    )
    model = HFModelConfig(
        path=path,
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
    )
    config = TrainingWorkerConfig(
        model_type=kind,
        model_config=model,
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=2 * STEPS),
        checkpoint_config=CheckpointConfig(),
    )
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, name_prefix=kind)
    wanted = RayClassWithInitArgs(ray.remote(verl_workers.CpuWorker), config=config)
    group = RayWorkerGroup(pool, wanted, use_gpu=False, device_name="cpu", name_prefix=kind)
    group.reset()
    return group


def batch(generator: torch.Generator) -> TensorDict:
    ids = torch.randint(3, len(tiny.TABLE), (ROWS, PROMPT + RESPONSE), generator=generator)
    tensors = {"input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:]}
    tensors |= {"attention_mask": torch.ones_like(ids), "response_mask": torch.ones_like(ids[:, PROMPT:])}
    tensors["position_ids"] = torch.arange(PROMPT + RESPONSE).expand(ROWS, -1).clone()
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=ROWS))
    tu.assign_non_tensor(data, temperature=1.0)
    return data


def inferred(group: RayWorkerGroup, data: TensorDict, name: str) -> torch.Tensor:
    asked = data.copy()
    tu.assign_non_tensor(asked, compute_loss=False)
    return no_padding_2_padding(tu.get(group.infer_batch(asked).get(), name), data).float()


def trained(group: RayWorkerGroup, data: TensorDict, wanted: tuple[str, ...]) -> list[float]:
    asked = data.copy()
    sizes = {"mini_batch_size": ROWS // 2, "global_batch_size": ROWS // 2}
    tu.assign_non_tensor(asked, **sizes, epochs=1, seed=0, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(group.train_mini_batch(asked).get(), "metrics")
    return [float(value) for name in wanted for value in torch.tensor(metrics[name]).flatten().tolist()]


def main() -> None:
    path = sys.argv[1]
    tiny.qwen3().save_pretrained(path + ".actor")
    torch.manual_seed(1)
    Qwen3ForTokenClassification(Qwen3Config(**tiny.SIZES, num_labels=1)).save_pretrained(path + ".critic")
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80 << 20)
    actor, critic = workers("language_model", path + ".actor"), workers("value_model", path + ".critic")
    sizes = {"strategy": "fsdp2", "ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 2}
    actor.set_loss_fn(partial(ppo_loss, FSDPActorConfig(rollout_n=1, **sizes)))
    critic.set_loss_fn(partial(value_loss, FSDPCriticConfig(**sizes)))
    generator, values = torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        data = batch(generator)
        mask = data["response_mask"]
        old, estimates = inferred(actor, data, "log_probs"), inferred(critic, data, "values")
        rewards = torch.zeros_like(estimates)
        rewards[:, -1] = (data["responses"] % 2 == 0).float().mean(-1)
        advantages, returns = compute_gae_advantage_return(rewards, estimates, mask, gamma=1.0, lam=0.95)
        found = {"old_log_probs": old, "advantages": advantages, "returns": returns, "values": estimates}
        data.update(found)
        values += [old.double().sum().item(), estimates.double().sum().item()]
        values += trained(actor, data, ("loss", "grad_norm")) + trained(critic, data, ("loss", "grad_norm"))
    values += actor.sums()[0] + critic.sums()[0]
    actor.write(path, values)
    actor.leave()
    critic.leave()
    ray.shutdown()


if __name__ == "__main__":
    main()
