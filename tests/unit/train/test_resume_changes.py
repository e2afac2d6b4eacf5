"""What a resumed run says of its checkpoint's run: settings, tokenizers, and how to restore a step."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from fsdp2x.checkpoint import CheckpointError
from fsdp2x.train import parse_config
from fsdp2x.train.parse import apply_overrides
from fsdp2x.train.resume import compare_runs, describe_run
from fsdp2x.train.strategy import resolve_batching
from fsdp2x.train.tokenizer import make_tokenizer
from training import MODEL, WORDS, make_words, settings


def described(tmp_path, ranks, overrides=(), tokenizer="bytes"):
    sizes = ["train.batch_size=null", "train.accumulation=null", f"data.tokenizer={tokenizer}"]
    config = parse_config(apply_overrides(settings(tmp_path, tmp_path / "run"), [*sizes, *overrides]))
    inputs = SimpleNamespace(tokenizer=make_tokenizer(str(tokenizer)), batching=resolve_batching(config.train, ranks))
    inputs.num_readers, inputs.world = ranks, SimpleNamespace(size=ranks)
    return config, describe_run(config, inputs, AutoConfig.for_model(**MODEL))


def compare(before, now):
    return compare_runs({"config": before[0].model_dump(), "run": before[1]}, now[1], now[0])


WHOLE = ["train.global_batch_size=6", "train.batch_size=null", "train.accumulation=null"]
# Ranks and settings before and now -> the overrides that the sentence names, or its end.
STEPS = [
    (2, ["train.batch_size=2"], 1, ["train.batch_size=2"], ["train.accumulation=2"]),
    (2, ["train.batch_size=2"], 1, ["train.batch_size=4"], "The number of sequences is the same"),
    (1, ["train.batch_size=6"], 2, ["train.batch_size=6"], WHOLE),
    (2, ["train.global_batch_size=6"], 2, ["train.global_batch_size=4"], WHOLE),
    (4, ["train.batch_size=1", "train.accumulation=3"], 2, ["train.batch_size=1"], ["train.accumulation=6"]),
    (2, ["train.batch_size=2"], 3, ["train.batch_size=2"], "a number of data-parallel ranks that divides 4"),
]


@pytest.mark.parametrize(("ranks", "before", "ranks_now", "now", "way"), STEPS)
def test_a_step_of_another_size_is_said_with_the_settings_that_restore_it(tmp_path, ranks, before, ranks_now, now, way):
    first = described(tmp_path, ranks, before)
    said = compare(first, described(tmp_path, ranks_now, now))
    if isinstance(way, str):
        assert said[0].endswith(way)
        return
    assert all(override in said[0] for override in way) and "In the run of the checkpoint it had" in said[0]
    restored = compare(first, described(tmp_path, ranks_now, [*now, *way]))
    assert all(one.endswith("The number of sequences is the same") for one in restored)


def test_changed_settings_of_steps_are_said(tmp_path):
    changed = described(tmp_path, 1, ["train.clip=0.5", "train.seed=8"])
    assert compare(described(tmp_path, 1), changed) == [
        "train.clip was 1.0 in the run of the checkpoint, and is 0.5. To restore it set 1.0",
        "train.seed was 3 in the run of the checkpoint, and is 8. To restore it set 3",
    ]


def test_tokenizers_are_compared_by_what_they_do(tmp_path):
    runs = {"bytes": described(tmp_path, 1)}
    for name, words in (("one", WORDS), ("same", WORDS), ("other", [*WORDS[1:], WORDS[0]])):
        make_words(words).save_pretrained(tmp_path / name)
        runs[name] = described(tmp_path, 1, tokenizer=tmp_path / name)
    assert compare(runs["one"], runs["same"]) == []
    for other in ("other", "bytes"):
        with pytest.raises(CheckpointError, match=f"data.tokenizer was .*/one .* and is .*{other}"):
            compare(runs["one"], runs[other])


@pytest.mark.parametrize("saved", [None, 3, {}, {"run": 1}, {"run": {"name": "of another program"}}])
def test_checkpoints_of_other_programs_say_nothing(tmp_path, saved):
    config, run = described(tmp_path, 1)
    assert compare_runs(saved, run, config) == []
