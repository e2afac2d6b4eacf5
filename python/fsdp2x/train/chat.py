"""Renders chat messages into tokens by the tokenizer's chat template, and labels the assistant's tokens.

It finds the assistant's characters in the rendered text in one of two ways:

    {% generation %} in the template   the template marks them itself
    otherwise                          from render(turns before, add_generation_prompt) to render(turns so far)

The second way needs a template that only appends: its output for the first turns must stay when more turns follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2x.base.failures import ConfigError, first_line
from fsdp2x.models.sequence.packing import IGNORE
from fsdp2x.train.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
# Contents of a row -> the name of its column.
COLUMNS = {name: name for name in ("messages", "prompt", "completion", "text", "tools")}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tokens = tuple[list[int], list[int]]  # input_ids, labels


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Returns the messages if each is a mapping with a known role and a text; raises `ConfigError` with `where`."""
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else f"a {type(messages).__name__}"
        raise ConfigError(f"{where}: expected a list of messages, got {got}.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}: message {number}: expected role and content, got a {type(message).__name__}.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            missing = ", ".join(map(str, message)) if "role" not in message else repr(role)
            raise ConfigError(f"{where}: message {number}: expected a role of {', '.join(ROLES)}, got {missing}.")
        calls_tools = role == "assistant" and message.get("tool_calls")
        if calls_tools and content is None:
            continue
        if not isinstance(content, str):
            got = "none" if content is None else f"a {type(content).__name__}"
            raise ConfigError(f"{where}: message {number} ({role}): expected text as content, got {got}.")
        if role == "assistant" and not content.strip() and not calls_tools:
            raise ConfigError(f"{where}: message {number}: the assistant's answer is empty.")
    return messages


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


def render_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: list | None = None, where: str = "prompt"
) -> list[int]:
    """Renders messages up to the beginning of the assistant's answer.

    Args:
        tokenizer: a transformers tokenizer.
        messages: mappings with role and content.
        tools: tools for the template.
        where: beginning of errors, such as `Row.where`.

    Returns:
        Token ids.

    Raises:
        ConfigError: there is no chat template, messages are wrong, or the template rejects them.
    """
    return chat_ids(tokenizer, check_messages(list(messages), where), where, tools=tools)


def render_example(tokenizer: Any, row: Row, columns: Mapping[str, str] = COLUMNS) -> Tokens:
    """Renders one row for supervised fine-tuning.

    A row has, in this order of precedence: `messages`, `prompt` and `completion` (both text, or both messages), or
    `text`. With messages, all assistant turns are trained, and of `prompt` and `completion` those of the completion.
    Plain text gets the tokenizer's special tokens and ends with its end mark.

    Args:
        tokenizer: a transformers tokenizer.
        row: the row.
        columns: the name of the column for each key of `COLUMNS`.

    Returns:
        Token ids, and labels of the same length: the token where it is trained, else -100. Not truncated.

    Raises:
        ConfigError: the row, its file and line, and what is wrong; or the tokenizer has no chat template.
    """
    fields = {name: row.fields.get(columns[name]) for name in COLUMNS}
    if fields["messages"] is not None:
        return _render_chat(tokenizer, [], fields["messages"], fields["tools"], row.where)
    prompt, completion = fields["prompt"], fields["completion"]
    if prompt is not None and completion is not None:
        if isinstance(prompt, list) and isinstance(completion, list):
            return _render_chat(tokenizer, prompt, completion, fields["tools"], row.where)
        _require_text(prompt, columns["prompt"], row.where)
        _require_text(completion, columns["completion"], row.where)
        return _render_plain(tokenizer, prompt, completion)
    if fields["text"] is not None:
        _require_text(fields["text"], columns["text"], row.where)
        return _render_plain(tokenizer, "", fields["text"])
    given = ", ".join(name for name, value in row.fields.items() if value is not None) or "nothing"
    raise ConfigError(
        f"{row.where}: expected {columns['messages']}, {columns['prompt']} and {columns['completion']}, or "
        f"{columns['text']}; got {given}. Set data.columns if the columns have other names."
    )


def _require_text(value: Any, column: str, where: str) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {column}: expected text, got a {type(value).__name__}.")
    if not value.strip() and column != "prompt":
        raise ConfigError(f"{where}: {column} is empty.")


def _render_plain(tokenizer: Any, prompt: str, completion: str) -> Tokens:
    ids, offsets = _tokenize(tokenizer, prompt + completion, add_special_tokens=True)
    # Special tokens that the tokenizer adds have the offsets (0, 0). The first token is never predicted.
    labels = _label(ids, offsets, [(len(prompt), len(prompt) + len(completion))])
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids, labels = [*ids, end], [*labels, end]
    elif end is not None:
        labels[-1] = end
    return ids, labels


def _render_chat(tokenizer: Any, before: Any, trained: Any, tools: Any, where: str) -> Tokens:
    """Renders a conversation. `before` are messages that are not trained."""
    messages = (check_messages(before, where) if before else []) + check_messages(trained, where)
    turns = [i for i, message in enumerate(messages) if i >= len(before) and message["role"] == "assistant"]
    if not turns:
        raise ConfigError(f"{where}: no message of the assistant: there is nothing to train.")
    text = render_chat(tokenizer, messages, where, tools=tools, add_generation_prompt=False)
    first = 0
    if before:
        prompt = render_chat(tokenizer, messages[: len(before)], where, tools=tools)
        _require_prefix(prompt, text, len(before), where)
        first = len(prompt)
    if _GENERATION.search(chat_template_of(tokenizer)):
        return _render_marked(tokenizer, messages, tools, where, first)
    spans = []
    for turn in turns:
        start = render_chat(tokenizer, messages[:turn], where, tools=tools)
        stop = render_chat(tokenizer, messages[: turn + 1], where, tools=tools, add_generation_prompt=False)
        _require_prefix(start, stop, turn, where)
        _require_prefix(stop, text, turn, where)
        spans.append((len(start), len(stop)))
    ids, offsets = _tokenize(tokenizer, text, add_special_tokens=False)
    return ids, _label(ids, offsets, spans)


def _require_prefix(prefix: str, text: str, turn: int, where: str) -> None:
    if not text.startswith(prefix):
        raise ConfigError(
            f"{where}: the chat template renders messages differently when others follow, so the tokens of message "
            f"{turn + 1} cannot be found. Set data.chat_template to a template that marks them with {{% generation %}}."
        )


def _render_marked(tokenizer: Any, messages: list, tools: Any, where: str, first: int) -> Tokens:
    """Renders by the marks of the template, from the character `first` on."""
    try:
        found = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
    except Exception as error:
        raise ConfigError(f"{where}: the chat template failed: {first_line(error)}") from None
    ids, masks, offsets = found["input_ids"], found["assistant_masks"], found["offset_mapping"]
    labels = [
        token if mask and start >= first else IGNORE
        for token, mask, (start, _) in zip(ids, masks, offsets, strict=True)
    ]
    return ids, labels


def _tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns token ids, and the character range of each one."""
    try:
        found = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    except NotImplementedError:
        raise ConfigError(
            f"data.tokenizer: {type(tokenizer).__name__} does not say which characters a token stands for. Use a "
            "tokenizer with a tokenizer.json."
        ) from None
    return found["input_ids"], found["offset_mapping"]


def _label(ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """Returns the tokens that begin in one of the ascending spans, and -100 elsewhere."""
    labels, place = [], 0
    for token, (start, _) in zip(ids, offsets, strict=True):
        while place < len(spans) and start >= spans[place][1]:
            place += 1
        labels.append(token if place < len(spans) and start >= spans[place][0] else IGNORE)
    return labels
