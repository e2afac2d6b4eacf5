"""Reads the prompts of a run: rows of JSONL or parquet as token ids, and the order in which ranks visit them."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from fsdp2x.base.failures import rank_and_size
from fsdp2x.train.chat import check_messages, render_prompt
from fsdp2x.train.config import ConfigError
from fsdp2x.train.data import BlockStream, split_held_out
from fsdp2x.train.grpo.config import PromptSection
from fsdp2x.train.rows import Row, read_rows
from fsdp2x.train.tokenizer import ByteTokenizer, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the text or messages for reward functions, and the row's columns."""

    tokens: list[int]
    shown: Any
    columns: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Prompts:
    """The prompts for training and for evaluation, the same on every rank."""

    train: list[Prompt]
    held_out: list[Prompt]
    fingerprint: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in [*self.train, *self.held_out])


def read_prompts(config: PromptSection, tokenizer: Tokenizer, seed: int) -> Prompts:
    """Reads all rows, skips prompts that are too long, and holds some out in a seeded order.

    Raises:
        ConfigError: a row is wrong (with its file and line), or no prompt is left.
    """
    train = _read(config, config.files, tokenizer, "data.files")
    held_out = []
    if config.validation_files:
        held_out = _read(config, config.validation_files, tokenizer, "data.validation_files")
    elif config.held_out:
        order, num_held_out = split_held_out(len(train), config.held_out, seed)
        train = [train[index] for index in order.tolist()]
        split = max(len(train) - num_held_out, 1)
        train, held_out = train[:split], train[split:]
    if rank_and_size()[0] == 0:  # all ranks read the same
        logger.info("%d prompts for training, %d held out", len(train), len(held_out))
    digest = hashlib.sha256(json.dumps([seed, config.shuffle]).encode())
    for prompt in [*train, *held_out]:
        digest.update(json.dumps([prompt.tokens, prompt.columns], sort_keys=True, default=str).encode())
    return Prompts(train, held_out, digest.hexdigest())


def _read(config: PromptSection, files: list[str], tokenizer: Tokenizer, setting: str) -> list[Prompt]:
    assert config.format != "text"
    rows = read_rows(files, config.format, setting=setting)
    found = [_make_prompt(config, row, tokenizer) for row in rows]
    limit = config.max_prompt_tokens
    kept = [prompt for prompt in found if limit is None or len(prompt.tokens) <= limit]
    if len(kept) < len(found) and rank_and_size()[0] == 0:
        logger.warning("%s: %d prompts of more than %s tokens are left out", setting, len(found) - len(kept), limit)
    if not kept:
        raise ConfigError(f"{setting}: all {len(found)} prompts have more than data.max_prompt_tokens={limit} tokens")
    return kept


def _make_prompt(config: PromptSection, row: Row, tokenizer: Tokenizer) -> Prompt:
    column = config.prompt_column
    value = row.fields.get(column)
    if value is None:
        given = ", ".join(name for name, field in row.fields.items() if field is not None) or "nothing"
        raise ConfigError(f"{row.where}: expected the column {column}, got {given}. See data.prompt_column.")
    if isinstance(value, str) and (config.apply_chat_template or config.system is not None):
        value = [{"role": "user", "content": value}]
    columns = {name: field for name, field in row.fields.items() if name != column}
    if isinstance(value, str):
        if not value:
            raise ConfigError(f"{row.where}: {column} is empty")
        return Prompt(_encode(tokenizer, value), value, columns, row.where)
    messages = check_messages(value, row.where)
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{row.where}: the last message of a prompt is the assistant's. Remove the answer.")
    tools = row.fields.get("tools")
    return Prompt(render_prompt(tokenizer.inner, messages, tools=tools, where=row.where), messages, columns, row.where)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns token ids with the tokenizer's special tokens at the beginning, and no end mark."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.encode(text.encode()).tolist()
    ids = tokenizer.inner(text, verbose=False)["input_ids"]
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids


class PromptStream(BlockStream):
    """Gives each rank its prompts. `settled` is the position up to which prompts have been trained on.

    Prompts that were requested ahead come after it, and a resumed run requests them again.
    """

    settled = 0

    def next_prompts(self) -> list[tuple[int, Prompt]]:
        """Returns this rank's next prompts with their global positions. Advances by all ranks' prompts."""
        first = self.position + self.rank * self.batch_size
        self.position += self.world_size * self.batch_size
        prompts: Any = self.blocks.train
        return [(index, prompts[self._block_at(index)]) for index in range(first, first + self.batch_size)]

    def settle(self) -> None:
        """Records that this step trains on all prompts that were handed out."""
        self.settled = self.position

    def state_dict(self) -> dict[str, Any]:
        ahead, self.position = self.position, self.settled
        try:
            return super().state_dict()
        finally:
            self.position = ahead

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        said = super().load_state_dict(state)
        self.settled = self.position
        return said
