"""Runs the loop of `fsdp2x grpo`: sample responses, reward them, compare log-probabilities, update the policy, push."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2x import checkpoint, rl, sync
from fsdp2x.base.failures import exchange, run_on_all_ranks
from fsdp2x.io.export.stream import full_tensors
from fsdp2x.io.hf.load import from_pretrained
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.models.sequence.attention import use_varlen_attention
from fsdp2x.rl.rollout.client import ColocatedRollout, RolloutClient, RolloutError
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version
from fsdp2x.rl.rollout.server import stop_ids_of
from fsdp2x.train.config import ConfigError, ModelConfig, as_config_error
from fsdp2x.train.distributed import sums_over_ranks
from fsdp2x.train.grpo.config import GrpoConfig
from fsdp2x.train.grpo.engines import start_engine, trainer_asleep
from fsdp2x.train.grpo.http_engines import ADAPTER
from fsdp2x.train.grpo.prompts import Prompt, Prompts, PromptStream, read_prompts
from fsdp2x.train.grpo.rewards import make_rewards, total_reward
from fsdp2x.train.grpo.update import Batch, Critic, Update
from fsdp2x.train.model import build_model, find_folder, sharding
from fsdp2x.train.run_folder import CRITIC
from fsdp2x.train.tokenizer import Tokenizer
from fsdp2x.train.trainer import Trainer, run_to_end

logger = logging.getLogger(__name__)

PHASES = ("generate", "score", "train", "push")
SAMPLES = "samples.jsonl"


@dataclass
class Group:
    """The responses to one prompt, with their rewards."""

    prompt_id: int
    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)  # values of each reward function

    @property
    def varies(self) -> bool:
        return max(self.rewards) > min(self.rewards)


class GrpoTrainer(Trainer):
    """Trains a policy from rewards by a `GrpoConfig`. `run()` trains, `close()` ends what was begun.

    The checkpoint of a step holds what a resumed run needs to draw the same next prompts. Collective, as `Trainer` is.
    """

    config: GrpoConfig
    blocks: Prompts
    stream: PromptStream
    _stream_class = PromptStream
    _data_are = "prompts"

    # ---- parts of the run

    def _read_data(self, tokenizer: Tokenizer) -> Prompts:
        prompts = read_prompts(self.config.data, tokenizer, self.config.train.seed)
        self.rewards = make_rewards(self.config.reward, self.config.data.answer_column)
        return prompts

    def _make_feed(self) -> None:
        """Makes the engine, the reference model and the push session. There are no batches of text."""
        config, world = self.config, self.world
        with as_config_error("model"):
            use_varlen_attention(self.model)
        longest = self.blocks.longest + config.rollout.max_tokens
        self._check_lengths(longest)
        self.critic = self._make_critic()
        self.update = Update(
            config,
            self.model,
            self._make_reference(),
            self.critic,
            device=world.device,
            num_steps=self.num_steps,
            budget=config.data.max_tokens or max(longest, 2048),
        )
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.numbers: dict[str, float] = {}
        self._asked: list[tuple[int, Prompt]] | None = None  # prompts whose responses are awaited
        self._collected: list[Completion] | None = None  # these responses, if an evaluation came first
        self._pushed_step: int | None = None
        self._trained = [(self.model, self.optimizer)]
        if self.critic is not None:
            self._trained.append((self.critic.model, self.critic.optimizer))
        dtype = self.param_dtype or getattr(torch, config.model.dtype)
        self.engine = start_engine(
            config.rollout,
            world,
            self.output,
            lambda: build_model(config.model, self.tokenizer, config.train.seed),
            self._write_engine_folder,
            (config.model.path or str(self.output)) if config.pushes_adapter else None,
            dtype,
            self._closing,
        )
        options: dict[str, Any] = {"names": "hf" if config.rollout.engine in ("vllm", "sglang") else "model"}
        if config.pushes_adapter:
            options = {"weights": "adapter", "adapter_name": ADAPTER}
        elif config.lora.rank:
            options = {"merge_adapters": True}
        self.sync = sync.connect(
            self.model,
            self.engine.target,
            bucket_bytes=config.rollout.bucket_mib << 20,
            transport=config.parallel.transport,
            timeout_s=config.rollout.timeout_s,
            **options,
        )
        self._closing.callback(self.sync.close)
        stop = config.rollout.stop_ids
        if stop is None:
            ends = self.tokenizer.eos_id
            stop = stop_ids_of(self.model) or ([] if ends is None else [ends])
        self.stop_ids = tuple(stop)

    def _check_lengths(self, longest: int) -> None:
        """Raises `ConfigError`, on all ranks alike, if a prompt and its response do not fit."""
        parts = f"the longest prompt and rollout.max_tokens={self.config.rollout.max_tokens} are {longest} tokens"
        budget = self.config.data.max_tokens
        if budget is not None and longest > budget:
            raise ConfigError(f"data.max_tokens: got {budget}, but {parts}; see data.max_prompt_tokens")
        model: Any = self.model
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise ConfigError(f"rollout.max_tokens: the model has {positions} positions, but {parts}")

    def _write_engine_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.assets_config.save_pretrained(str(folder))

    def _make_reference(self) -> rl.Reference | None:
        """Makes the frozen model of the KL. None: no KL, or the policy without its adapters is the reference."""
        config = self.config
        if not config.algorithm.kl_weight or config.lora.rank:
            return None
        dtype = getattr(torch, config.reference.dtype)
        wanted = config.model
        if config.reference.path is not None:
            wanted = type(wanted)(path=config.reference.path, dtype=config.reference.dtype, load=wanted.load)
        if wanted.path is not None:  # each rank reads its rows
            options = sharding(config.parallel, self.plan, self.world.device, dtype)
            frozen = from_pretrained(find_folder(wanted), dtype=dtype, auto_wrap=config.parallel.auto_wrap, **options)
            use_varlen_attention(frozen)
        else:
            frozen = self._shard_beside(self._build_on_all_ranks(wanted).to(dtype), dtype, "reference")
        return rl.Reference(frozen, offload=config.reference.offload)

    def _make_critic(self) -> Critic | None:
        """Makes PPO's value model from the policy's weights before training."""
        config = self.config
        if config.algorithm.name != "ppo":
            return None
        model = rl.ValueModel(self._build_on_all_ranks(config.model))
        model = self._shard_beside(model, self.param_dtype, "algorithm.name")
        return Critic(model, config.algorithm.critic_lr, config.train.clip)

    def _build_on_all_ranks(self, wanted: ModelConfig) -> torch.nn.Module:
        """Builds the full model on the CPU. If one rank cannot read it, all raise."""
        return run_on_all_ranks(
            lambda: build_model(wanted, self.tokenizer, self.config.train.seed), raising=ConfigError
        )

    def _shard_beside(self, model: torch.nn.Module, dtype: torch.dtype | None, setting: str) -> torch.nn.Module:
        """Shards a model over the policy's mesh, to compute packed rows in `dtype`."""
        model = model.to(self.world.device)
        use_varlen_attention(model)
        with as_config_error(setting):
            fully_shard(
                model,
                auto_wrap=self.config.parallel.auto_wrap,
                **sharding(self.config.parallel, self.plan, self.world.device, dtype),
            )
        return model

    @property
    def tokens_per_step(self) -> int:
        """The most tokens that are drawn in a step."""
        return self.blocks_per_step * self.config.rollout.group_size * self.config.rollout.max_tokens

    def _size_of_step(self) -> tuple[int, str]:
        return self.blocks_per_step, "prompts"

    def _progress(self) -> dict[str, float]:
        return {"prompts": self.stream.settled, **self.numbers}

    # ---- sampling

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def _push(self) -> None:
        """Gives the engine the current weights, unless it has them."""
        if self._pushed_step != self.step:
            with self._phase("push"):
                self.sync.push(version=self.step)
                if self._pushed_step is None and isinstance(self.engine, RolloutClient) and not self.config.lora.rank:
                    self.engine.check_weights(full_tensors(self.model))
            self._pushed_step = self.step

    def _sampling(self, request: int, num_samples: int, temperature: float) -> Sampling:
        """Returns sampling settings. Requests are numbered within the run, so no two ranks or rounds draw alike."""
        rollout = self.config.rollout
        seed = (self.config.train.seed * 1_000_003 + request) * self.world.size + self.world.rank
        return Sampling(
            max_tokens=rollout.max_tokens,
            num_samples=num_samples,
            temperature=temperature,
            stop_ids=self.stop_ids,
            seed=seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    def _ask(self, step: int, round_: int) -> None:
        """Requests the responses of a step. A round is one of its requests."""
        rows = self.stream.next_prompts()
        rollout = self.config.rollout
        sampling = self._sampling(step * 64 + round_, rollout.group_size, rollout.temperature)
        self.engine.ask([prompt.tokens for _, prompt in rows], sampling)
        self._asked = rows

    def _collect(self) -> list[Completion]:
        with self._phase("generate"), trainer_asleep(self.engine, self._trained):
            if not isinstance(self.engine, ColocatedRollout):
                return self.engine.collect()
            # Not collective, so a failure of one rank must not leave the others waiting.
            return run_on_all_ranks(self.engine.collect, what="sampling", raising=RolloutError)

    def _next_groups(self) -> list[Group]:
        """Returns this rank's groups of the next step. Further rounds replace groups of equal rewards."""
        config, step = self.config, self.step + 1
        rounds = 1 + config.algorithm.dynamic_sampling
        groups: list[Group] = []
        same = total = 0
        for round_ in range(rounds):
            if self._asked is None:
                self._push()
                self._ask(step, round_)
            assert self._asked is not None
            rows, self._asked = self._asked, None
            completions, self._collected = self._collected, None
            found = self._judge(rows, self._collect() if completions is None else completions)
            total, same = total + len(found), same + sum(not group.varies for group in found)
            groups += [group for group in found if group.varies] if config.algorithm.dynamic_sampling else found
            counts = exchange(len(groups))
            if sum(counts) >= self.blocks_per_step:
                break
        self.stream.settle()
        if config.algorithm.dynamic_sampling:
            groups = groups[: _shares(counts, self.blocks_per_step)[self.world.rank]]
            if not sum(counts):
                logger.warning("step %d: all groups have equal rewards after %d rounds", step, rounds)
        self._note_groups(groups, total, same)
        return groups

    def _judge(self, rows: Sequence[tuple[int, Prompt]], completions: list[Completion]) -> list[Group]:
        """Returns groups with rewards. If a reward function fails on one rank, all raise."""
        groups = [Group(prompt_id, prompt) for prompt_id, prompt in rows]
        for completion in completions:
            group = groups[completion.prompt]
            group.completions.append(completion)
            kept = completion.tokens[:-1] if completion.tokens[-1] in self.stop_ids else completion.tokens
            group.texts.append(self.tokenizer.decode(kept))
        texts = [text for group in groups for text in group.texts]
        prompts = [group.prompt.shown for group in groups for _ in group.texts]
        columns = {
            name: [group.prompt.columns.get(name) for group in groups for _ in group.texts]
            for name in sorted({name for group in groups for name in group.prompt.columns} - {"prompts", "completions"})
        }
        sums, parts = run_on_all_ranks(
            lambda: total_reward(self.rewards, self.config.reward, prompts, texts, columns), raising=ConfigError
        )
        place = 0
        for group in groups:
            own = slice(place, place := place + len(group.texts))
            group.rewards, group.parts = sums[own], {name: values[own] for name, values in parts.items()}
        return groups

    def _note_groups(self, groups: list[Group], total: int, same: int) -> None:
        """Records numbers about the responses over all ranks, and a few samples of rank 0."""
        rewards = [reward for group in groups for reward in group.rewards]
        drawn = [completion for group in groups for completion in group.completions]
        cut = sum(completion.tokens[-1] not in self.stop_ids for completion in drawn)
        ages = [self.step - _number(version) for c in drawn for version in c.versions]
        names = [reward.name for reward in self.rewards]
        parts = [sum(value for group in groups for value in group.parts[name]) for name in names]
        squares = sum(reward * reward for reward in rewards)
        mine = [len(rewards), sum(rewards), squares, cut, total, same, sum(ages), len(ages), *parts]
        sums = sums_over_ranks([float(value) for value in mine], self.world.device)
        count, tokens = max(sums[0], 1.0), max(sums[7], 1.0)
        mean = sums[1] / count
        self.numbers = {
            "reward": mean,
            "reward_std": math.sqrt(max(sums[2] / count - mean * mean, 0.0)),
            "response_tokens": sums[7] / count,
            "truncated": sums[3] / count,
            "equal_groups": sums[5] / max(sums[4], 1.0),
            "staleness": sums[6] / tokens,
            "staleness_max": float(max(exchange(max(ages, default=0)))),
        }
        self.numbers |= {f"reward_{name}": part / count for name, part in zip(names, sums[8:], strict=True)}
        rollout, logs = self.config.rollout, (self.step + 1) % self.config.logging.every == 0
        if self.world.is_main and logs and rollout.log_samples:
            with open(self.output / SAMPLES, "a", encoding="utf-8") as file:
                shown = [(g, i) for g in groups for i in range(len(g.texts))][: rollout.log_samples]
                for group, i in shown:
                    line = {"step": self.step + 1, "prompt": group.prompt.shown, "completion": group.texts[i],
                            "reward": group.rewards[i]}  # fmt: skip
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # ---- a step

    def train_step(self) -> tuple[float, float | None, float]:
        """Draws the responses of a step and updates the policy with them.

        Returns:
            The loss (mean over optimizer steps, over all ranks), the gradient's norm before clipping, the rate.

        Raises:
            TrainingError: on every rank if the loss is not a number, or trainer and engine differ by more than
                `rollout.tolerance`.
        """
        config, optimizer, schedule = self.config, self.optimizer, self.schedule
        assert optimizer is not None and schedule is not None
        self.seconds = dict.fromkeys(PHASES, 0.0)
        groups = self._next_groups()
        samples = [(group, i) for group in groups for i in range(len(group.completions))]
        if config.rollout.ahead and self.step + 1 < self.num_steps:
            self._ask(self.step + 2, 0)  # with the weights before this step's update
        batch = Batch(
            packed=[_as_sample(group, i) for group, i in samples],
            rewards=torch.tensor([group.rewards[i] for group, i in samples], dtype=torch.float32),
            group_ids=[group.prompt_id for group, _ in samples],
            behaviour=[group.completions[i].log_probs for group, i in samples],
            versions=[[float(_number(v)) for v in group.completions[i].versions] for group, i in samples],
        )
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def step_optimizer() -> float | None:
            norm = self._update(optimizer, parameters)
            optimizer.zero_grad(set_to_none=True)
            return norm

        with self._phase("score"):
            self.update.score(batch, self.step)
        lr = schedule.advance()
        with self._phase("train"):
            found = self.update.run(batch, self.step, step_optimizer)
        self.step += 1
        if config.rollout.ahead:
            self._push()
        norm, loss = found.pop("grad_norm", None), found.pop("loss", 0.0)
        self.numbers |= found
        self.num_tokens = int(
            sums_over_ranks([float(sum(len(s["input_ids"]) for s in batch.packed))], self.world.device)[0]
        )
        self.numbers |= {f"seconds_{name}": round(value, 3) for name, value in self.seconds.items()}
        return self._end_step(loss), norm, lr

    # ---- checkpoints

    def save(self) -> Path:
        """Saves like `Trainer.save`. A critic gets a folder among the policy's checkpoints."""
        if self.critic is not None:  # first, so that a checkpoint of the policy always has its critic
            checkpoint.save(
                self.checkpoints / CRITIC,
                self.critic.model,
                self.critic.optimizer,
                step=self.step,
                form=self.config.checkpoint.form,
                keep=self.config.checkpoint.keep + 1,
                overwrite=True,
            )
        return super().save()

    def _resume(self, resume_from: str) -> Path:
        path = super()._resume(resume_from)
        if self.critic is not None:
            folder = path.parent / CRITIC / path.name
            checkpoint.load(folder, self.critic.model, self.critic.optimizer)
        return path

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns mean reward and pass@k over the held-out prompts, the same on every rank. Collective.

        pass@k is the unbiased estimate of arXiv 2107.03374: 1 - C(n - c, k) / C(n, k) for c correct responses of n.
        """
        prompts = self.blocks.held_out[: self.config.train.eval_blocks]
        rank, size, samples = self.world.rank, self.world.size, self.config.evaluation.samples
        rows = [(-1 - index, prompt) for index, prompt in enumerate(prompts)][rank::size]
        if self._asked is not None and self._collected is None:
            self._collected = self._collect()  # one request at a time
        self._push()
        self.engine.ask(
            [prompt.tokens for _, prompt in rows],
            self._sampling((1 << 40) + self.step, samples, self.config.rollout.eval_temperature),
        )
        groups = self._judge(rows, self._collect())
        correct = [sum(reward >= self.config.reward.correct for reward in group.rewards) for group in groups]
        sums = sums_over_ranks(
            [
                float(len(groups)),
                sum(sum(group.rewards) / len(group.rewards) for group in groups),
                sum(pass_at_k(samples, right, 1) for right in correct),
                sum(pass_at_k(samples, right, samples) for right in correct),
            ],
            self.world.device,
        )
        count = max(sums[0], 1.0)
        found = {"reward": sums[1] / count, "pass@1": sums[2] / count}
        return found | ({f"pass@{samples}": sums[3] / count} if samples > 1 else {})

    def _report_evaluation(self) -> float:
        with self.world.lost_ranks.named(f"evaluation after step {self.step}"):
            found = self.evaluate()
        self.metrics.write("eval", self.step, **found)
        self.metrics.say(
            "step %d  held-out %s", self.step, "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        return found["reward"]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the probability that one of `k` of `n` responses is correct if `correct` are (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _number(version: Version) -> int:
    """Returns the engine's version of the weights as the step that pushed them."""
    assert isinstance(version, int), f"pushed by this run, which numbers its versions: {version!r}"
    return version


def _as_sample(group: Group, index: int) -> dict[str, Any]:
    prompt, response = group.prompt.tokens, group.completions[index].tokens
    return {"input_ids": [*prompt, *response], "labels": [-100] * len(prompt) + list(response)}


def _shares(counts: list[int], wanted: int) -> list[int]:
    """Returns how many groups each rank keeps so that at most `wanted` remain. The fullest rank gives up first."""
    kept = list(counts)
    for _ in range(sum(counts) - wanted):
        fullest = max(range(len(kept)), key=lambda rank: (kept[rank], rank))
        kept[fullest] -= 1
    return kept


def train_policy(config: GrpoConfig) -> None:
    """Runs a complete training from its config."""
    run_to_end(GrpoTrainer(config))
