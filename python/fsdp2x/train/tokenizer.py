"""Tokenizers for training: plain bytes, or a HuggingFace tokenizer from a directory."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from fsdp2x.api import TOKENIZER_FILES
from fsdp2x.base.failures import reworded
from fsdp2x.train.config import ConfigError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """A HuggingFace tokenizer. It adds special tokens, such as bos, as it does by default."""

    def __init__(self, inner: Any):
        self.inner = inner
        # An id may lie beyond the number of entries.
        self.vocab_size = 1 + max(len(self.inner) - 1, *self.inner.get_vocab().values())
        self.eos_id = self.inner.eos_token_id

    def encode(self, text: bytes) -> torch.Tensor:
        """Converts UTF-8 bytes of one document to 1-D int64 ids."""
        ids = self.inner(text.decode("utf-8", errors="replace"), verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64, device="cpu")

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what the tokenizer does. Other files of the same tokenizer have the same."""
        vocabulary = sorted(self.inner.get_vocab().items(), key=lambda item: item[1])
        does = [vocabulary, self.eos_id, self.encode(_PROBE.encode()).tolist()]
        return hashlib.sha256(repr(does).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Writes files that `transformers.AutoTokenizer.from_pretrained(folder)` loads."""
        self.inner.save_pretrained(str(folder))


class ByteTokenizer(Tokenizer):
    """Token i is byte i for i < 256. 256 ends a document and is also bos and pad."""

    fingerprint = "bytes"

    def __init__(self) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # A byte-level BPE without merges: the pre-tokenizer maps each byte to one character, which is one token.
        vocab = {character: byte for byte, character in bytes_to_unicode().items()}
        tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
        super().__init__(
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **marks)
        )

    def encode(self, text: bytes) -> torch.Tensor:
        """Does the same fast, also for bytes that are not UTF-8, and adds no end mark."""
        if not text:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


_PROBE = "Ab 12345, don't\n\tna\u00efve  \u65e5\u672c\u8a9e \U0001f642 <|endoftext|>"


def _load(folder: str) -> Any:
    from transformers import AutoTokenizer

    path = Path(folder).expanduser()
    if not has_tokenizer(path):
        raise ConfigError(f"data.tokenizer: got {folder!r}, expected 'bytes' or a local directory with a tokenizer")
    # A damaged file makes transformers, tokenizers and sentencepiece raise exceptions of any type.
    with reworded(ConfigError, f"data.tokenizer: the tokenizer in {path} cannot be loaded", Exception):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def has_tokenizer(folder: str | Path) -> bool:
    return any((Path(folder).expanduser() / name).is_file() for name in TOKENIZER_FILES)


def choose_tokenizer(asked: str | None, model_path: str | None) -> str:
    """Returns the tokenizer for `data.tokenizer` and `model.path`: a pretrained model already has one."""
    if asked is not None:
        return asked
    if model_path is None:
        return "bytes"
    if not has_tokenizer(model_path):
        raise ConfigError(
            f"data.tokenizer: unset, but model.path={model_path} has no tokenizer. Set it to the directory of the "
            "model's tokenizer, or to 'bytes'."
        )
    return model_path


def replaces_tokenizer(asked: str | None, model_path: str | None) -> bool:
    """Returns whether a model that has a tokenizer is trained with another one."""
    if asked is None or model_path is None or not has_tokenizer(model_path):
        return False
    return asked == "bytes" or Path(asked).expanduser().resolve() != Path(model_path).expanduser().resolve()


def make_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else Tokenizer(_load(name))
