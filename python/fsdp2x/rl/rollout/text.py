"""Text for an engine that samples token ids: a tokenizer and its chat template make prompts, and read responses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: A prompt: token ids, text, or a conversation of messages with ``role`` and ``content``.
Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(path: str) -> Any | None:
    """The tokenizer of transformers in the folder ``path``, None if there is none.

    Raises:
        ValueError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    if not any(os.path.exists(os.path.join(path, name)) for name in _FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"transformers cannot load the tokenizer in {path!r}: {said}") from None


def plain_prompt(prompt: Prompt) -> list[int] | str | list[dict[str, Any]]:
    """``prompt`` in types of JSON.

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
    """Token ids of each. A conversation goes on with the assistant's answer; its template has the special tokens.

    Raises:
        ValueError: text without a tokenizer; a conversation without a chat template, or that the template refuses.
    """
    found = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            found.append(list(_needed(tokenizer, index, "text")(prompt)["input_ids"]))
        elif len(prompt) and isinstance(prompt[0], Mapping):
            found.append(_conversation_ids(_needed(tokenizer, index, "a conversation"), index, prompt))
        else:
            found.append(list(prompt))
    return found


def _needed(tokenizer: Any | None, index: int, kind: str) -> Any:
    if tokenizer is None:
        raise ValueError(
            f"prompt {index} is {kind}, and the engine has no tokenizer. Save one in the folder of its model, or ask "
            "with token ids"
        )
    return tokenizer


def _conversation_ids(tokenizer: Any, index: int, messages: Sequence[Any]) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt {index} is a conversation, and the tokenizer has no chat template. Save a tokenizer with one in "
            "the folder of the model, or ask with text"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja2's, and what a template raises
        raise ValueError(f"prompt {index}: the chat template fails: {type(error).__name__}: {error}") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def response_text(tokenizer: Any | None, tokens: Sequence[int]) -> str | None:
    """Without special tokens; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.decode(list(tokens), skip_special_tokens=True)
