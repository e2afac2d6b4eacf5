"""``Vllm(llm)`` with a real ``LLM``, asleep and awake."""

import json
from pathlib import Path

import pytest
from test_vllm_server import DIGITS, run_ranks, save_model
from vllm_server import INSTALL_S, copy_engine_files, python_of_vllm, say_release

pytestmark = [pytest.mark.full, pytest.mark.timeout(INSTALL_S + 2400)]


@pytest.fixture
def path_of_engine(tmp_path):
    """A folder with what an engine's process needs of ours."""
    path = tmp_path / "path"
    path.mkdir()
    copy_engine_files(path)
    say_release(path)
    return path


def test_pushes_into_an_llm(tmp_path, path_of_engine, capsys):
    save_model("dense", tmp_path / "model")
    found = tmp_path / "found.json"
    words = [python_of_vllm(), str(path_of_engine), str(tmp_path / "model"), str(found)]
    run_ranks(Path(__file__).with_name("push_to_llm.py"), words)
    rows = {row["step"]: row for row in json.loads(found.read_text())}
    with capsys.disabled():
        print("\nan LLM of the trainer")
        for step, row in rows.items():
            said = row.get("refused")
            print(f"{step:28} " + (f"refused: {said[:60]}" if said else f"log-probs {row['apart']:.0e} apart"))
    assert "level 2 dropped the weights" in rows.pop("wake after level 2")["refused"]
    assert "has nothing for" in rows.pop("left out")["refused"]
    assert len(rows) == 6
    for row in rows.values():
        assert row["same"] and row["apart"] < DIGITS, row
