"""Adapters of any LoraConfig, merged by pushes, streams, and files: PEFT's ``merge_and_unload``, or a refusal.

Cases are drawn by their number. The unsharded model says what is right. A push may only refuse what PEFT merges
wrongly or not at all, and embeddings that are tied in the base and differ after merging. Files hold those as well.
"""

import dataclasses
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fsdp2x
import models
import sequences
from checkpoints import on_first, shared_folder
from engines import Layerwise, wire
from fsdp2x.api import plain_config, save_adapter_config
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.convert import export_checkpoint
from harness import distributed
from models import build
from reference import same

peft = pytest.importorskip("peft")
from peft.tuners.lora.config import BdLoraConfig, VeloraConfig  # noqa: E402

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [7, 2, 30, 5, 21, 2, 8, 11]])
# Name -> model, its settings, names of linear layers, of embedding and head, and of fused experts.
NAMES = (["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "embed_tokens", "lm_head")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIASED = {"attention_bias": True, "mlp_bias": True}
BASES = {
    "untied": ("llama", {}, *NAMES, []),
    "tied": ("qwen3", {}, *NAMES, []),
    "biased": ("llama", {**BIASED, "tie_word_embeddings": False}, *NAMES, []),
    "biased and tied": ("llama", {**BIASED, "tie_word_embeddings": True}, *NAMES, []),
    "Conv1D": ("gpt2", {}, ["c_attn", "c_proj", "c_fc"], "wte", "lm_head", []),
    "experts": ("qwen3_moe", {}, NAMES[0][:4], *NAMES[1:], EXPERTS),
    "tied experts": ("mixtral", {"tie_word_embeddings": True}, NAMES[0][:4], *NAMES[1:], EXPERTS),
    "buffers": ("deepseek_v3", {}, ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"], *NAMES[1:], EXPERTS),
}
# Each drawn alone first, and then some of them together.
OPTIONS = {
    "plain": lambda draw, base: {},
    "use_rslora": lambda draw, base: {"use_rslora": True},
    "use_dora": lambda draw, base: {"use_dora": True},
    "lora_bias": lambda draw, base: {"lora_bias": True},
    # A rounded router sends tokens that nearly tie to other experts.
    "bfloat16": lambda draw, base: {"_dtype": torch.float32 if base[5] else torch.bfloat16},
    "two adapters": lambda draw, base: {"_after": second_adapter},
    "bias": lambda draw, base: {"bias": draw.choice(["all", "lora_only"])},
    "patterns": lambda draw, base: {"rank_pattern": {base[2][0]: 2}, "alpha_pattern": {base[2][1]: 9}},
    "fan_in_fan_out": lambda draw, base: {"fan_in_fan_out": True},
    "embedding": lambda draw, base: {"target_modules": [base[2][0], base[3]]},
    "head": lambda draw, base: {"target_modules": [base[2][0], base[4]]},
    "both": lambda draw, base: {"target_modules": [base[2][1], base[3], base[4]]},
    "all-linear": lambda draw, base: {"target_modules": "all-linear"},
    "copy of the head": lambda draw, base: {"modules_to_save": [base[4]]},
    "copy of the embedding": lambda draw, base: {"modules_to_save": [base[3]]},
    "copies": lambda draw, base: {"modules_to_save": [base[3], base[4]]},
    "copy around adapters": lambda draw, base: {"_after": copy_around},
    "tied copies": lambda draw, base: {"modules_to_save": [base[3]], "ensure_weight_tying": True},
    "tied adapters": lambda draw, base: {"target_modules": [base[2][0], base[3]], "ensure_weight_tying": True},
    "tokens": lambda draw, base: {"trainable_token_indices": draw.sample(range(37), 3)},
    "tokens of both": lambda draw, base: {"trainable_token_indices": {base[3]: [1, 4], base[4]: [1, 30]}},
    "experts": lambda draw, base: {"target_parameters": base[5] and draw.sample(base[5], draw.choice([1, 2]))},
    "olora": lambda draw, base: {"init_lora_weights": "olora"},
    "initial": lambda draw, base: {
        "init_lora_weights": draw.choice([False, "gaussian", "pissa", "pissa_niter_2", "orthogonal", "mica"])
    },
    "alora_invocation_tokens": lambda draw, base: {"alora_invocation_tokens": [3, 1]},
    "lora_dropout": lambda draw, base: {"lora_dropout": 0.1},
    "layers_to_transform": lambda draw, base: {"layers_to_transform": [1]},
    "exclude_modules": lambda draw, base: {"exclude_modules": base[2][:1]},
    "kasa_config": lambda draw, base: {"kasa_config": peft.KasaConfig()},
    "velora_config": lambda draw, base: {"velora_config": VeloraConfig(num_groups=4)},
    "monteclora_config": lambda draw, base: {"monteclora_config": peft.MontecloraConfig()},
    "use_bdlora": lambda draw, base: {
        "use_bdlora": BdLoraConfig(target_modules_bd_a=base[2][:1], nblocks=2, match_strict=False)
    },
    "layer_replication": lambda draw, base: {"layer_replication": [[0, 2], [1, 2]]},
    "disabled": lambda draw, base: {"_after": lambda model, draw: model.disable_adapter_layers()},
    "merged": lambda draw, base: {"_after": lambda model, draw: model.merge_adapter()},
}
# Settings that do not change what is merged, or that need data or quantized weights first.
ELSEWHERE = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "megatron_config", "megatron_core", "runtime_config", "layers_pattern", "arrow_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "use_qalora", "qalora_group_size"),
}
ON = {"experts": ("experts", "tied experts"), "lora_bias": ("tied", "biased"), "fan_in_fan_out": ("Conv1D",)}
ON |= {"bfloat16": ("biased",), "kasa_config": ("tied",)}
TIES = ("embedding", "head", "both", "copy", "copies", "tokens", "tied")
ALONE = [
    (base, [option])
    for number, option in enumerate(OPTIONS)
    for base in ON.get(option, ("tied",) * any(word in option for word in TIES) + (list(BASES)[number % len(BASES)],))
]
ROUNDS = [pytest.param(range(a, a + 12), id=str(a), marks=[pytest.mark.full] * (a >= 36)) for a in (0, 12, 24, 36)]
ROUNDS += [pytest.param(range(a, a + 30), id=str(a), marks=pytest.mark.full) for a in range(100, 220, 30)]


def copy_around(model, draw):
    """A second adapter that trains a copy of modules in which the first one has adapted layers."""
    settings = {"r": 2, "target_modules": ["lm_head"], "modules_to_save": ["self_attn", "attn"]}
    model.add_adapter("second", peft.LoraConfig(**settings))
    model.set_adapter("second")


def second_adapter(model, draw):
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=model.peft_config["default"].target_modules))
    model.base_model.set_adapter(draw.choice([["default", "second"], ["second"]]))


def drawn(number):
    """A case: what was drawn, and a PEFT model with random weights, or None if PEFT rejects the settings."""
    draw = random.Random(number)
    together = draw.choice(list(BASES)), draw.sample(list(OPTIONS), 3)
    name, chosen = ALONE[number] if number < len(ALONE) else together
    base = BASES[name]
    settings = {"r": draw.choice([2, 4]), "lora_alpha": draw.randint(1, 9)}
    settings["target_modules"] = draw.sample(base[2], draw.randint(2, len(base[2])))
    for option in chosen:
        settings |= OPTIONS[option](draw, base)
    case = SimpleNamespace(what=f"{number}: {name} {chosen} {settings}", options=chosen, model=None)
    after, case.dtype = settings.pop("_after", None), settings.pop("_dtype", torch.float32)
    torch.manual_seed(number)
    inside = (build if base[0] in models.NAMES else sequences.build)(base[0], use_cache=False, **base[1])
    inside.to(case.dtype)
    case.is_tied = inside.lm_head.weight is inside.get_input_embeddings().weight
    try:
        model = peft.get_peft_model(inside, peft.LoraConfig(**settings)).eval()
        if after is not None:
            after(model, draw)
        logits(model)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, LookupError, AttributeError):
        return case
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            if param.requires_grad or fqn.endswith("bias") or "lora_" in fqn:
                param.data = (param + 0.2 * torch.randn_like(param)).contiguous()  # in memory of its own
        for fqn, buffer in model.named_buffers():
            if fqn.endswith("e_score_correction_bias"):
                buffer.normal_()
    case.model = model
    return case


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits.float()


def are_close(got, expected, dtype):
    return bool((got - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * expected.abs().max())


def by_peft(number, live):
    """(The tensors of files of what PEFT merges if engines may load it, else None; whether PEFT can merge.)"""
    case = drawn(number)
    try:
        merged = case.model.merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError):
        return None, False
    if any("lora_" in name for name, _ in merged.named_parameters()):
        return None, False
    is_tied = merged.lm_head.weight is merged.get_input_embeddings().weight
    if is_tied != case.is_tied or not are_close(logits(merged), live, case.dtype):
        return None, True
    return dict(sorted(wire(merged, transport="process_group").items())), True


def pushed(model, transport):
    engine = Layerwise()
    target = fsdp2x.sync.InProcess(engine.load, finish=engine.finish)
    with fsdp2x.sync.connect(model, target, transport=transport, merge_adapters=True, bucket_bytes=5000) as session:
        session.push(version=0)
    return engine.weights


def save(model, form, folder):
    def write_assets(to):
        plain_config(model.get_base_model()).save_pretrained(to)
        save_adapter_config(model, to / "adapter")

    fsdp2x.checkpoint.save(folder, model, step=1, form=form, write_assets=write_assets)


def check_files(case, folder, live, expected, can_merge):
    try:
        merged = export_checkpoint(folder / "saved", folder / "merged", lora="merge")
    except CheckpointError as error:
        known = ["layer_replication", "KaSA"]
        if len(case.options) > 1:  # PEFT forgets parts of some combinations
            known += ["makes no such weight", "adapters inside of it"]
        assert not can_merge or any(words in str(error) for words in known), error
        assert not (folder / "merged").exists()
        return
    loaded, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert are_close(logits(loaded), live, case.dtype)
    if expected is not None:
        same(dict(sorted(load_file(merged / "model.safetensors").items())), expected)


def check(ctx, number, case):
    live = logits(case.model)
    expected, can_merge = by_peft(number, live)
    model = fsdp2x.fully_shard(drawn(number).model)
    transport = ("shm", "process_group")[number % 2]
    try:
        same(dict(sorted(pushed(model, transport).items())), expected)
        source = fsdp2x.sync.WeightSource(model, merge_adapters=True, transport=transport)
        same({name: tensor.clone() for name, tensor in sorted(source)}, expected)
    except NotImplementedError as error:
        assert expected is None or "layer_replication" in str(error), error
    if {"two adapters", "copy around adapters", "disabled", "merged"} & set(case.options):
        return  # no checkpoint says so
    with shared_folder() as folder:
        save(model, ("sharded", "full", "per_rank")[number % 3], folder / "saved")
        on_first(lambda: check_files(case, folder, live, expected, can_merge))
        if case.options == ["bias"]:
            with pytest.raises(NotImplementedError, match="trains biases of the base"):
                fsdp2x.save_adapter(model, folder / "adapter")
        elif "tokens" in case.options[0] and len(case.options) == 1:
            fsdp2x.save_adapter(model, folder / "adapter")
            saved = load_file(folder / "adapter" / "adapter_model.safetensors")
            by_peft_itself = peft.get_peft_model_state_dict(case.model, save_embedding_layers=False)
            same(dict(sorted(saved.items())), dict(sorted(by_peft_itself.items())))
            of_base = {name for name in wire(model) if not name.startswith("base_model.")}
            assert expected is None or of_base == set(expected)


@pytest.mark.parametrize("numbers", ROUNDS)
@distributed(world_sizes=(pytest.param(1, marks=pytest.mark.full), 2), timeout=180)
def test_merged_adapters_are_what_the_model_computes(ctx, numbers):
    warnings.simplefilter("ignore")
    for number in numbers:
        case = drawn(number)
        assert case.model is not None or number >= len(ALONE), case.what
        if case.model is not None:
            try:
                check(ctx, number, case)
            except Exception as error:
                raise AssertionError(case.what) from error


def test_every_setting_is_drawn():
    """A setting that PEFT adds needs an option here."""
    base, known = BASES["experts"], {"r", "lora_alpha", "target_modules", *ELSEWHERE}
    drawn_ones = {key for option in OPTIONS.values() for key in option(random.Random(0), base)}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known | drawn_ones
