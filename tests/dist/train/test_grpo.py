"""`fsdp2x grpo`: updates equal those of an unsharded loop, runs resume, and what goes wrong reaches every rank."""

import copy
import json
import math

import pytest
import torch
import torch.distributed as dist

from fsdp2x.base.failures import exchange
from harness import distributed
from reference import full
from training import MODEL, shared_folder

DIGITS = 3
REWARDS = """
def early(completions, prompts, answer, **columns):
    assert len(completions) == len(prompts) == len(answer)
    return [sum(c in "abcdefgh0123456789" for c in text) / 3 + len(text) / 10 for text in completions]

def even(completions, prompts, **columns):
    return [float(len(prompt) % 2) * (i % 2) for i, prompt in enumerate(prompts)]

def broken(completions, **columns):
    import torch.distributed as dist
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("no such answer")
    return [0.0 for _ in completions]
"""


def write_prompts(folder, count=24):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{'x' * (i % 3)}{i}=", "answer": str(i)} for i in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARDS)


def config(folder, output, **sections):
    from fsdp2x.grpo import GrpoConfig
    from fsdp2x.train import parse_config

    base = {
        "model": {"config": {**MODEL, "max_position_embeddings": 64}},
        "data": {"files": [str(folder / "prompts.jsonl")], "format": "jsonl", "held_out": 0.2, "max_tokens": 24},
        "rollout": {"max_tokens": DIGITS, "group_size": 4, "tolerance": 1e-4},
        "reward": {"functions": [f"{folder / 'rewards.py'}:early"]},
        "algorithm": {"name": "dapo"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant"},
        "train": {"steps": 4, "global_batch_size": 6, "seed": 5},
        "parallel": {"device": "cpu", "timeout_s": 30},
        "logging": {"output": str(folder / output)},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return parse_config(merged, GrpoConfig)


def make(folder, output, **sections):
    from fsdp2x.grpo import GrpoTrainer

    if dist.get_rank() == 0:
        write_prompts(folder)
    dist.barrier()
    return GrpoTrainer(config(folder, output, **sections))


# ---- one step is the plain formula on an unsharded model


def log_probs(model, sample, temperature=1.0):
    ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    spread = logits.log_softmax(-1)
    places = (labels != -100).nonzero()[:, 0]
    return spread[places - 1, labels[places]], spread[places - 1]


def plain_loss(model, frozen, samples, advantages, olds, algorithm, kl_weight, max_tokens):
    """The loss of all ranks' samples, one sample at a time, in float64."""
    settings = algorithm.loss(max_tokens, kl_weight)
    low, high = settings.clip
    sums, lengths = [], []
    for sample, advantage, old in zip(samples, advantages, olds, strict=True):
        now, _ = log_probs(model, sample)
        difference = now - (now.detach() if old is None else old)
        if settings.ratio == "sequence":
            difference = difference.mean().detach() + (now - now.detach())
        ratio = difference.exp()
        each = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if kl_weight:
            apart = now - log_probs(frozen, sample)[0].detach()
            each = each + kl_weight * (torch.exp(-apart) - 1 + apart)
        sums.append(each.sum())
        lengths.append(len(now))
    if settings.mean == "samples":
        return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)
    if settings.mean == "constant":
        return sum(sums) / len(sums) / max_tokens
    return sum(sums) / sum(lengths)


def group_advantages(rewards, ids, scale):
    found = []
    for reward, one in zip(rewards, ids, strict=True):
        group = torch.tensor([r for r, i in zip(rewards, ids, strict=True) if i == one], dtype=torch.float64)
        deviation = group.std() + 1e-4 if scale == "std" else 1.0
        found.append(float((reward - group.mean()) / deviation))
    return found


@distributed(world_sizes=(1, 2, 3), timeout=120)
@pytest.mark.parametrize(("algorithm", "kl_weight"), [("grpo", 0.0), ("dapo", 0.1), ("dr_grpo", 0.0), ("gspo", 0.1)])
def test_steps_equal_an_unsharded_loop(ctx, algorithm, kl_weight):
    """Two steps: samples of the run, the formulas written out, torch's AdamW."""
    section = {"name": algorithm, "kl": "k3", "kl_weight": kl_weight}
    with shared_folder(ctx) as folder:
        trainer = make(folder, "run", algorithm=section, train={"clip": None})
        reference = copy.deepcopy(plain_model(trainer))
        frozen = copy.deepcopy(reference)
        decays = [p for p in reference.parameters() if p.ndim >= 2]
        rest = [p for p in reference.parameters() if p.ndim < 2]
        options = trainer.optimizer.param_groups[0]
        plain = torch.optim.AdamW(
            [{"params": decays, "weight_decay": options["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-2, betas=options["betas"], eps=options["eps"],
        )  # fmt: skip
        batches = []
        run = trainer.update.run
        trainer.update.run = lambda batch, *rest: batches.append(batch) or run(batch, *rest)
        for step in range(2):
            trainer.train_step()
            mine = batches[-1]
            everything = exchange((mine.packed, mine.rewards.tolist(), mine.group_ids))
            samples = [sample for packed, _, _ in everything for sample in packed]
            rewards = [reward for _, of_rank, _ in everything for reward in of_rank]
            ids = [one for _, _, of_rank in everything for one in of_rank]
            assert len(samples) == 24 and len(set(ids)) == 6
            scale = "none" if algorithm == "dr_grpo" else "std"
            assert any(group_advantages(rewards, ids, scale))
            loss = plain_loss(
                reference, frozen, samples, group_advantages(rewards, ids, scale), [None] * 24,
                trainer.config.algorithm, kl_weight, DIGITS,
            )  # fmt: skip
            plain.zero_grad()
            loss.backward()
            plain.step()
            state = full(trainer.model.state_dict())
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=2e-4, msg=f"step {step}: {name}")
            assert trainer.numbers["difference_max"] < 1e-4
        trainer.close()


def plain_model(trainer):
    from fsdp2x.train.model import build_model

    return build_model(trainer.config.model, trainer.tokenizer, trainer.config.train.seed)


# ---- runs


def lines(folder, output, event="train"):
    text = (folder / output / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


@distributed(world_sizes=(1, 2), timeout=120)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_goes_on_bit_for_bit(ctx, algorithm):
    """The same prompts, samples, losses; of PPO with its critic."""
    sections = {
        "algorithm": {"name": algorithm, "epochs": 2, "minibatches": 2},
        "checkpoint": {"save_every": 2, "keep": 9},
    }
    with shared_folder(ctx) as folder:
        whole = make(folder, "whole", **sections)
        whole.run()
        resume = {"resume_from": str(folder / "whole/checkpoints/step-000002"), "save_every": 2}
        resumed = make(folder, "resumed", **{**sections, "checkpoint": resume})
        resumed.run()
        dist.barrier()
        keep = ("step", "loss_hex", "reward", "prompts", "entropy", "value_loss")
        want = [{k: line[k] for k in keep if k in line} for line in lines(folder, "whole")][2:]
        assert [{k: line[k] for k in keep if k in line} for line in lines(folder, "resumed")] == want
        assert [line["step"] for line in want] == [3, 4] and ("value_loss" in want[0]) == (algorithm == "ppo")
        whole.close()
        resumed.close()


@distributed(world_sizes=(3,), timeout=120)
def test_another_world_size_goes_on_with_the_same_prompts(ctx):
    """Positions count prompts of all ranks, so that 3 ranks take up where 1 would."""
    with shared_folder(ctx) as folder:
        trainer = make(folder, "run", checkpoint={"save_every": 1}, train={"steps": 2})
        trainer.run()
        state = trainer.stream.state_dict()
        assert state["position"] == 12
        trainer.stream.load_state_dict(state)
        shown = [index for index, _ in trainer.stream.next_prompts()]
        assert sorted(index for of_rank in exchange(shown) for index in of_rank) == list(range(12, 18))
        assert trainer.stream.state_dict()["position"] == 12, "asked for, and not trained on"
        trainer.close()


@distributed(world_sizes=(1, 3), timeout=120)
def test_dynamic_sampling_replaces_equal_groups(ctx):
    """Half of the prompts give equal rewards in their groups: every trained group varies, and a step is full."""
    with shared_folder(ctx) as folder:
        trainer = make(
            folder,
            "run",
            reward={"functions": [f"{folder / 'rewards.py'}:even"]},
            algorithm={"dynamic_sampling": 4},
        )
        for _ in range(2):
            groups = trainer._next_groups()
            assert all(group.varies for group in groups)
            assert sum(exchange(len(groups))) == 6
            assert 0 < trainer.numbers["equal_groups"] < 1
            trainer.step += 1
        trainer.close()


@distributed(world_sizes=(1, 2), timeout=120)
def test_evaluation_is_pass_at_k(ctx):
    with shared_folder(ctx) as folder:
        trainer = make(
            folder,
            "run",
            rollout={"eval_temperature": 1.0},
            evaluation={"samples": 4},
            reward={"functions": [{"name": "regex", "pattern": "[a-z\x80-\xff]"}]},
        )
        seen = []
        judge = trainer._judge
        trainer._judge = lambda *args: seen.append(judge(*args)) or seen[-1]
        found = trainer.evaluate()
        rewards = [reward for of_rank in exchange([g.rewards for g in seen[0]]) for reward in of_rank]
        assert len(rewards) == len(trainer.blocks.held_out) == 5 and {len(r) for r in rewards} == {4}
        assert found["pass@1"] == pytest.approx(sum(map(sum, rewards)) / 20)
        assert found["pass@4"] == pytest.approx(sum(any(r) for r in rewards) / 5)
        trainer.close()


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("push", ["adapter", "merged"])
def test_lora_trains_adapters_and_pushes_them(ctx, push):
    """Alone or merged. The reference of the KL is the policy without its adapters."""
    with shared_folder(ctx) as folder:
        trainer = make(
            folder, "run", lora={"rank": 2}, algorithm={"kl_weight": 0.1}, rollout={"push": push}, train={"steps": 3}
        )
        assert trainer.config.pushes_adapter == (push == "adapter")
        trainer.run()
        dist.barrier()
        found = lines(folder, "run")
        assert found[0]["kl"] < 1e-9 < found[-1]["kl"]
        assert max(line["difference_max"] for line in found) < 1e-4
        assert (folder / "run/adapter/adapter_model.safetensors").exists()
        trainer.close()


# ---- what goes wrong


@distributed(world_sizes=(2,), timeout=60)
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"functions": ["rewards.py:broken"]}}, "reward broken: KeyError: 'no such answer'"),
        ({"rollout": {"tolerance": 1e-12}}, "differ by .*rollout.tolerance=1e-12"),
    ],
)
def test_an_error_of_a_step_reaches_every_rank(ctx, sections, message):
    from fsdp2x.train import ConfigError, TrainingError

    with shared_folder(ctx) as folder:
        sections = copy.deepcopy(sections)
        if "reward" in sections:
            sections["reward"]["functions"] = [f"{folder}/rewards.py:broken"]
        trainer = make(folder, "run", **sections)
        with pytest.raises((ConfigError, TrainingError), match=message):
            trainer.train_step()
        trainer.close()


@distributed(world_sizes=(1,))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"prompt_column": "question"}}, r"prompts.jsonl:1: expected the column question, got prompt, answer"),
        ({"data": {"max_prompt_tokens": 1}}, "all 24 prompts have more than data.max_prompt_tokens=1"),
        ({"data": {"max_tokens": 7}}, "data.max_tokens: got 7, but the longest prompt and rollout.max_tokens=3 are 8"),
        (
            {"rollout": {"max_tokens": 60}, "data": {"max_tokens": None}},
            "rollout.max_tokens: the model has 64 positions",
        ),
        ({"data": {"system": "Be brief."}}, "the tokenizer has no chat template. Set data.chat_template"),
        ({"reward": {"functions": ["nothing"]}}, "unknown reward 'nothing'. Built in are exact_match"),
        ({"reward": {"functions": [{"name": "length"}]}}, "length needs the option target"),
        ({"reward": {"functions": ["missing.py:f"]}}, "missing.py: no such file"),
        ({"train": {"batch_size": 2}}, "train.batch_size: set train.global_batch_size"),
        ({"rollout": {"group_size": 1}}, "advantages compare the responses to a prompt"),
        ({"rollout": {"ahead": 1}}, "rollout.ahead: got 1, expected 0: a colocated engine has no other time"),
        ({"rollout": {"engine": "vllm"}}, "rollout.addresses: got .*one URL of a running vllm server"),
        ({"rollout": {"push": "adapter"}}, "rollout.push: adapter needs lora.rank"),
        ({"algorithm": {"gamma": 0.5}}, "algorithm.gamma: got 0.5, expected 1.0, since algorithm.name is dapo"),
        ({"evaluation": {"samples": 4}}, "several responses at rollout.eval_temperature=0"),
        ({"evaluation": {"samples": 0}}, "evaluation.samples: got 0, expected at least 1"),
        ({"train": {"eval_every": 1}, "data": {"held_out": 0.0}}, "data.held_out=0 keeps no prompts"),
    ],
)
def test_what_is_refused(ctx, change, message):
    from fsdp2x.train import ConfigError

    with shared_folder(ctx) as folder:
        with pytest.raises(ConfigError, match=message):
            make(folder, "run", **change).close()


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    from itertools import combinations

    from fsdp2x.train.grpo.trainer import pass_at_k

    for n in range(1, 7):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * correct + [False] * (n - correct), k))
                assert math.isclose(pass_at_k(n, correct, k), sum(map(any, subsets)) / len(subsets))
