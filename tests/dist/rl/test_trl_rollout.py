"""``rl.rollout_func`` in TRL's GRPOTrainer: log-probabilities of the policy, seeds, ends, and servers that differ."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import checkpoints
import device_handles
import fsdp2x
import vllm_engine
from chats import MARKED, chat_tokenizer
from frameworks import launched
from harness import distributed
from served_policies import SamplingServer, complete
from sglang_engine import serving
from training import MODEL

pytest.importorskip("trl")
ENDS = list(range(3, 40))


def make_model(lora=None, ends=ENDS):
    """A policy. ``lora``: its adapter is "trained", or "new" and without effect."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODEL, "max_position_embeddings": 64, "initializer_range": 0.3}, vocab_size=300)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = ends
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}
    return get_peft_model(model, LoraConfig(**options, init_lora_weights=lora == "new", task_type="CAUSAL_LM"))


def outputs(ctx, rollout, model=None, **settings):
    """Trains for two steps. Returns what rollouts have returned on this rank, after a look at the log-probabilities."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    found = []
    with checkpoints.shared_folder() as folder, launched(ctx):
        defaults = {"temperature": 0.7, "top_p": 0.9, "max_completion_length": 12, "learning_rate": 1e-2}
        defaults |= {"per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 2}
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False}
        arguments = GRPOConfig(
            str(folder), max_steps=2, use_cpu=True, bf16=False, fsdp=True, **{**defaults, **quiet, **settings}
        )

        def recorded(prompts, trainer):
            found.append(rollout(prompts, trainer))
            assert trainer.model.training
            agree(trainer, found[-1])
            return found[-1]

        trainer = GRPOTrainer(
            model or make_model(),
            lambda completions, **columns: [float(len(text)) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 1 = ", "1 + 1 = "] * 8}),
            processing_class=chat_tokenizer(MARKED),
            rollout_func=recorded,
        )
        trainer.train()
    return found


def agree(trainer, output):
    """The log-probabilities are those of the policy at the temperature."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    rows = zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], strict=True)
    with fsdp2x.unsharded(trainer.model_wrapped), torch.no_grad():
        model.eval()
        for prompt, tokens, log_probs in list(rows)[:4]:
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / trainer.temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=1e-4, atol=1e-5)
        model.train()


def all_ranks(found):
    """The responses of all calls and ranks."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [tuple(tokens) for output in found for tokens in output["completion_ids"]])
    return [tokens for of_rank in gathered for tokens in of_rank]


@distributed(world_sizes=(2,), timeout=150)
def test_every_sample_has_its_own_random_numbers(ctx):
    """All prompts are equal, so equal random numbers would give equal responses until the weights change."""
    settings = {"temperature": 1.0, "top_p": 1.0, "learning_rate": 0.0}
    first, again, other = (
        all_ranks(outputs(ctx, fsdp2x.rl.rollout_func(), make_model(ends=None), seed=seed, **settings))
        for seed in (0, 0, 1)
    )
    assert len({tokens[:4] for tokens in first}) == len(first) == 2 * 2 * 16
    assert again == first and not {tokens[:4] for tokens in other} & {tokens[:4] for tokens in first}


@pytest.mark.parametrize("lora", [None, "trained"])
@distributed(world_sizes=(2,), timeout=150)
def test_colocated_samples_end_where_the_trainer_says(ctx, lora):
    ends = {*ENDS, chat_tokenizer(MARKED).eos_token_id}
    found = all_ranks(outputs(ctx, fsdp2x.rl.rollout_func(), make_model(lora), top_k=200, min_p=0.001))
    assert len({len(tokens) for tokens in found}) > 2 and max(map(len, found)) <= 12
    assert not any(ends & set(tokens[:-1]) for tokens in found)
    assert all(len(tokens) == 12 or tokens[-1] in ends for tokens in found)


@contextlib.contextmanager
def server(ctx, engine, mode, has_base=False):
    """The address of a server of rank 0. ``has_base``: its weights are the base's, whatever is pushed."""
    with contextlib.ExitStack() as stack:
        given = [None]
        if ctx.rank == 0 and engine == "vllm":
            model = make_model()
            weights = {name: param.detach().clone() for name, param in model.named_parameters()}
            stack.enter_context(vllm_engine.installed())
            core = vllm_engine.Core(shapes={name: tensor.shape for name, tensor in weights.items()})
            stack.callback(core.stop)
            answer = complete((lambda: weights) if has_base else core.workers[0].model.values, model, mode)
            given = [stack.enter_context(vllm_engine.serving(core, complete=answer))]
        elif ctx.rank == 0:
            stack.enter_context(device_handles.installed())
            given = [stack.enter_context(serving(SamplingServer(make_model(), mode)))]
        dist.broadcast_object_list(given)
        yield given[0], answer.names if ctx.rank == 0 and engine == "vllm" else ()
        dist.barrier()


@pytest.mark.parametrize(
    ("engine", "mode", "lora", "settings"),
    [
        ("vllm", "processed", None, {"top_p": 1.0}),
        ("vllm", "processed", "trained", {"top_p": 1.0}),
        ("vllm", "raw", None, {"temperature": 1.0}),
        ("sglang", "temperature", None, {}),
    ],
)
@distributed(world_sizes=(2,), timeout=150)
def test_servers_sample_with_the_current_weights(ctx, engine, mode, lora, settings):
    with server(ctx, engine, mode) as (address, names):
        rollout = fsdp2x.rl.rollout_func(address, engine=engine, timeout_s=20)
        found = all_ranks(outputs(ctx, rollout, make_model(lora), **settings))
    assert len(set(found)) > len(found) / 2 and set(names) <= {"m"}


@distributed(world_sizes=(2,), timeout=150)
def test_an_adapter_alone_is_pushed_and_named(ctx):
    with server(ctx, "vllm", "raw", has_base=True) as (address, names):
        rollout = fsdp2x.rl.rollout_func(address, weights="adapter", timeout_s=20)
        outputs(ctx, rollout, make_model("new"), temperature=1.0, learning_rate=0.0)
        assert set(names) == ({"fsdp2x"} if ctx.rank == 0 else set())


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [("raw", {}, "temperature=0.7: the server returns"), ("processed", {}, "after top_p, top_k, and min_p")],
)
@distributed(world_sizes=(2,), timeout=150)
def test_other_log_probabilities_raise_at_the_start(ctx, mode, settings, said):
    with server(ctx, "vllm", mode) as (address, _), pytest.raises(ValueError, match=said):
        outputs(ctx, fsdp2x.rl.rollout_func(address, timeout_s=20), **settings)


@distributed(world_sizes=(2,), timeout=150)
def test_a_rank_that_cannot_sample_ends_all(ctx):
    rollout = fsdp2x.rl.rollout_func()

    def fails(prompts, trainer):
        return rollout([*prompts[:-1], "x" * 200] if ctx.rank == 1 else prompts, trainer)

    kind = ValueError if ctx.rank == 1 else RuntimeError
    with pytest.raises(kind, match="rollout_func: rank 1: ValueError: prompt .* of 200 tokens"):
        outputs(ctx, fails)
