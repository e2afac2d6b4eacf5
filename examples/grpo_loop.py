"""The loop of ``grpo_toy.py`` on a trainer rank: warm-up, then samples, scores, one update and a push per step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from grpo_vllm import VllmEngine

NUM_DIGITS, EQUALS = 6, 10  # the tokens 0 to 9 are digits; a prompt is six of them and EQUALS
MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
# vLLM's attention on a CPU knows no heads of 16.
MODEL_OF_VLLM = {**MODEL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PHASES = ("generate", "score", "train", "push")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run; the defaults are those that learn.

    Attributes:
        steps: of GRPO.
        seed: of the weights, the prompts and the samples.
        engine: "rollout", fsdp2x's own, or "vllm".
        is_async: samples for the next step are drawn while this one is trained.
        colocate: engine and trainer are never awake at once; fsdp2x's lives in the trainers' processes.
        prompts, samples: prompts a step over all ranks, and samples of each.
        temperature: of samples; log-probabilities are of the result.
        lr: of GRPO.
        weight_decay, betas, eps: of AdamW. max_grad_norm: 0 does not clip.
        warmup_steps, warmup_batch, warmup_lr: of training on sorted examples.
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        entropy_weight: of the entropy, which is subtracted from the loss.
        kl, kl_weight: the estimate of the KL to the policy after the warm-up, and its weight.
        max_weight: where importance weights are cut off, in asynchronous runs.
        max_tokens: of a packed row.
        fsdp_size: ranks that share a copy of the parameters, a divisor of all; 0: all of them. reference_fsdp_size: of
            the frozen policy.
        param_dtype, reduce_dtype: of computation, and of sums of gradients; parameters are float32.
        reference_dtype: of the frozen policy's computation.
        reshard_after_forward: as for ``fully_shard``.
        bucket_bytes: of a push.
        tolerance: of the difference between the trainers' and the engine's log-probabilities.
        timeout_s: for an answer of the engine, and for a push.
    """

    steps: int = 160
    seed: int = 0
    engine: str = "rollout"
    is_async: bool = False
    colocate: bool = False
    prompts: int = 32
    samples: int = 8
    temperature: float = 1.0
    lr: float = 5e-4
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 0.0
    warmup_steps: int = 60
    warmup_batch: int = 64
    warmup_lr: float = 3e-3
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_weight: float = 0.0
    kl: str = "k3+"
    kl_weight: float = 1e-3
    max_weight: float = 2.0
    max_tokens: int = 2048
    fsdp_size: int = 0
    reference_fsdp_size: int = 0
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    reference_dtype: str = "float32"
    reshard_after_forward: bool | None = None
    bucket_bytes: int = 16 << 20
    tolerance: float = 1e-4
    timeout_s: float = 60.0

    @property
    def model(self) -> dict:
        """The config of the policy."""
        return MODEL_OF_VLLM if self.engine == "vllm" else MODEL


class Loop:
    """What a trainer rank does. Owns the model, the optimizer, the frozen reference, and the session of pushes."""

    def __init__(self, settings: Settings, address: str) -> None:
        """``address``: of the engine, vLLM's with http; not used when colocated. Collective, as all methods are."""
        import torch
        import torch.distributed as dist

        import fsdp2x
        from fsdp2x import rollout

        self.settings = settings
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if settings.prompts % self.world or settings.warmup_batch % self.world:
            raise ValueError(f"prompts and warmup_batch must be multiples of the {self.world} ranks")
        torch.manual_seed(settings.seed)
        self.model = make_model(settings.model)
        self.engine: rollout.RolloutClient | rollout.ColocatedRollout | VllmEngine
        if settings.engine == "vllm":
            self.engine = VllmEngine(address, settings.timeout_s)
        elif settings.colocate:
            self.engine = rollout.ColocatedRollout(make_model(settings.model))
        else:
            self.engine = rollout.RolloutClient(address, timeout_s=settings.timeout_s)
        fsdp2x.sequence.use_varlen_attention(self.model)
        self.shard(self.model, settings.fsdp_size, settings.param_dtype, settings.reshard_after_forward)
        self.optimizer = fsdp2x.optim.AdamW(
            self.model.parameters(),
            lr=settings.warmup_lr,
            betas=tuple(settings.betas),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm or None,
        )
        self.random = torch.Generator().manual_seed(settings.seed * self.world + self.rank)
        names = "hf" if settings.engine == "vllm" else "model"  # as its loader knows them, or as the modules have them
        options = {"timeout_s": settings.timeout_s, "bucket_bytes": settings.bucket_bytes}
        self.sync = fsdp2x.sync.connect(self.model, self.engine.target, names=names, **options)
        self.version = -1
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.reference: fsdp2x.rl.Reference | None = None

    def shard(self, model, size: int, dtype: str, reshard_after_forward: bool | None) -> None:
        """Over meshes of ``size`` ranks, which hold a copy each."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        import fsdp2x

        split = 1 < size < self.world
        if split and self.world % size:
            raise ValueError(f"fsdp_size must be a divisor of the {self.world} ranks, got {size}")
        shape, names = ((self.world // size, size), ("ddp", "fsdp")) if split else ((self.world,), ("fsdp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = fsdp2x.MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, self.settings.reduce_dtype)
        )
        options = {} if reshard_after_forward is None else {"reshard_after_forward": reshard_after_forward}
        fsdp2x.fully_shard(model, mesh=mesh, mp_policy=policy, **options)

    def score(self, row, entropy: bool = False):
        from fsdp2x import rl

        return rl.score(self.model, row.inputs, row.next_labels, temperature=self.settings.temperature, entropy=entropy)

    def pack(self, samples: list[tuple[list[int], list[int]]]) -> tuple[list, list]:
        """Packed rows of (prompt, response), and their tokens."""
        import fsdp2x

        packed = [{"input_ids": [*p, *r], "labels": [-100] * len(p) + list(r)} for p, r in samples]
        rows = list(fsdp2x.sequence.micro_batches(packed, self.settings.max_tokens))
        return rows, [fsdp2x.rl.RowTokens(row) for row in rows]

    def close(self) -> None:
        self.sync.close()
        self.engine.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    # the task

    def draw_prompts(self, count: int) -> list[list[int]]:
        """This rank's."""
        import torch

        digits = torch.randint(10, (count, NUM_DIGITS), generator=self.random)
        return [[*row, EQUALS] for row in digits.tolist()]

    # steps

    def warm_up(self) -> float:
        """Trains on sorted examples, then keeps the policy as the reference; the last loss."""
        import torch

        import fsdp2x
        from fsdp2x import rl

        loss = torch.zeros(())
        for _ in range(self.settings.warmup_steps):
            prompts = self.draw_prompts(self.settings.warmup_batch // self.world)
            rows, tokens = self.pack([(prompt, answer(prompt)) for prompt in prompts])
            count = rl.count_step(tokens)
            loss = torch.zeros(())
            for index, row in enumerate(rows):
                with fsdp2x.accumulate(self.model, last=index == len(rows) - 1):
                    log_probs = rl.score(self.model, row.inputs, row.next_labels).log_probs
                    share = -log_probs.sum() * (count.ranks / count.tokens)
                    share.float().backward()
                loss += share.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
        frozen = make_model(self.settings.model)
        fsdp2x.sequence.use_varlen_attention(frozen)
        self.shard(frozen, self.settings.reference_fsdp_size, self.settings.reference_dtype, None)
        frozen.load_state_dict(self.model.state_dict())
        self.reference = rl.Reference(frozen)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr
        return over_ranks(loss, "mean")

    def push(self) -> None:
        with self.phase("push"):
            self.version += 1
            self.sync.push(version=self.version)

    def ask(self, prompts: Sequence[Sequence[int]], samples: int, temperature: float | None = None) -> None:
        """Requests are numbered by the version of the weights and the rank, so that no two draw alike."""
        from fsdp2x import rollout

        seed = ((self.settings.seed << 20) + self.version) * self.world + self.rank
        temperature = self.settings.temperature if temperature is None else temperature
        if isinstance(self.engine, VllmEngine) and self.settings.colocate:
            self.engine.wake()
        self.engine.ask(prompts, rollout.Sampling(NUM_DIGITS, samples, temperature, seed=seed))

    def collect(self) -> list:
        """Waits for the engine; when colocated, samples while the trainer's memory is away."""
        import fsdp2x

        with self.phase("generate"):
            if not self.settings.colocate:
                return self.engine.collect()
            fsdp2x.sleep(self.model, self.optimizer)
            try:
                return self.engine.collect()
            finally:
                if isinstance(self.engine, VllmEngine):
                    self.engine.sleep()
                fsdp2x.wake(self.model, self.optimizer)

    def check_engine(self) -> float:
        """Samples a little from the weights that were pushed last; the largest difference of log-probabilities."""
        import torch

        prompts = self.draw_prompts(2)
        self.ask(prompts, 1)
        completions = self.collect()
        with self.phase("score"), torch.no_grad():
            rows, tokens = self.pack([(prompts[c.prompt], c.tokens) for c in completions])
            scores = [self.score(row).log_probs for row in rows]
            return self.difference(completions, tokens, scores)

    def difference(self, completions: list, tokens: list, scores: list) -> float:
        """Largest |log-prob of the trainers - of the engine| over tokens that the weights of now have drawn.

        Raises:
            RuntimeError: on every rank: it exceeds the tolerance, or there is no such token.
        """
        import torch

        apart = [torch.tensor([-1.0])]
        for of_row, trained in zip(tokens, scores, strict=True):
            drawn = of_row.align([c.log_probs for c in completions])
            versions = of_row.align([[float(version) for version in c.versions] for c in completions])
            is_current = of_row.has_label & (versions == self.version)
            apart.append((trained.float() - drawn)[is_current].abs().nan_to_num(nan=math.inf))
        largest = over_ranks(torch.cat(apart).max(), "max")
        if largest < 0:
            raise RuntimeError(f"no token was drawn by version {self.version}, which had been pushed before")
        if not largest < self.settings.tolerance:
            raise RuntimeError(
                f"version {self.version}: log-probabilities of trainers and engine differ by {largest:.3g}, the "
                f"tolerance is {self.settings.tolerance:g}"
            )
        return largest

    def train(self, prompts: list[list[int]], completions: list) -> dict[str, float]:
        """One update by what the engine drew; numbers over all ranks."""
        import torch

        import fsdp2x
        from fsdp2x import rl

        assert self.reference is not None, "after the warm-up"
        rewards = [float(c.tokens == answer(prompts[c.prompt])) for c in completions]
        ages = [self.version - version for c in completions for version in c.versions]
        found = self.age_of(ages)
        with self.phase("score"):
            rows, tokens = self.pack([(prompts[c.prompt], c.tokens) for c in completions])
            count = rl.count_step(tokens)
            advantages = rl.group_advantages(rewards, [self.rank * len(prompts) + c.prompt for c in completions])
            with torch.no_grad():
                old = [self.score(row).log_probs for row in rows]
            with self.reference as reference:
                frozen = [
                    reference.score(row.inputs, row.next_labels, temperature=self.settings.temperature) for row in rows
                ]
            weights: list = [None] * len(rows)
            if self.settings.is_async:
                # Drawn by the weights before: the trainer of now would have drawn them more or less often.
                drawn = [of_row.align([c.log_probs for c in completions]) for of_row in tokens]
                high = self.settings.max_weight
                weights = [
                    rl.importance_weights(o, b, of_row, high=high)
                    for o, b, of_row in zip(old, drawn, tokens, strict=True)
                ]
                of_tokens = torch.cat([w[of_row.has_label] for w, of_row in zip(weights, tokens, strict=True)])
                found["weight_max"] = over_ranks(of_tokens.max(), "max")
                found["weight_min"] = -over_ranks(-of_tokens.min(), "max")
            else:
                found["difference"] = self.difference(completions, tokens, old)
        losses = []
        settings = dataclasses.replace(
            rl.DAPO,
            clip=(self.settings.clip_low, self.settings.clip_high),
            entropy_weight=self.settings.entropy_weight,
            kl=self.settings.kl if self.settings.kl_weight else None,
            kl_weight=self.settings.kl_weight,
        )
        with self.phase("train"):
            for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
                with fsdp2x.accumulate(self.model, last=index == len(rows) - 1):
                    scores = self.score(row, entropy=True)
                    given = {"old": old[index], "reference": frozen[index], "weights": weights[index]}
                    loss = rl.policy_loss(scores, of_row, advantages, count, settings, **given)
                    loss.loss.backward()
                losses.append(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        found["reward"] = over_ranks(torch.tensor(rewards).mean(), "mean")
        for name, shares in {"kl": [x.reference_kl for x in losses], "entropy": [x.entropy for x in losses]}.items():
            if None not in shares:  # without a weight there is no KL
                found[name] = over_ranks(torch.stack(shares).sum(), "mean")
        return found

    def age_of(self, ages: list[int]) -> dict[str, float]:
        """Mean and largest staleness of tokens, in versions, over all ranks.

        Raises:
            RuntimeError: on every rank: more than 1 in an asynchronous run, more than 0 in others.
        """
        import torch

        oldest = over_ranks(torch.tensor(float(max(ages))), "max")
        if oldest > self.settings.is_async:
            raise RuntimeError(f"tokens are {oldest:g} versions old, at most {int(self.settings.is_async)} is expected")
        return {"staleness": over_ranks(torch.tensor(ages).double().mean(), "mean"), "staleness_max": oldest}

    def greedy(self, count: int = 256) -> float:
        """How many of ``count`` prompts the engine's likeliest responses sort, as a share."""
        import torch

        prompts = self.draw_prompts(count // self.world)
        self.ask(prompts, 1, temperature=0.0)
        right = torch.tensor([c.tokens == answer(prompts[c.prompt]) for c in self.collect()])
        return over_ranks(right.double().mean(), "mean")

    def run(self) -> Iterator[dict]:
        """The lines of ``metrics.jsonl``."""
        began = time.perf_counter()
        loss = self.warm_up()
        self.push()
        apart = self.check_engine()
        yield {"event": "warm-up", "seconds": time.perf_counter() - began, "loss": loss, "difference": apart,
               "greedy": self.greedy()}  # fmt: skip
        count = self.settings.prompts // self.world
        prompts = self.draw_prompts(count)
        self.ask(prompts, self.settings.samples)
        for step in range(1, self.settings.steps + 1):
            began, self.seconds = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
            completions, asked = self.collect(), prompts
            apart = self.check_engine() if self.settings.is_async else None
            prompts = self.draw_prompts(count)
            if self.settings.is_async and step < self.settings.steps:
                self.ask(prompts, self.settings.samples)  # from the weights before this step's update
            metrics = self.train(asked, completions)
            if apart is not None:
                metrics["difference"] = apart
            self.push()
            if not self.settings.is_async and step < self.settings.steps:
                self.ask(prompts, self.settings.samples)
            yield {"event": "step", "step": step, **metrics, "version": self.version,
                   "wall_s": time.perf_counter() - began, "seconds": self.seconds}  # fmt: skip
        yield {"event": "end", "difference": self.check_engine(), "greedy": self.greedy()}


def over_ranks(value, how: str) -> float:
    """A scalar tensor's mean or largest value. Collective."""
    import torch.distributed as dist

    value = value.detach().double().clone()
    dist.all_reduce(value, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return float(value) / (1 if how == "max" else dist.get_world_size())


def make_model(sizes: dict):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {name: value for name, value in sizes.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes["model_type"], **config))


def answer(prompt: Sequence[int]) -> list[int]:
    return sorted(prompt[:NUM_DIGITS])
