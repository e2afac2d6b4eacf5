"""Text files -> token blocks or samples, and the order in which ranks visit them.

One position counts the blocks that all ranks together have consumed since the start of the run, so that it means
the same at any world size:

    position      0   1   2   3   4   5   6   7 ...            position = epoch * num_blocks + index
    2 ranks, 2 each   [rank 0][rank 1][rank 0][rank 1]         block = order(epoch)[index]
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp2x.base.failures import rank_and_size, reworded
from fsdp2x.train.config import ConfigError, DataConfig
from fsdp2x.train.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Endings of files with one row a line or a record, which as text would train on braces and quotes.
ROWS = (".jsonl", ".parquet")


def find_files(
    entries: Sequence[str], *, pattern: Sequence[str] = (), exclude: Sequence[str] = (), setting: str = "data.files"
) -> list[Path]:
    """Returns the files that the entries name, sorted and each once.

    Args:
        entries: files, folders (read recursively) or globs.
        pattern: name patterns, one of which a file in a folder or glob must match. Empty: every file matches.
        exclude: name patterns. A file is skipped if a part of its path matches one.
        setting: beginning of error messages.

    Raises:
        ConfigError: an entry names no file, or a file has rows instead of text.
    """

    def wanted(path: Path) -> bool:
        if pattern and not any(fnmatch.fnmatch(path.name, one) for one in pattern):
            return False
        return not any(fnmatch.fnmatch(part, one) for part in path.parts for one in exclude)

    found: set[Path] = set()
    for entry in entries:
        path = Path(entry).expanduser()
        if path.is_dir():
            candidates = [p for p in path.rglob("*") if p.is_file()]
            kept = [p for p in candidates if wanted(p.relative_to(path))]
        elif path.is_file():
            kept = candidates = [path]
        else:
            candidates = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
            kept = [p for p in candidates if wanted(p)]
        if not kept:
            if candidates:
                why = f"{len(candidates)} files there, none passes data.pattern and data.exclude"
            elif path.is_dir():
                why = "a folder without files"
            else:
                why = "a device or a pipe, expected a file with text" if path.exists() else "no such file"
            raise ConfigError(f"{setting}: {entry}: {why}")
        found.update(kept)
    rows = next((path for path in sorted(found) if path.suffix.lower() in ROWS), None)
    if rows is not None:
        raise ConfigError(
            f"{setting}: {rows} has rows, and `fsdp2x train` reads text. Train on rows with `fsdp2x trl sft --config "
            f"FILE`, or leave such files of a folder out with data.exclude=['*{rows.suffix}']."
        )
    return sorted(found)


class Samples:
    """Token sequences of different lengths in memory, concatenated in one int32 tensor."""

    def __init__(self, tokens: torch.Tensor, ends: list[int]):
        self.tokens, self.ends = tokens, ends

    @classmethod
    def joined(cls, samples: list[torch.Tensor]) -> Samples:
        ends = [0]
        for sample in samples:
            ends.append(ends[-1] + len(sample))
        return cls(torch.cat(samples) if samples else torch.empty(0, dtype=torch.int32, device="cpu"), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, part: slice) -> Samples:
        """Returns consecutive samples, which share the memory."""
        first, last, _ = part.indices(len(self))
        return Samples(self.tokens, self.ends[first : max(last, first) + 1])

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Returns one sample as packing takes it: int64 `input_ids` of shape `[length]`."""
        return {"input_ids": self.tokens[self.ends[index] : self.ends[index + 1]].to(torch.int64)}


@dataclass(frozen=True)
class Blocks:
    """Rows of `block_size` tokens, or samples of up to as many, for training and for evaluation.

    int32, in memory, the same on every rank.
    """

    train: torch.Tensor | Samples
    held_out: torch.Tensor | Samples
    num_files: int
    num_text_bytes: int
    fingerprint: str


def read_blocks(config: DataConfig, tokenizer: Tokenizer, seed: int) -> Blocks:
    """Reads the files in a seeded order, joins them with end marks, cuts blocks, and holds out the last ones.

    A file begins with the bos token if the tokenizer adds one by default. The tail that fills no block is dropped.
    With `data.packing` the same holds for each nonempty line, which is a sample. Samples longer than `block_size` are
    cut, and a last piece of one token is dropped. Held-out blocks come from the end of the seeded order: a random
    sample of the files, or the end of the text if there is one file.
    """
    digest = hashlib.sha256()
    read = _read_text(config, config.files, tokenizer, seed, digest)
    blocks, num_blocks = read.blocks, len(read.blocks)
    num_held_out = 0 if config.validation_files else count_held_out(num_blocks, config.held_out or 0.0)
    if num_blocks - num_held_out < 1:
        raise ConfigError(
            f"data.files: {read.num_tokens} tokens in {read.num_files} files are fewer than one sequence "
            f"(data.block_size={config.block_size}). Add text or lower block_size."
        )
    packing = " packed" if config.packing else ""
    digest.update(f"{config.block_size} {num_held_out} {seed} {config.shuffle}{packing}".encode())
    split = num_blocks - num_held_out
    held_out = blocks[split:]
    if config.validation_files:
        held_out = _read_text(config, config.validation_files, tokenizer, seed, digest, "data.validation_files").blocks
        if len(held_out) == 0:
            raise ConfigError(
                f"data.validation_files: the text is shorter than one sequence (data.block_size={config.block_size}). "
                "Add text or lower block_size."
            )
    if rank_and_size()[0] == 0:  # all ranks read the same
        logger.info(
            "%d file%s, %d bytes of text, %d tokens: %d blocks of %d for training, %d held out",
            read.num_files, "s" * (read.num_files != 1), read.num_text_bytes, read.num_tokens, split,
            config.block_size, len(held_out),
        )  # fmt: skip
    return Blocks(blocks[:split], held_out, read.num_files, read.num_text_bytes, digest.hexdigest())


def count_held_out(num_examples: int, fraction: float) -> int:
    """Returns the number of held-out examples: at least one of several, and never all."""
    if not fraction or num_examples < 2:
        return round(num_examples * fraction)
    return min(max(round(num_examples * fraction), 1), num_examples - 1)


class _Text(NamedTuple):
    blocks: Any  # a tensor, or samples
    num_files: int
    num_text_bytes: int
    num_tokens: int


def _read_text(
    config: DataConfig, entries: list[str], tokenizer: Tokenizer, seed: int, digest: Any, setting: str = "data.files"
) -> _Text:
    files = find_files(entries, pattern=config.pattern, exclude=config.exclude, setting=setting)
    generator = torch.Generator().manual_seed(seed)
    files = [files[i] for i in torch.randperm(len(files), generator=generator, device="cpu").tolist()]
    end = torch.tensor([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=torch.int32, device="cpu")
    pieces: list[torch.Tensor] = []
    num_text_bytes = num_files = 0
    for file in files:
        if config.max_bytes is not None and num_text_bytes >= config.max_bytes:
            break
        with reworded(ConfigError, f"{setting}: {file}", OSError):
            text = file.read_bytes()
        if config.max_bytes is not None:
            text = text[: config.max_bytes - num_text_bytes]
        digest.update(text)
        num_text_bytes += len(text)
        num_files += 1
        parts = [line for line in text.splitlines() if line.strip()] if config.packing else [text]
        for part in parts:
            ids = tokenizer.encode(part).to(torch.int32)
            is_ended = len(ids) > 0 and ids[-1] == tokenizer.eos_id  # by the tokenizer
            pieces.append(ids if is_ended else torch.cat([ids, end]))
    num_tokens, size = sum(map(len, pieces)), config.block_size
    if config.packing:  # a sample of one token predicts nothing
        blocks = Samples.joined([part for piece in pieces for part in piece.split(size) if len(part) > 1])
    else:
        blocks = torch.cat(pieces)[: num_tokens // size * size].view(-1, size)
    return _Text(blocks, num_files, num_text_bytes, num_tokens)


class BlockStream:
    """Gives each rank its blocks of the training order. Its only state is the global position."""

    def __init__(self, blocks: Blocks, *, batch_size: int, rank: int, world_size: int, seed: int, shuffle: bool):
        self.blocks = blocks
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def epoch(self) -> int:
        return self.position // len(self.blocks.train)

    def next_batch(self) -> torch.Tensor:
        """Returns this rank's next micro-batch, int64 `[batch_size, block_size]`. Advances by all ranks' batches."""
        assert isinstance(self.blocks.train, torch.Tensor), "samples differ in length"
        return self.blocks.train[self._advance()].to(torch.int64)

    def next_samples(self) -> list[dict[str, torch.Tensor]]:
        """Returns the next `batch_size` samples, as `Samples.sample` does."""
        assert not isinstance(self.blocks.train, torch.Tensor), "blocks have one length"
        return [self.blocks.train.sample(row) for row in self._advance()]

    def _advance(self) -> list[int]:
        """Returns the block indices of this rank's next batch."""
        first = self.position + self.rank * self.batch_size
        self.position += self.world_size * self.batch_size
        return [self._block_at(first + i) for i in range(self.batch_size)]

    def _block_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self.blocks.train))
        if not self.shuffle:
            return index
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._order = (epoch, torch.randperm(len(self.blocks.train), generator=generator, device="cpu"))
        return int(self._order[1][index])

    def state_dict(self) -> dict[str, Any]:
        num_blocks = len(self.blocks.train)
        return {
            "position": self.position,
            "epoch": self.epoch,
            "index": self.position % num_blocks,
            "num_blocks": num_blocks,
            "fingerprint": self.blocks.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continues at the state's position. Other text restarts that epoch. Returns differences as sentences."""
        if state["fingerprint"] == self.blocks.fingerprint:
            self.position = int(state["position"])
            return []
        self.position = int(state["epoch"]) * len(self.blocks.train)
        return [f"the training text differs from that of the checkpoint, so its epoch {state['epoch']} starts again"]


def held_out_batches(
    held_out: torch.Tensor, *, batch_size: int, rank: int, world_size: int
) -> list[tuple[torch.Tensor, float]]:
    """Returns this rank's evaluation batches and the weight of each. Every rank gets the same number.

    No row counts twice: a batch has real rows and their number as weight, or weight 0 and the first row again, which
    the rank computes because forward is collective.
    """
    stride = batch_size * world_size
    batches = []
    for start in range(0, len(held_out), stride):
        first = start + rank * batch_size
        rows = held_out[first : first + batch_size]
        weight = float(len(rows))
        batches.append(((rows if weight else held_out[:1]).to(torch.int64), weight))
    return batches
