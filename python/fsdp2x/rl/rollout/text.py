"""Converts text to token ids and back for an engine, with a tokenizer and its chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2x.base.failures import ConfigError, first_line
from fsdp2x.io.hf.save import TOKENIZER_FILES

#: A prompt: token ids, text, or a conversation of messages with ``role`` and ``content``.
Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]


def load_tokenizer(path: str) -> Any | None:
    """Returns the transformers tokenizer in the folder ``path``, or None if there is none.

    Raises:
        ValueError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    if not any(os.path.exists(os.path.join(path, name)) for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a damaged file makes transformers, tokenizers or sentencepiece raise
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


def plain_prompt(prompt: Prompt) -> list[int] | str | list[dict[str, Any]]:
    """Returns ``prompt`` in JSON types.

    Raises:
        TypeError: it is none of the three kinds.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) and all(isinstance(message, Mapping) for message in prompt):
        return [dict(message) for message in prompt]  # type: ignore[call-overload]
    try:
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(
            f"a prompt must be token ids, text or a list of messages, got a {type(prompt).__name__} with {prompt[0]!r}"
        ) from None


def prompt_ids(tokenizer: Any | None, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the token ids of each prompt. A conversation continues with the assistant's answer.

    Raises:
        ValueError: text lacks a tokenizer, or a conversation lacks a chat template that accepts it.
    """
    found = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            found.append(list(_needed(tokenizer, index, "text")(prompt)["input_ids"]))
        elif len(prompt) and isinstance(prompt[0], Mapping):
            found.append(chat_ids(_needed(tokenizer, index, "a conversation"), prompt, f"prompt {index}"))
        else:
            found.append(list(prompt))
    return found


def _needed(tokenizer: Any | None, index: int, kind: str) -> Any:
    if tokenizer is None:
        raise ValueError(
            f"prompt {index} is {kind}, but the engine has no tokenizer. Save one in the folder of its model, or ask "
            "with token ids."
        )
    return tokenizer


def chat_template_of(tokenizer: Any) -> str:
    """The chat template of a transformers tokenizer.

    Raises:
        ConfigError: there is none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise ConfigError(
            "the tokenizer has no chat template. Set data.chat_template to the path of a jinja file, or save a "
            "tokenizer with one in the folder of the model"
        ) from None


def render_chat(
    tokenizer: Any,
    messages: Sequence[Any],
    where: str,
    *,
    tools: list | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Messages as text, up to where the assistant's answer begins. Errors start with ``where``.

    Raises:
        ConfigError: there is no chat template, or it fails.
    """
    chat_template_of(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # jinja's, or raised by the template
        raise ConfigError(f"{where}: the chat template failed: {first_line(error)}") from None


def chat_ids(tokenizer: Any, messages: Sequence[Any], where: str, *, tools: list | None = None) -> list[int]:
    """The same as token ids; the template has the special tokens."""
    text = render_chat(tokenizer, messages, where, tools=tools)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def response_text(tokenizer: Any | None, tokens: Sequence[int]) -> str | None:
    """Returns the text without special tokens, or None without a tokenizer."""
    return None if tokenizer is None else tokenizer.decode(list(tokens), skip_special_tokens=True)
