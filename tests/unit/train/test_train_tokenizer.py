"""The byte tokenizer: token i is byte i, also after a trip through HuggingFace's files."""

import pytest
import torch

from fsdp2x.train.config import ConfigError
from fsdp2x.train.tokenizer import ByteTokenizer, byte_alphabet, make_tokenizer

TEXTS = [
    "",
    "plain ascii\n\ttabs  and  spaces \n",
    "h\u00e9llo w\u00f6rld \u2014 \u65e5\u672c\u8a9e \U0001f642",
    "\x00\x01\x7f\r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_bytes(text):
    ids = ByteTokenizer().encode(text.encode())
    assert ids.dtype == torch.int64
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode([*ids.tolist(), 256]) == text


def test_alphabet_is_256_different_characters():
    assert len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord("A")] == "A"


def test_saved_form_loads_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(loaded) == 257
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == 256
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == list(text.encode())
        assert loaded.decode(ids) == text
    assert loaded(bytes(range(128)).decode())["input_ids"] == list(range(128))
    # ... and back in as a tokenizer directory.
    again = make_tokenizer(str(tmp_path))
    assert again.vocab_size == 257 and again.eos_id == 256
    assert again.encode(TEXTS[2].encode()).tolist() == list(TEXTS[2].encode())


def test_a_missing_directory_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: got '/no/such', expected 'bytes' or a local"):
        make_tokenizer("/no/such")
