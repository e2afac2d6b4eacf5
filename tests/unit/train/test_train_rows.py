"""Rows of files and conversations as tokens: what is trained is what the assistant says, and errors name the line."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chats import CHATML, FORGETFUL, MARKED, chat_tokenizer, contents, conversations, turn, write_rows
from fsdp2x.train.chat import COLUMNS, render_example, render_prompt
from fsdp2x.train.config import ConfigError
from fsdp2x.train.rows import Row, open_rows, read_rows


def spoken(tokenizer, labels):
    return tokenizer.decode([label for label in labels if label != -100])


@settings(deadline=None, max_examples=50)
@given(messages=conversations(), marked=st.booleans())
def test_exactly_the_assistants_tokens_are_trained(messages, marked):
    tokenizer = chat_tokenizer(MARKED if marked else CHATML)
    ids, labels = render_example(tokenizer, Row({"messages": messages}, "here:1"))
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert tokenizer.decode(ids) == text
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    end = "<|im_end|>" if marked else "<|im_end|>\n"
    assert spoken(tokenizer, labels) == "".join(m["content"] + end for m in messages if m["role"] == "assistant")
    # The first answer begins where a prompt ends.
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    prompt = render_prompt(tokenizer, messages[:first])
    assert ids[: len(prompt)] == prompt and set(labels[: len(prompt)]) == {-100} and labels[len(prompt)] != -100


@settings(deadline=None, max_examples=50)
@given(messages=conversations(), answer=contents, marked=st.booleans())
def test_of_prompt_and_completion_only_the_completion_is_trained(messages, answer, marked):
    tokenizer = chat_tokenizer(MARKED if marked else CHATML)
    messages = [*messages, turn("user", "more")]
    row = Row({"prompt": messages, "completion": [turn("assistant", answer)]}, "here:1")
    ids, labels = render_example(tokenizer, row)
    assert spoken(tokenizer, labels).rstrip("\n") == (answer + "<|im_end|>").rstrip("\n")
    assert ids[: len(render_prompt(tokenizer, messages))] == render_prompt(tokenizer, messages)


@settings(deadline=None, max_examples=50)
@given(prompt=contents, completion=contents)
def test_plain_text_ends_with_the_end_mark(prompt, completion):
    tokenizer = chat_tokenizer(None)  # which needs no template
    ids, labels = render_example(tokenizer, Row({"prompt": prompt, "completion": completion}, "here:1"))
    assert tokenizer.decode(ids) == prompt + completion + "<|im_end|>"
    assert labels[-1] == ids[-1] == tokenizer.eos_token_id
    ids, labels = render_example(tokenizer, Row({"text": prompt}, "here:1"))
    assert ids == labels and tokenizer.decode(ids) == prompt + "<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_an_error():
    messages = [turn("user", "a"), turn("assistant", "bb"), turn("user", "c"), turn("assistant", "dd")]
    with pytest.raises(ConfigError, match=r"here:7: the chat template renders.*message 2 .*generation"):
        render_example(chat_tokenizer(FORGETFUL), Row({"messages": messages}, "here:7"))
    _, labels = render_example(chat_tokenizer(FORGETFUL), Row({"messages": messages[:2]}, "here:7"))
    assert spoken(chat_tokenizer(), labels) == "bb\n"


def test_a_tokenizer_without_a_template_names_the_setting():
    with pytest.raises(ConfigError, match=r"no chat template. Set data.chat_template"):
        render_prompt(chat_tokenizer(None), [turn("user", "a")])


ANSWER = [turn("user", "a"), turn("assistant", "b")]
WRONG = {
    "JSON": ('{"text": "a', r"not valid JSON: Unterminated string.*column 10"),
    "list": ("[1, 2]", "expected a JSON object, got a list"),
    "bytes": (b"\xff\xfe{", "not valid JSON"),
    "columns": ({"conversation": []}, "expected messages, prompt and completion, or text; got conversation"),
    "half": ({"prompt": "a"}, "got prompt"),
    "null": ({"text": None}, "got nothing"),
    "type": ({"text": 3}, "text: expected text, got a int"),
    "empty text": ({"text": " "}, "text is empty"),
    "empty completion": ({"prompt": "a", "completion": ""}, "completion is empty"),
    "messages": ({"messages": "hello"}, "expected a list of messages, got a str"),
    "no messages": ({"messages": []}, "got an empty list"),
    "message": ({"messages": ["hello"]}, "message 1: expected role and content, got a str"),
    "role": ({"messages": [turn("user", "a"), turn("bot", "b")]}, "message 2: expected a role .* got 'bot'"),
    "no role": ({"messages": [{"from": "human", "value": "a"}]}, "message 1: expected a role .* got from, value"),
    "content": ({"messages": [turn("user", 3)]}, r"message 1 \(user\): expected text as content, got a int"),
    "empty answer": ({"messages": [turn("user", "a"), turn("assistant", "")]}, "message 2: the assistant's .* empty"),
    "no answer": ({"messages": [turn("user", "a")]}, "no message of the assistant"),
    "mixed": ({"prompt": "a", "completion": ANSWER}, "completion: expected text, got a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_names_file_and_line(tmp_path, name):
    row, said = WRONG[name]
    line = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    path = tmp_path / "chat.jsonl"
    path.write_bytes(json.dumps({"messages": ANSWER}).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ConfigError, match=rf"{path}:3: .*{said}"):
        for one in read_rows([str(path)], "jsonl"):
            render_example(chat_tokenizer(), one)


def test_rows_of_several_files_in_order(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"text": "3"}])
    write_rows(tmp_path / "a.json", [{"text": "1"}, {"text": "2"}])
    (tmp_path / "notes.txt").write_text("no rows")
    rows = open_rows([str(tmp_path)], "jsonl")
    assert [row.fields["text"] for row in rows] == ["1", "2", "3"] and len(rows) == 3
    assert rows[2] == Row({"text": "3"}, f"{tmp_path}/b.jsonl:1") and rows[1:] == list(rows)[1:]
    before = rows.fingerprint
    write_rows(tmp_path / "b.jsonl", [{"text": "4"}])
    assert open_rows([str(tmp_path)], "jsonl").fingerprint != before
    columns = {**COLUMNS, "text": "line"}
    assert (
        spoken(chat_tokenizer(), render_example(chat_tokenizer(), Row({"line": "x"}, "h"), columns)[1]) == "x<|im_end|>"
    )


def test_files_without_rows(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"data.files: 1 files have no rows"):
        read_rows([str(tmp_path)], "jsonl")
    with pytest.raises(ConfigError, match=r"data.validation_files: .*nothing: no such file"):
        read_rows([str(tmp_path / "nothing")], "jsonl", setting="data.validation_files")
    (tmp_path / "array.jsonl").write_text('[{"text": "a"},\n{"text": "b"}]')
    with pytest.raises(ConfigError, match=r"array.jsonl:1: not valid JSON.* one JSON array: write one object a line"):
        read_rows([str(tmp_path / "array.jsonl")], "jsonl")
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(ConfigError, match=r"packed.jsonl:1: not valid JSON"):
        read_rows([str(tmp_path / "packed.jsonl")], "jsonl")


@pytest.mark.parametrize("lazy", [False, True])
def test_parquet(tmp_path, monkeypatch, lazy):
    """Every message of a column has every key; a row is what was written, and only lazy reading leaves a copy."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    written = [{"messages": ANSWER}, {"messages": [turn("user", "c"), {**turn("assistant", "d"), "name": "n"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "chat.parquet")
    rows = open_rows([str(tmp_path)], "parquet", lazy=lazy)
    assert [row.fields for row in rows] == written and rows[1].where == f"{tmp_path}/chat.parquet, row 2"
    assert (tmp_path / "cache").exists() == lazy
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"bad.parquet: cannot be read as parquet"):
        open_rows([str(tmp_path / "bad.parquet")], "parquet", lazy=lazy)
