"""The loop of ``grpo_toy.py`` on a trainer rank: warm-up, then samples, scores, one update and a push per step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

NUM_DIGITS, EQUALS = 6, 10  # the tokens 0 to 9 are digits; a prompt is six of them and EQUALS
MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
PHASES = ("generate", "score", "train", "push")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run; the defaults are those that learn.

    Attributes:
        steps: of GRPO.
        seed: of the weights, the prompts and the samples.
        is_async: samples for the next step are drawn while this one is trained.
        colocate: engines live in the trainers' processes.
        prompts, samples: prompts a step over all ranks, and samples of each.
        lr: of GRPO.
        warmup_steps, warmup_batch, warmup_lr: of training on sorted examples.
        kl_weight: of the KL to the policy after the warm-up.
        max_weight: where importance weights are cut off, in asynchronous runs.
        tolerance: of the difference between the trainers' and the engine's log-probabilities.
        timeout_s: for an answer of the engine, and for a push.
    """

    steps: int = 160
    seed: int = 0
    is_async: bool = False
    colocate: bool = False
    prompts: int = 32
    samples: int = 8
    lr: float = 5e-4
    warmup_steps: int = 60
    warmup_batch: int = 64
    warmup_lr: float = 3e-3
    kl_weight: float = 1e-3
    max_weight: float = 2.0
    tolerance: float = 1e-4
    timeout_s: float = 60.0


class Loop:
    """What a trainer rank does. Owns the model, the optimizer, the frozen reference, and the session of pushes."""

    def __init__(self, settings: Settings, address: str) -> None:
        """``address``: of the engine; not used when colocated. Collective, as all methods are."""
        import torch
        import torch.distributed as dist

        import fsdp2x
        from fsdp2x import rollout

        self.settings = settings
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if settings.prompts % self.world or settings.warmup_batch % self.world:
            raise ValueError(f"prompts and warmup_batch must be multiples of the {self.world} ranks")
        torch.manual_seed(settings.seed)
        self.model = make_model()
        self.engine: rollout.RolloutClient | rollout.ColocatedRollout
        if settings.colocate:
            self.engine = rollout.ColocatedRollout(make_model())
        else:
            self.engine = rollout.RolloutClient(address, timeout_s=settings.timeout_s)
        fsdp2x.sequence.use_varlen_attention(self.model)
        fsdp2x.fully_shard(self.model)
        self.optimizer = fsdp2x.optim.AdamW(self.model.parameters(), lr=settings.warmup_lr)
        self.random = torch.Generator().manual_seed(settings.seed * self.world + self.rank)
        self.sync = fsdp2x.sync.connect(self.model, self.engine.target, names="model", timeout_s=settings.timeout_s)
        self.version = -1
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.reference: fsdp2x.rl.Reference | None = None

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
            rows, tokens = pack([(prompt, answer(prompt)) for prompt in prompts])
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
        frozen = make_model()
        fsdp2x.sequence.use_varlen_attention(frozen)
        fsdp2x.fully_shard(frozen)
        frozen.load_state_dict(self.model.state_dict())
        self.reference = rl.Reference(frozen)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr
        return over_ranks(loss, "mean")

    def push(self) -> None:
        with self.phase("push"):
            self.version += 1
            self.sync.push(version=self.version)

    def ask(self, prompts: Sequence[Sequence[int]], samples: int, temperature: float = 1.0) -> None:
        """Requests are numbered by the version of the weights and the rank, so that no two draw alike."""
        from fsdp2x import rollout

        seed = ((self.settings.seed << 20) + self.version) * self.world + self.rank
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
                fsdp2x.wake(self.model, self.optimizer)

    def check_engine(self) -> float:
        """Samples a little from the weights that were pushed last; the largest difference of log-probabilities."""
        import torch

        from fsdp2x import rl

        prompts = self.draw_prompts(2)
        self.ask(prompts, 1)
        completions = self.collect()
        with self.phase("score"), torch.no_grad():
            rows, tokens = pack([(prompts[c.prompt], c.tokens) for c in completions])
            scores = [rl.score(self.model, row.inputs, row.next_labels).log_probs for row in rows]
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
            rows, tokens = pack([(prompts[c.prompt], c.tokens) for c in completions])
            count = rl.count_step(tokens)
            advantages = rl.group_advantages(rewards, [self.rank * len(prompts) + c.prompt for c in completions])
            with torch.no_grad():
                old = [rl.score(self.model, row.inputs, row.next_labels).log_probs for row in rows]
            with self.reference as reference:
                frozen = [reference.score(row.inputs, row.next_labels) for row in rows]
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
        settings = dataclasses.replace(rl.DAPO, kl="k3+", kl_weight=self.settings.kl_weight)
        with self.phase("train"):
            for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
                with fsdp2x.accumulate(self.model, last=index == len(rows) - 1):
                    scores = rl.score(self.model, row.inputs, row.next_labels, entropy=True)
                    given = {"old": old[index], "reference": frozen[index], "weights": weights[index]}
                    loss = rl.policy_loss(scores, of_row, advantages, count, settings, **given)
                    loss.loss.backward()
                losses.append(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        found["reward"] = over_ranks(torch.tensor(rewards).mean(), "mean")
        for name, shares in {"kl": [x.reference_kl for x in losses], "entropy": [x.entropy for x in losses]}.items():
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


def make_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {name: value for name, value in MODEL.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(MODEL["model_type"], **config))


def answer(prompt: Sequence[int]) -> list[int]:
    return sorted(prompt[:NUM_DIGITS])


def pack(samples: list[tuple[list[int], list[int]]]) -> tuple[list, list]:
    """Packed rows of (prompt, response), and their tokens."""
    import fsdp2x

    packed = [{"input_ids": [*p, *r], "labels": [-100] * len(p) + list(r)} for p, r in samples]
    rows = list(fsdp2x.sequence.micro_batches(packed, 2048))
    return rows, [fsdp2x.rl.RowTokens(row) for row in rows]
