"""Tiny models and data for packing and sequence parallelism: every kind of attention, samples of uneven lengths.

`reference_step` is what all of them must reproduce: one process, one sample at a time, the sum of all token losses
divided by their number.
"""

import torch
from torch import nn

import fsdp2x
import models
from fsdp2x.sequence import count_label_tokens, mean_over_ranks, token_mean_loss
from reference import even_out, grads, same

VOCAB = models.VOCAB
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 4}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 64, "use_cache": False}
DENSE = {**_SIZES, **_TOKENS, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.0}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4}
_DEEPSEEK = {**_MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}

# name -> (prefix of the classes, module below transformers.models, config arguments)
MODELS = {
    "llama": ("Llama", "llama", {"tie_word_embeddings": False}),
    "llama_kv1": ("Llama", "llama", {"num_key_value_heads": 1}),
    "llama_kv3": ("Llama", "llama", {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen2": ("Qwen2", "qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", "qwen2", {"head_dim": None, "use_sliding_window": True, **_LAYERS}),
    "qwen3": ("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", "mistral", {"sliding_window": 4}),
    "gemma": ("Gemma", "gemma", {"num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", "gemma2", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4, **_LAYERS}),
    "gemma3": ("Gemma3", "gemma3", {"query_pre_attn_scalar": 4, **_LAYERS}),
    "gpt_oss": ("GptOss", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **_LAYERS}),
    "qwen3_moe": ("Qwen3Moe", "qwen3_moe", {**_MOE, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        "deepseek_v3",
        {**_DEEPSEEK, "num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": None},
    ),
    "minimax_m2": ("MiniMaxM2", "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", "glm4_moe", {**_DEEPSEEK, "first_k_dense_replace": 1}),
    "olmo2": ("Olmo2", "olmo2", {"head_dim": None}),
}


def build(name: str, **overrides) -> nn.Module:
    """A tiny causal language model in fp32, weights drawn from seed 0, or the vision-language one."""
    if name in VISION:
        return VISION[name](**overrides)
    import importlib

    prefix, package, arguments = MODELS[name]
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    configs = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    found = getattr(configs, f"{prefix}TextConfig", None) or getattr(configs, f"{prefix}Config")
    arguments = {**DENSE, **arguments, **overrides}
    config = found(**{key: value for key, value in arguments.items() if value is not None})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}ForCausalLM")(config)
    enliven(model)
    return model


def enliven(model: nn.Module) -> None:
    """Larger weights than the initialiser's: attention that is nearly uniform would hide mistakes in it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.15)


# ---- vision-language models

IMAGE, VISION_START = 30, 31
_MROPE = {"rope_type": "default", "mrope_section": [1, 0, 1], "rope_theta": 10000.0}
_GRID, _PATCHES = (1, 4, 4), 16  # an image: 16 patches, merged 2 x 2 to 4 tokens


def _qwen2_vl(**overrides) -> nn.Module:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

    text = {**DENSE, "head_dim": None, "rope_parameters": _MROPE, **overrides}
    text = {key: value for key, value in text.items() if value is not None}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return _vision_model(Qwen2VLForConditionalGeneration, Qwen2VLConfig, text, vision)


def _qwen3_vl(**overrides) -> nn.Module:
    """Features of inner vision layers are added to the hidden states of the first decoder layers."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

    text = {**DENSE, "rope_parameters": _MROPE, **overrides}
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision = {**sizes, "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _vision_model(Qwen3VLForConditionalGeneration, Qwen3VLConfig, text, vision)


def _vision_model(model_class, config_class, text: dict, vision: dict) -> nn.Module:
    ids = {"image_token_id": IMAGE, "vision_start_token_id": VISION_START}
    ids |= {"video_token_id": 32, "vision_end_token_id": 33}
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config)
    enliven(model)
    return model


VISION = {"qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl}


def image_sample(model: nn.Module, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Text with one image of 4 tokens in it, and the positions the model gives it when it is alone."""
    generator = torch.Generator().manual_seed(3000 + seed)
    ids = torch.randint(3, IMAGE, (length,), generator=generator)
    start = 1 + seed % (length - 6)
    ids[start] = VISION_START
    ids[start + 1 : start + 5] = IMAGE
    config = model.config.vision_config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    types = (ids == IMAGE).int()
    grid = torch.tensor([_GRID])
    positions, _ = model.model.get_rope_index(ids[None], mm_token_type_ids=types[None], image_grid_thw=grid)
    text = torch.arange(length)[None]
    return {
        "input_ids": ids,
        "labels": torch.where(ids >= IMAGE, -100, ids),
        "position_ids": torch.cat((text, positions[-3:, 0])),
        "mm_token_type_ids": types,
        "pixel_values": torch.randn(_PATCHES, width, generator=generator),
        "image_grid_thw": grid,
    }


def make_samples(model: nn.Module, lengths: list[int], seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples of these lengths; in a vision-language model every other one has an image."""
    samples = []
    for index, length in enumerate(lengths):
        if hasattr(model.config, "vision_config") and index % 2 == 0:
            samples.append(image_sample(model, max(length, 8), 10 * seed + index))
            continue
        generator = torch.Generator().manual_seed(1000 + 100 * seed + index)
        ids = torch.randint(3, IMAGE, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 4] = -100  # a prompt, differently long in each sample
        samples.append({"input_ids": ids, "labels": labels})
        if hasattr(model.config, "vision_config"):
            samples[-1]["position_ids"] = torch.arange(length).expand(4, -1)
            samples[-1]["mm_token_type_ids"] = torch.zeros(length, dtype=torch.int32)
    return samples


def collate(samples: list[dict[str, torch.Tensor]], left: bool = False) -> dict[str, torch.Tensor]:
    """Samples as rows of one batch, padded on the right or left; a mask only where there is padding.

    Positions are left to the model, which counts them from the start of the row.
    """
    length = max(len(sample["input_ids"]) for sample in samples)
    batch: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        missing = length - len(sample["input_ids"])
        sides = (missing, 0) if left else (0, missing)
        pad = nn.functional.pad
        rows = {"input_ids": pad(sample["input_ids"], sides), "labels": pad(sample["labels"], sides, value=-100)}
        rows["attention_mask"] = pad(torch.ones_like(sample["input_ids"]), sides)
        if "mm_token_type_ids" in sample:
            rows["mm_token_type_ids"] = pad(sample["mm_token_type_ids"], sides)
        for name, row in rows.items():
            batch.setdefault(name, []).append(row)
        for name in ("pixel_values", "image_grid_thw"):
            if name in sample:
                batch.setdefault(name, []).append(sample[name])
    whole = {"pixel_values", "image_grid_thw"}
    joined = {name: torch.cat(parts) if name in whole else torch.stack(parts) for name, parts in batch.items()}
    if joined["attention_mask"].all():
        del joined["attention_mask"]
    return joined


def token_losses(model: nn.Module, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """Losses of the sample's label tokens, alone in its row, by torch's cross-entropy."""
    whole = {"pixel_values", "image_grid_thw"}
    inputs = {
        name: value if name in whole else value[:, None] if name == "position_ids" and value.ndim == 2 else value[None]
        for name, value in sample.items()
        if name != "labels"
    }
    logits = model(**inputs, use_cache=False).logits[0].float()
    labels = sample["labels"][1:]
    losses = nn.functional.cross_entropy(logits[:-1], labels, reduction="none", ignore_index=-100)
    return losses[labels != -100]


def reference_step(model: nn.Module, samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Gradients of the mean over all label tokens of all samples, and that mean."""
    num_tokens = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    total = torch.zeros(())
    for sample in samples:
        loss = token_losses(model, sample).sum() / num_tokens
        loss.backward()
        total += loss.detach()
    return total


def step(model: nn.Module, rows: list) -> torch.Tensor:
    """Forward and backward of a sharded model on this rank's rows, or slices of them; returns the step's loss."""
    num_tokens = count_label_tokens(row.next_labels for row in rows)
    loss = torch.zeros(())
    for index, row in enumerate(rows):
        with fsdp2x.accumulate(model, last=index == len(rows) - 1):
            one = token_mean_loss(model(**row.inputs).logits, row.next_labels, num_tokens)
            one.backward()
        loss += one.detach()
    return mean_over_ranks(loss)


def check_step(
    ours: nn.Module,
    rows: list,
    reference: nn.Module,
    samples: list,
    where: str = "",
    loose: float = 1e-5,
    exact: bool = False,
) -> torch.Tensor:
    """Loss and gradients of `step` are those of `reference_step` on all ranks' samples; returns the loss.

    ``exact``: the reference, in float32, computes in float64, because its own rounding errors exceed ``loose``.
    """
    expected = reference_step(reference.double() if exact else reference, samples)
    if exact:
        reference, expected = reference.float(), expected.float()
    same(step(ours, rows), expected, f"loss {where}", rtol=min(loose, 2e-2), atol=min(loose, 2e-2))
    even_out(ours, reference)
    same(grads(ours), grads(reference), f"gradients {where}", rtol=loose, atol=min(loose, 3e-2))
    return expected
