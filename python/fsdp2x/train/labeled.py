"""Turns rows of conversations into samples whose labels are the assistant's tokens. `chat.py` renders them.

Rows are rendered once, when the run begins, or with `data.streaming` each time a step needs them. The order in which
ranks visit them, and so the place at which a run resumes, is the same in both cases.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2x.base.failures import rank_and_size
from fsdp2x.models.sequence.packing import IGNORE
from fsdp2x.train.chat import COLUMNS, render_example
from fsdp2x.train.config import ConfigError, DataConfig
from fsdp2x.train.data import Blocks, Samples, split_held_out
from fsdp2x.train.distributed import sums_over_ranks
from fsdp2x.train.rows import Row, Rows, open_rows
from fsdp2x.train.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Rendered = tuple[torch.Tensor, torch.Tensor]  # int32 tokens, and which of them are trained


@dataclass
class Renderer:
    """Renders rows, applies `data.truncation`, and counts the rows that it cuts or drops."""

    tokenizer: Any
    config: DataConfig
    counts: Counter[str] = field(default_factory=Counter)
    longest: tuple[int, str] = (0, "")

    def __call__(self, row: Row) -> Rendered | None:
        """Returns the tokens of a row, or None if it is dropped."""
        ids, labels = render_example(self.tokenizer, row, {**COLUMNS, **self.config.columns})
        size = self.config.block_size
        if len(ids) > size:
            self.longest = max(self.longest, (len(ids), row.where))
            self.counts["cut" if self.config.truncation == "cut" else "too long"] += 1
            if self.config.truncation != "cut":
                return None
        ids, labels = ids[:size], labels[:size]
        # No token predicts the first one.
        if all(label == IGNORE for label in labels[1:]):
            self.counts["nothing to train"] += 1
            return None
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(labels) != IGNORE

    def check(self, num_rows: int) -> None:
        """Raises `ConfigError` if rows were too long and `data.truncation` is error."""
        if self.counts["too long"] and self.config.truncation == "error":
            size, (length, where) = self.config.block_size, self.longest
            raise ConfigError(
                f"data.block_size: {self.counts['too long']} of {num_rows} rows have more than {size} tokens, the "
                f"longest, {where}, has {length}. Raise data.block_size, or set data.truncation to cut or drop."
            )

    def report(self, say: Callable[..., None], device: torch.device) -> None:
        """Reports how many rows the ranks cut or dropped, counting each rendering. Collective."""
        names = ("cut", "too long", "nothing to train")
        counts = sums_over_ranks([float(self.counts[name]) for name in names], device)
        for name, count in zip(names, counts, strict=True):
            if count:
                say("rows, as often as a rank rendered them: %d %s", int(count), name)


class LazySamples:
    """Samples that are read and rendered on request. A dropped one has no labels."""

    def __init__(self, rows: Rows, order: torch.Tensor, render: Renderer):
        self._rows, self._order, self.render = rows, order, render

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, part: slice) -> LazySamples:
        return LazySamples(self._rows, self._order[part], self.render)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Returns a sample as `Samples.sample` does. Raises `ConfigError` for a wrong row, on this rank only."""
        rendered = self.render(self._rows[int(self._order[index])])
        self.render.check(1)
        if rendered is None:
            return {"input_ids": torch.zeros(2, dtype=torch.int64), "labels": torch.full((2,), IGNORE)}
        tokens, trained = rendered
        tokens = tokens.to(torch.int64)
        return {"input_ids": tokens, "labels": torch.where(trained, tokens, IGNORE)}


def read_labeled(config: DataConfig, tokenizer: Tokenizer, seed: int) -> Blocks:
    """Reads the rows of `data.files` for training and a seeded random part of them, or `data.validation_files`, for
    evaluation.

    Rows for training stay in the order of their files. Rows without labels, and too long ones with
    `data.truncation=drop`, are left out of both, counted and logged.

    Raises:
        ConfigError: a wrong row, with its file and line, rows that are too long, or no row is left.
    """
    render = Renderer(tokenizer.inner, config)
    rows = _open(config, config.files, "data.files")
    validation = _open(config, config.validation_files, "data.validation_files") if config.validation_files else None
    fraction = 0.0 if validation is not None else config.held_out
    if config.streaming:
        order, num_held_out = split_held_out(len(rows), fraction, seed)
        samples: Any = LazySamples(rows, order, render)
    else:
        rendered = _render_all(rows, render)
        order, num_held_out = split_held_out(len(rendered), fraction, seed)
        samples = _joined([rendered[i] for i in order.tolist()])
    split = len(samples) - num_held_out
    if split < 1:
        raise ConfigError(f"data.files: none of {len(rows)} rows is left for training{_told(render)}.")
    train, held_out = samples[:split], samples[split:]
    if validation is not None and config.streaming:
        held_out = LazySamples(validation, torch.arange(len(validation)), render)
    elif validation is not None:
        held_out = _joined(_render_all(validation, render))
    if rank_and_size()[0] == 0:
        _report(rows, train, held_out, render)
    digest = hashlib.sha256(f"{rows.fingerprint} {validation and validation.fingerprint}".encode())
    template = tokenizer.inner.chat_template
    digest.update(f"{config.block_size} {config.truncation} {config.columns} {template} {seed}".encode())
    digest.update(f"{split} {len(held_out)} {config.shuffle} {config.packing}".encode())
    return Blocks(train, held_out, rows.num_files, rows.num_bytes, digest.hexdigest())


def _open(config: DataConfig, files: list[str], setting: str) -> Rows:
    assert config.format != "text", "text has no rows"
    return open_rows(
        files,
        config.format,
        pattern=config.pattern,
        exclude=config.exclude,
        setting=setting,
        lazy=config.streaming,
    )


def _render_all(rows: Rows, render: Renderer) -> list[Rendered]:
    rendered = [found for row in rows if (found := render(row)) is not None]
    render.check(len(rows))
    return rendered


def _joined(rendered: Iterable[Rendered]) -> Samples:
    tokens, trained = zip(*rendered, strict=True) if rendered else ((), ())
    return Samples.joined(list(tokens), list(trained))


def _told(render: Renderer) -> str:
    return "".join(f", {count} {what}" for what, count in render.counts.items())


def _report(rows: Rows, train: Any, held_out: Any, render: Renderer) -> None:
    """Logs what was read, from rank 0."""
    logger.info(
        "%d files, %d rows: %d for training, %d held out%s",
        rows.num_files, len(rows), len(train), len(held_out), _told(render),
    )  # fmt: skip
    if isinstance(train, Samples) and train.trained is not None:
        logger.info("%d tokens, %d of them have labels", len(train.tokens), int(train.trained.sum()))
    size = render.config.block_size
    for what, done in (("cut", "were cut to"), ("too long", "were left out: more than")):
        if render.counts[what]:
            logger.warning("%d rows %s data.block_size=%d tokens", render.counts[what], done, size)
    if render.counts["nothing to train"]:
        logger.warning("%d rows were left out: no token has a label", render.counts["nothing to train"])
