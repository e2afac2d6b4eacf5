"""Which tokenizer a run trains with, and that checkpoints and exports carry that one and no other."""

import json

import pytest

from harness import dist_run
from training import WORDS, Said, make_words, run, settings, write_model, write_text


def train(ctx, config):
    """The tokens that a run sees first, and what it warns of."""
    with Said() as said:
        return run(config).blocks.train.tolist(), said


def config_for(tmp_path, model, **data):
    config = settings(write_text(tmp_path / "text"), tmp_path / "run", data=data, train={"steps": 1, "batch_size": 1})
    return {**config, "model": model}


def exported(tmp_path):
    from transformers import AutoTokenizer

    from fsdp2x.convert import export_checkpoint

    return AutoTokenizer.from_pretrained(str(export_checkpoint(tmp_path / "run", tmp_path / "hf")))


def test_a_models_own_tokenizer_is_the_default_and_stays_with_it(tmp_path):
    path = write_model(tmp_path / "model")
    (outcome,) = dist_run(train, 1, config_for(tmp_path, {"path": str(path)}), fresh=False)
    tokens, said = outcome.value
    assert {token for row in tokens for token in row} <= set(range(len(WORDS)))
    assert WORDS.index("line") in tokens[0] and WORDS.index("<|end|>") in {t for row in tokens for t in row}
    assert not any("is not the tokenizer in" in sentence for sentence in said)
    out = exported(tmp_path)
    assert out.get_vocab() == make_words(WORDS).get_vocab()
    assert out.chat_template == "{{ messages }} of the model"


@pytest.mark.parametrize("tokenizer", ["bytes", "folder"])
def test_another_tokenizer_is_taken_by_word_and_told(tmp_path, tokenizer):
    path = write_model(tmp_path / "model", vocab_size=300)
    make_words(sorted(WORDS)).save_pretrained(str(tmp_path / "other"))
    asked = "bytes" if tokenizer == "bytes" else str(tmp_path / "other")
    (outcome,) = dist_run(train, 1, config_for(tmp_path, {"path": str(path)}, tokenizer=asked), fresh=False)
    tokens, said = outcome.value
    assert any(sentence.startswith(f"data.tokenizer={asked} is not the tokenizer in model.path=") for sentence in said)
    assert (max(max(row) for row in tokens) > len(WORDS)) == (tokenizer == "bytes")
    assert exported(tmp_path).get_vocab() != make_words(WORDS).get_vocab()


def refused(config):
    from fsdp2x.train import ConfigError, Trainer, parse_config

    with pytest.raises(ConfigError) as error:
        Trainer(parse_config(config))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_an_error(tmp_path):
    """A run without a matching tokenizer raises instead of training on the wrong tokens."""
    none = write_model(tmp_path / "none", tokenizer=False)
    assert "has no tokenizer. Set it to the directory" in refused(config_for(tmp_path, {"path": str(none)}))
    small = write_model(tmp_path / "small", vocab_size=5)
    assert "its vocabulary has 5 entries, but the tokenizer 6" in refused(config_for(tmp_path, {"path": str(small)}))
    bytes_ = config_for(tmp_path, {"path": str(small)}, tokenizer="bytes")
    assert "its vocabulary has 5 entries, but the tokenizer 257" in refused(bytes_)
    rows = config_for(tmp_path, {"path": str(small), "load": "rows"})
    assert "its vocabulary has 5 entries, but the tokenizer 6" in refused(rows)


def test_ids_beyond_the_number_of_entries_count(tmp_path):
    """Six entries whose last id is 50 need 51 rows."""
    path = write_model(tmp_path / "model")
    written = json.loads((path / "tokenizer.json").read_text())
    written["model"]["vocab"]["line"] = 50
    (path / "tokenizer.json").write_text(json.dumps(written))
    assert "its vocabulary has 40 entries, but the tokenizer 51" in refused(config_for(tmp_path, {"path": str(path)}))


@pytest.mark.parametrize("damage", ["{", "", '{"model": 3}'])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, damage):
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").write_text(damage)
    assert f"data.tokenizer: the tokenizer in {path} cannot be loaded: " in refused(
        config_for(tmp_path, {"path": str(path)})
    )
