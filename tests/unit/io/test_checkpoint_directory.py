"""The folder of checkpoints: whatever the moment of a kill, the latest whole checkpoint is found."""

import os
import shutil

import pytest

from fsdp2x.checkpoint import CheckpointError
from fsdp2x.io.checkpoint import directory
from fsdp2x.io.checkpoint.directory import prepare, publish, repair, resolve, retain, step_name, whole_checkpoints


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


def save(root, step, content):
    temporary = prepare(root, step)
    (temporary / "manifest.json").write_text(content)
    return publish(root, step)


def content_of(root):
    return (resolve(root) / "manifest.json").read_text()


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_save_and_find(tmp_path):
    save(tmp_path, 5, "five")
    final = save(tmp_path, 10, "ten")
    assert final == tmp_path / "step-000010"
    assert content_of(tmp_path) == "ten"
    assert resolve(tmp_path / "step-000005") == tmp_path / "step-000005"
    assert names(tmp_path) == ["latest", "step-000005", "step-000010"]


def test_the_output_folder_of_a_run_works_too(tmp_path):
    save(tmp_path / "checkpoints", 5, "five")
    assert content_of(tmp_path) == "five"


@pytest.mark.parametrize("step", [2, 1])  # a new step, and one that replaces itself
def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    calls = 0
    kill_at = None

    def counted(original):
        def call(*args, **keywords):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise Killed
            return original(*args, **keywords)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    seen = set()
    for kill_at in range(1, 30):
        root = tmp_path / str(kill_at)
        calls = -1000
        save(root, 1, "old")
        calls = 0
        try:
            save(root, step, "new")
        except Killed:
            pass
        else:
            break
        found = content_of(root)
        seen.add(found)
        calls = -1000
        repair(root)
        assert content_of(root) == found
        assert all(name == "latest" or name.startswith("step-") for name in names(root))
        save(root, 3, "next")
        assert content_of(root) == "next"
    assert seen == {"old", "new"}
    assert kill_at > 5


def test_retention_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, str(step))
        retain(tmp_path, 2)
    assert [path.name for path in whole_checkpoints(tmp_path)] == [step_name(3), step_name(4)]
    assert names(tmp_path) == ["latest", step_name(3), step_name(4)]


def test_retention_after_going_back_keeps_the_new_run(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, "first run")
    save(tmp_path, 15, "second run")  # resumed from step 10
    retain(tmp_path, 2)
    assert content_of(tmp_path) == "second run"
    assert [path.name for path in whole_checkpoints(tmp_path)] == [step_name(10), step_name(15)]


def test_a_kill_while_deleting_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, str(step))

    def killed(path, *args, **keywords):
        (path / "manifest.json").unlink()
        raise Killed

    monkeypatch.setattr(directory.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        retain(tmp_path, 1)
    assert [path.name for path in whole_checkpoints(tmp_path)] == [step_name(2)]
    monkeypatch.undo()
    repair(tmp_path)
    assert names(tmp_path) == ["latest", step_name(2)]


def test_what_a_kill_left_is_removed_and_said(tmp_path, caplog):
    save(tmp_path, 1, "one")
    with caplog.at_level("WARNING", logger="fsdp2x"):
        repair(tmp_path)
        assert not caplog.messages
        (prepare(tmp_path, 2) / "half").write_text("x")
        os.rename(tmp_path / step_name(1), tmp_path / f".old-{step_name(1)}")
        repair(tmp_path)
    removed, back = sorted(caplog.messages)
    assert removed == f"{tmp_path}/.tmp-{step_name(2)}: removed, the save that wrote it was cut off"
    assert back.startswith(f"{tmp_path}/{step_name(1)}: put back, ")
    assert names(tmp_path) == ["latest", step_name(1)] and content_of(tmp_path) == "one"


def test_what_is_no_checkpoint_is_told(tmp_path):
    for path, message in (
        (tmp_path / "nothing", "nothing: no such checkpoint"),
        (tmp_path, "neither a checkpoint .* nor a folder of them"),
        (tmp_path / "file", "got a file, expected the folder of a checkpoint"),
    ):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=message):
            resolve(path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest: got '\.\./elsewhere', expected the name"):
        resolve(tmp_path)
    (tmp_path / "latest").write_text("step-000007\n")
    with pytest.raises(CheckpointError, match="step-000007: no such checkpoint"):
        resolve(tmp_path)
