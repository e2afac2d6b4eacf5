"""Attention over layouts inside transformers: one implementation, registered in its attention interface.

``use_varlen_attention(model)`` selects it for a model's decoder. Hooks on the decoder add the layout to the keyword
arguments of the forward, and transformers passes it to every attention call. If a layout cannot express an operation
(other masks, layers that mix tokens elsewhere), it raises an error and never computes a wrong result."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.models.sequence import layout
from fsdp2x.models.sequence.blocks import Rules
from fsdp2x.models.sequence.exchange import attend_over_ranks
from fsdp2x.models.sequence.layout import KEYWORD, RankPart, SequenceLayout
from fsdp2x.models.sequence.varlen import attend

# Layers that mix tokens only by attention.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
# RoPE types whose frequencies depend on the longest position of a call, which packing and slicing change.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MIXING_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


def base_model(model: Any) -> Any:
    """Returns the transformers model itself, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def find_decoder(model: nn.Module) -> Any:
    """Returns the language model that runs the decoder layers, inside a causal LM or a vision-language model."""
    outer = base_model(model)
    if not hasattr(outer, "get_decoder") or not hasattr(outer, "config"):
        raise TypeError(
            f"{type(outer).__name__} is not a transformers model. Layouts reach attention through transformers' "
            "attention interface, so pass the PreTrainedModel (or its PEFT wrapper) itself."
        )
    decoder = outer.get_decoder()
    name = type(outer).__name__
    if not getattr(decoder, "_supports_attention_backend", False):
        raise NotImplementedError(
            f"{name}: its attention does not use transformers' attention interface "
            "(_supports_attention_backend is not set), so it can neither be packed nor cut over ranks. Train it on "
            "full sequences without packing."
        )
    _check_config(name, decoder.config)
    for path, module in decoder.named_modules():
        if isinstance(module, _MIXING_MODULES):
            raise NotImplementedError(
                f"{name}: {path} ({type(module).__name__}) carries information between tokens outside of attention. "
                "Packed samples would leak into each other there, and slices of a sequence would miss their neighbors."
            )
    return decoder


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name}: encoder-decoder models are not supported, only causal decoders")
    if not getattr(config, "is_causal", True):
        raise NotImplementedError(f"{name}: config.is_causal is False, but only causal attention is supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        raise NotImplementedError(
            f"{name}: layers of type {', '.join(sorted(kinds))} are not supported. Only full and sliding causal "
            "attention keeps packed samples apart and works over ranks. Train it on full sequences without packing."
        )


def attention_configs(decoder: nn.Module) -> list[Any]:
    """Returns the config objects from which the decoder's attention modules read the implementation to call."""
    found: dict[int, Any] = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def _copy_configs(model: nn.Module) -> None:
    """Gives a model config objects that no other model has, because they select the implementation."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(vars(module).get("config"), "_attn_implementation"):
            module.config = copy.deepcopy(module.config, copies)


def head_counts(config: Any) -> tuple[int, int]:
    """Returns query and key-value heads of a layer."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):
        raise NotImplementedError(
            f"{type(config).__name__}: layers with different numbers of heads ({heads}, {kv_heads}) are not supported"
        )
    return heads, kv_heads


def head_dims(config: Any) -> tuple[int, int]:
    """Returns the width of a head's queries and keys, and of its values."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (nope := getattr(config, "qk_nope_head_dim", None)) is not None:
        dim = nope + config.qk_rope_head_dim
    return dim, getattr(config, "v_head_dim", None) or dim


def rope_limit(config: Any) -> int | None:
    """Returns the longest sample whose RoPE frequencies do not depend on the call's length. None: no limit."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits = [
        int(one.get("original_max_position_embeddings") or config.max_position_embeddings)
        for one in nested
        if one.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    return min(limits) if limits else None


def check_rope(config: Any, longest: int) -> None:
    """Raises for samples whose rotary frequencies would differ from those of the same sample alone."""
    limit = rope_limit(config)
    if limit is not None and longest > limit:
        raise NotImplementedError(
            f"{type(config).__name__}: rope_type dynamic or longrope chooses its frequencies by the longest position "
            f"of a call. A sample of {longest} tokens exceeds the original {limit}, where packing and sequence "
            "parallelism would change them. Shorten the samples, or use another rope_type (yarn, linear)."
        )


# ---- inputs of a decoder, cut to a range of positions

_CACHES = ("cache", "past_key_values")  # transformers' name from 5.24 on, and the previous one
_SAMPLE_MARKS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # of transformers' collators
_IGNORED = {"attention_mask", "cache_position", "labels", "use_cache", *_CACHES, *_SAMPLE_MARKS}
_SECOND_DIM = {"input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "per_layer_inputs"}


def cut_decoder_inputs(inputs: dict[str, Any], layout: SequenceLayout, length: int) -> dict[str, Any]:
    """``inputs`` of a decoder's forward with everything that runs along the sequence cut to this rank's positions.

    ``length``: positions of the inputs that are not known to run along the sequence, before padding.
    """
    cut = dict(inputs)
    visual = inputs.get("visual_pos_masks")
    for name, value in inputs.items():
        if name in _SECOND_DIM and isinstance(value, torch.Tensor):
            cut[name] = layout.take(value)
        elif name == "position_ids" and value is not None:
            cut[name] = layout.take(value, -1)
        elif name == "visual_pos_masks" and visual is not None:
            cut[name] = layout.take(visual)
        elif name == "deepstack_visual_embeds" and value is not None:
            # Features lie in the order of the image tokens: row by row, then by position.
            assert visual is not None, "features need places"
            numbers = torch.zeros_like(visual, dtype=torch.int64)
            numbers[visual] = torch.arange(int(visual.sum()), device=visual.device)
            mine = layout.take(numbers)[layout.take(visual)]
            cut[name] = [features[mine] for features in value]
        elif isinstance(value, torch.Tensor) and name not in _IGNORED and length in value.shape[:3]:
            raise NotImplementedError(
                f"the decoder's input {name} of shape {tuple(value.shape)} seems to run along the sequence of "
                f"{length}, but fsdp2x does not know how to cut it over ranks"
            )
    return cut


IMPLEMENTATION = "fsdp2x_varlen"

# transformers' mask builders that a layout (samples) and a call's own arguments (window) already express.
_KNOWN_MASKS = {
    "and_masks",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "padding_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
}


class _Forward:
    """Requests of one decoder forward, compared at its end so that no layer is missed."""

    def __init__(self, owner: SequenceAttention, layout: SequenceLayout) -> None:
        self.owner, self.layout = owner, layout
        self.num_calls = self.num_windowed = 0
        self.mask_kinds: set[str] = set()


# The running decoder forward. A recomputation in backward does not count.
_running: ContextVar[_Forward | None] = ContextVar("fsdp2x_sequence_forward", default=None)


@checked
def use_varlen_attention(model: nn.Module) -> SequenceAttention:
    """Makes the decoder of a HuggingFace model attend inside samples only, without a mask of the full row.

    Call it once, before or after ``fully_shard``. Each forward takes its samples from the layout of
    ``PackedBatch.inputs``, else from ``position_ids`` that restart, without the padding of a 2-D ``attention_mask``.
    Otherwise a row is one sample. A forward with a cache (``generate``) runs the model's previous implementation.

    Args:
        model: a transformers model with a causal decoder, plain, inside a vision-language model, sharded or in PEFT.
            Sliding windows, soft caps (Gemma 2) and attention sinks (GPT-OSS) are supported.

    Returns:
        A handle. ``handle.remove()`` undoes the call.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: called twice.
        NotImplementedError: the model mixes tokens in another way (convolutions, state spaces, chunked or bidirectional
            attention).
    """
    return SequenceAttention(model)


class SequenceAttention:
    """Result of :func:`use_varlen_attention`: makes a model's decoder attend inside samples until :meth:`remove`."""

    shard: RankPart | None = None  # over ranks: the part of every sequence that each holds

    def __init__(self, model: nn.Module) -> None:
        self.decoder = find_decoder(model)
        before = [config._attn_implementation for config in attention_configs(self.decoder)]
        if IMPLEMENTATION in before:
            raise ValueError(
                f"{type(model).__name__} already runs attention over layouts. Call remove() on its handle first."
            )
        from transformers import AttentionInterface, AttentionMaskInterface

        _copy_configs(model)
        self._configs = attention_configs(self.decoder)
        AttentionInterface.register(IMPLEMENTATION, sequence_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sequence_mask)
        self._before = before
        self._depth = 0
        self._switch(True)
        self._hooks = [
            self.decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.decoder.register_forward_hook(self._after_forward, always_call=True),
        ]

    @property
    def config(self) -> Any:
        return self.decoder.config

    def remove(self) -> None:
        """Removes the hooks and restores the model's previous attention implementation. A second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._switch(False)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the unchanged model inside the block: for ``generate`` and evaluation of full sequences.

        After :meth:`remove` it changes nothing.
        """
        if not self._hooks:
            yield
            return
        self._switch(False)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._hooks:
                self._switch(True)

    def _switch(self, on: bool) -> None:
        for config, before in zip(self._configs, self._before, strict=True):
            config._attn_implementation = IMPLEMENTATION if on else before

    # ---- hooks of the decoder

    def make_layout(self, inputs: dict[str, Any]) -> SequenceLayout | None:
        """Returns the layout for ``inputs`` that come without one. None if a cache is used: no layout applies."""
        if any(inputs.get(name) is not None for name in _CACHES) or inputs.get("use_cache"):
            return None
        return layout_of(inputs)

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._depth:
            if kwargs.pop(KEYWORD, None) is not None:
                raise RuntimeError(f"{type(module).__name__} got a layout while attention over layouts is disabled")
            return args, kwargs
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
            if len(args) > 1:
                raise TypeError(f"{type(module).__name__}: expected inputs by keyword, got {len(args)} positional ones")
        found = kwargs.get(KEYWORD)
        if found is None and (found := self.make_layout(kwargs)) is None:
            self._switch(False)
            return (), kwargs
        self._check(found, kwargs)
        length = found.length
        if found.shard is not None and not found.inputs_sliced:
            if kwargs.get("position_ids") is None:
                first = next(x for n in ("inputs_embeds", "input_ids") if (x := kwargs.get(n)) is not None)
                kwargs["position_ids"] = torch.arange(length, device=first.device).unsqueeze(0)
            kwargs = cut_decoder_inputs(kwargs, found, length)
        _running.set(_Forward(self, found))
        return (), {**kwargs, KEYWORD: found, "attention_mask": None, "use_cache": False}

    def _check(self, found: SequenceLayout, inputs: dict[str, Any]) -> None:
        if name := next((name for name in _CACHES if inputs.get(name) is not None), None):
            raise ValueError(f"attention over layouts keeps no cache. Pass {name}=None, or use disabled().")
        if found.shard is not self.shard:
            raise ValueError(
                f"{type(self.decoder).__name__}: {found} was not made for this model. Over ranks pass the inputs "
                "that its own context's shard_inputs(batch) returns, else those of the batch."
            )
        tokens = next((x for n in ("inputs_embeds", "input_ids") if (x := inputs.get(n)) is not None), None)
        if tokens is None:
            return
        length = found.local_length if found.inputs_sliced else found.length
        if tuple(tokens.shape[:2]) != (found.num_rows, length):
            raise ValueError(
                f"{type(self.decoder).__name__}: {found} expects tokens of shape [{found.num_rows}, {length}], "
                f"got {list(tokens.shape[:2])}. Pass the inputs that the layout was made for."
            )
        check_rope(self.config, max((stop - start for _, start, stop in found.samples), default=0))

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        forward = _running.get()
        _running.set(None)
        if forward is None:
            if not self._depth:
                self._switch(True)
        elif output is not None:  # it is None if the forward raised
            _check_coverage(module, forward)


def layout_of(inputs: dict[str, Any]) -> SequenceLayout:
    """Returns the layout of a plain batch, from its padding mask and restarting positions. Default: full rows."""
    tokens = next(x for n in ("inputs_embeds", "input_ids") if (x := inputs.get(n)) is not None)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if positions is None and any(inputs.get(name) is not None for name in _SAMPLE_MARKS):
        raise ValueError(
            f"{', '.join(_SAMPLE_MARKS)} do not keep samples apart in attention over layouts. Pass position_ids that "
            "restart at each sample."
        )
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape != tokens.shape[:2]:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} for tokens of {tuple(tokens.shape[:2])}")
    if positions is not None and positions.shape[-1] != tokens.shape[1]:
        raise ValueError(f"position_ids of shape {tuple(positions.shape)} for tokens of {tuple(tokens.shape[:2])}")
    if mask is not None:
        return layout.from_attention_mask(mask, positions)
    if positions is not None:
        return layout.from_position_ids(positions, tokens.shape[0])
    return layout.whole_rows(*tokens.shape[:2])


def _check_coverage(module: nn.Module, forward: _Forward) -> None:
    """Checks that every layer used this attention, with the window that the model's requested masks imply."""
    name, config = type(module).__name__, forward.owner.config
    if forward.num_calls != config.num_hidden_layers:
        raise NotImplementedError(
            f"{name}: {forward.num_calls} attention calls in {config.num_hidden_layers} layers carried the layout. The "
            "others mix tokens in another way, so samples would leak or slices miss their neighbors."
        )
    kinds = list(getattr(config, "layer_types", None) or ())
    if len(kinds) == config.num_hidden_layers:
        expected = sum("sliding" in kind or kind == "local" for kind in kinds)
    else:
        expected = {frozenset({"sliding"}): forward.num_calls, frozenset({"full"}): 0}.get(
            frozenset(forward.mask_kinds)
        )
    if expected is not None and forward.num_windowed != expected:
        raise NotImplementedError(
            f"{name}: {expected} layers have a sliding window by the model's masks, but {forward.num_windowed} "
            "attention calls got one"
        )


# ---- functions that transformers calls


def sequence_mask(*_: Any, mask_function: Any = None, use_vmap: bool = False, **__: Any) -> None:
    """Answers transformers' request for a mask: makes none, but raises for kinds that layouts cannot express."""
    names = set() if mask_function is None else _builders(mask_function)
    if use_vmap or not names <= _KNOWN_MASKS:
        other = ", ".join(sorted(names - _KNOWN_MASKS)) or "its own overlay"
        raise NotImplementedError(
            f"the model asks for an attention mask built with {other}, but attention over layouts is causal inside "
            "samples only, with or without a sliding window"
        )
    forward = _running.get()
    if forward is not None:
        forward.mask_kinds.add("sliding" if "sliding_window_overlay" in names else "full")


def _builders(function: Any) -> set[str]:
    """Returns names of the functions that made a mask function and the ones it encloses."""
    found = {function.__qualname__.partition(".")[0]}
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        for one in inner if isinstance(inner, tuple) else (inner,):
            if callable(one) and hasattr(one, "__qualname__"):
                found |= _builders(one)
    return found


def _autocast_dtype(device: str) -> torch.dtype | None:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


@torch_private.never_compiled
def sequence_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    sequence_layout: SequenceLayout | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Runs transformers' attention call over a layout: [rows, heads, positions, dim] -> [rows, positions, heads, dim].

    Over ranks the positions are this rank's, and the ranks exchange data around the computation.
    """
    name = type(module).__name__
    if sequence_layout is None:
        raise RuntimeError(
            f"{name} was called without a layout: its decoder passes no keyword arguments to attention, or the "
            "layer was called outside of the decoder's forward"
        )
    if attention_mask is not None or position_bias is not None:
        what = "an attention mask" if attention_mask is not None else "a position bias"
        raise NotImplementedError(f"{name}: {what} is not supported over layouts")
    if output_attentions:
        raise NotImplementedError(f"{name}: output_attentions=True has no weights to return over layouts")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise NotImplementedError(f"{name}: attention that is not causal is not supported over layouts")
    if dropout and (softcap is not None or s_aux is not None):
        raise NotImplementedError(
            f"{name}: attention dropout with soft caps or attention sinks is not supported over layouts. Set "
            "attention_dropout=0.0 in the model's config."
        )
    length = sequence_layout.local_length
    if query.shape[2] != length or key.shape[2] != length or query.shape[0] != sequence_layout.num_rows:
        raise ValueError(
            f"{name}: {sequence_layout} expects [{sequence_layout.num_rows}, heads, {length}, dim], got queries "
            f"{list(query.shape)} and keys {list(key.shape)}. Caches and cross-attention are not supported."
        )
    forward = _running.get()
    if forward is not None:
        forward.num_calls += 1
        forward.num_windowed += sliding_window is not None
    # Under autocast, rotary embeddings return fp32 queries and keys, but values are in half precision.
    dtype = _autocast_dtype(value.device.type) or value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rules = Rules(scaling, dropout, sliding_window, softcap, s_aux)
    shard = sequence_layout.shard
    if shard is None or shard.size == 1:
        return attend(query, key, value, sequence_layout, rules).contiguous(), None
    return attend_over_ranks(query, key, value, sequence_layout, rules), None
