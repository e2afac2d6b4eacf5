"""Data: the same text, order and split for everybody, and a position that means the same at any world size."""

import pytest
import torch

from fsdp2x.train.config import ConfigError, DataConfig
from fsdp2x.train.data import Blocks, BlockStream, find_files, held_out_batches, read_blocks
from fsdp2x.train.tokenizer import ByteTokenizer, make_tokenizer
from training import write_text


def numbered_blocks(num_train, num_held_out=0, fingerprint="f"):
    rows = torch.arange(num_train + num_held_out, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    return Blocks(rows[:num_train], rows[num_train:], 1, 0, fingerprint)


def stream(blocks, rank=0, world_size=1, batch_size=2, seed=0, shuffle=True):
    return BlockStream(blocks, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed, shuffle=shuffle)


def take(streams, num_batches):
    """Block numbers in global order: rank after rank, micro-batch after micro-batch."""
    return [n for _ in range(num_batches) for s in streams for n in s.next_batch()[:, 0].tolist()]


def test_text_is_cut_into_blocks_without_loss(tmp_path):
    folder = write_text(tmp_path / "text")
    config = DataConfig(files=[str(folder)], block_size=16, held_out=0.2)
    blocks = read_blocks(config, ByteTokenizer(), seed=1)
    tokens = torch.cat([blocks.train, blocks.held_out]).flatten()
    end = ByteTokenizer().eos_id
    documents = [file.read_bytes() for file in folder.iterdir()]
    length = sum(len(d) + 1 for d in documents)
    assert len(tokens) == length // 16 * 16
    text = bytes(tokens[tokens != end].tolist())
    pieces = [d for d in documents if d in text]
    assert len(pieces) >= len(documents) - 1  # all but the one whose tail was dropped
    assert len(blocks.held_out) == round((length // 16) * 0.2)
    assert (tokens == end).sum() in (len(documents), len(documents) - 1)


def test_reading_is_deterministic_and_depends_on_the_seed(tmp_path):
    config = DataConfig(files=[str(write_text(tmp_path / "text"))], block_size=16)
    first, again, other = (read_blocks(config, ByteTokenizer(), seed=s) for s in (1, 1, 2))
    assert torch.equal(first.train, again.train) and first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


def test_files_folders_globs_and_filters(tmp_path):
    for name in ("a.py", "b.txt", "sub/c.py", "sub/test/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(files, **filters):
        paths = find_files([str(tmp_path / f) for f in files], **filters)
        return [str(p.relative_to(tmp_path)) for p in paths]

    assert names([""]) == ["a.py", "b.txt", "sub/c.py", "sub/test/d.py"]
    assert names([""], pattern=["*.py"], exclude=["test"]) == ["a.py", "sub/c.py"]
    assert names(["*.py"]) == ["a.py"]
    assert names(["**/*.py"]) == ["a.py", "sub/c.py", "sub/test/d.py"]
    assert names(["b.txt", "b.txt"], pattern=["*.py"]) == ["b.txt"]  # named outright: no filter
    with pytest.raises(ConfigError, match="nothing: no such file"):
        names(["nothing"])
    with pytest.raises(ConfigError, match="4 files there, none passes"):
        names([""], pattern=["*.rs"])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_files_of_rows_are_not_text(tmp_path, name):
    write_text(tmp_path / "text")
    (tmp_path / "text" / name).write_text("{}")
    for entry in (tmp_path / "text", tmp_path / "text" / name, tmp_path / "text" / "*"):
        with pytest.raises(ConfigError, match=rf"data.files: .*{name} has rows, .* `fsdp2x trl sft --config FILE`"):
            find_files([str(entry)])
    assert len(find_files([str(tmp_path / "text")], exclude=[f"*{name[4:]}"])) == 6


def test_max_bytes_stops_reading(tmp_path):
    config = DataConfig(files=[str(write_text(tmp_path / "text"))], block_size=8, max_bytes=400)
    assert read_blocks(config, ByteTokenizer(), seed=0).num_text_bytes == 400


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="6 tokens .*data.block_size=512"):
        read_blocks(DataConfig(files=[str(tmp_path)]), ByteTokenizer(), seed=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_visit_the_order_of_one_rank(world_size):
    blocks = numbered_blocks(24)
    alone = take([stream(blocks, batch_size=2)], 12)
    together = take([stream(blocks, r, world_size, batch_size=2) for r in range(world_size)], 12 // world_size)
    assert together == alone[: len(together)]
    assert sorted(alone) == list(range(24))


def test_epochs_differ_and_each_is_complete():
    blocks = numbered_blocks(5)
    seen = take([stream(blocks, batch_size=2)], 5)  # ten blocks: the third batch crosses the epochs
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))
    assert seen[:5] != seen[5:]
    assert take([stream(blocks, batch_size=2, shuffle=False)], 5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resume_continues_at_any_world_size(world_size):
    blocks = numbered_blocks(16)
    whole = take([stream(blocks, batch_size=1)], 32)
    before = [stream(blocks, r, 2, batch_size=2) for r in range(2)]
    assert take(before, 2) == whole[:8]
    after = [stream(blocks, r, world_size, batch_size=2) for r in range(world_size)]
    for s in after:
        assert s.load_state_dict(before[0].state_dict()) == []
    assert take(after, 8 // world_size) == whole[8:24]


def test_other_text_starts_the_epoch_anew_and_says_so():
    old = stream(numbered_blocks(10, fingerprint="old"))
    take([old], 7)
    new = stream(numbered_blocks(6, fingerprint="new"))
    (sentence,) = new.load_state_dict(old.state_dict())
    assert "epoch 1" in sentence
    assert new.position == 6


@pytest.mark.parametrize(("num_rows", "world_size", "batch_size"), [(7, 2, 2), (1, 3, 2), (12, 4, 1), (5, 1, 8)])
def test_evaluation_counts_every_row_once_and_ranks_keep_step(num_rows, world_size, batch_size):
    rows = numbered_blocks(0, num_rows).held_out
    parts = [held_out_batches(rows, batch_size=batch_size, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    counted = [n for part in parts for tokens, weight in part if weight for n in tokens[:, 0].tolist()]
    assert sorted(counted) == list(range(num_rows))
    assert sum(weight for part in parts for _, weight in part) == num_rows
    assert all(len(tokens) >= 1 for part in parts for tokens, _ in part)


# ---- the byte tokenizer: token i is byte i, also after a trip through HuggingFace's files


TEXTS = [
    "",
    "plain ascii\n\ttabs  and  spaces \n",
    "h\u00e9llo w\u00f6rld \u2014 \u65e5\u672c\u8a9e \U0001f642",
    "\x00\x01\x7f\r\n",
]


def test_saved_form_loads_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(loaded) == 257
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == 256
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == ByteTokenizer().encode(text.encode()).tolist() == list(text.encode())
        assert loaded.decode(ids) == text
    assert loaded(bytes(range(128)).decode())["input_ids"] == list(range(128))
    # ... and back in as a tokenizer directory.
    again = make_tokenizer(str(tmp_path))
    assert again.vocab_size == 257 and again.eos_id == 256
    assert again.encode(TEXTS[2].encode()).tolist() == list(TEXTS[2].encode())


@pytest.mark.parametrize(("template", "begins"), [("$A", 0), ("<s> $A", 1), ("<s> $A </s>", 1)])
@pytest.mark.parametrize("packing", [False, True])
def test_documents_have_the_special_tokens_that_the_tokenizer_adds(tmp_path, template, begins, packing):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = ByteTokenizer().inner.backend_tokenizer
    inner.add_special_tokens(["<s>", "</s>"])  # 257 and 258
    marks = [("<s>", 257), ("</s>", 258)]
    inner.post_processor = TemplateProcessing(single=template, special_tokens=marks)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path / "t")
    (tmp_path / "text.txt").write_text("abc")
    config = DataConfig(files=[str(tmp_path / "text.txt")], block_size=4 + begins, held_out=0.0, packing=packing)
    read = read_blocks(config, make_tokenizer(str(tmp_path / "t")), seed=1).train
    assert (read.tokens if packing else read.flatten()).tolist() == [257] * begins + [*b"abc", 258]


def test_a_missing_directory_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: got '/no/such'"):
        make_tokenizer("/no/such")
