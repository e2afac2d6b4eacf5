"""`fsdp2x doctor`: what it says holds on this machine, and follows what it is about; the command's help and version."""

import json
import os
import re
import resource
from pathlib import Path

import pytest
import torch

import fsdp2x
from fsdp2x.train.cli import main, make_parser
from fsdp2x.train.commands import doctor

ROOT = Path(__file__).resolve().parents[3]


def report(capsys, *words):
    status = main(["doctor", *words])
    return status, capsys.readouterr().out


def by_name(capsys):
    status, text = report(capsys, "--json")
    found = json.loads(text)
    assert found["can_run"] == (status == 0)
    return status, {(row["topic"], row["name"]): row for row in found["findings"]}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_this_machine_can_run(capsys):
    status, rows = by_name(capsys)
    assert status == 0
    assert rows["versions", "torch"]["value"] == torch.__version__
    assert rows["versions", "fsdp2x"]["value"] == fsdp2x.__version__
    status, text = report(capsys)
    assert status == 0 and text.splitlines()[-1].startswith("can run: yes")
    assert all(row["value"] in text for row in rows.values() if row["name"] != "/dev/shm")


def test_a_transport_that_does_not_exist(capsys, monkeypatch):
    monkeypatch.setenv("FSDP2X_TRANSPORT", "smoke")
    status, rows = by_name(capsys)
    assert status == 1 and "smoke" in rows["would be used", "transport"]["value"]
    assert report(capsys)[1].splitlines()[-1] == "can run: no, because of transport"


def test_a_process_group_that_is_asked_for(capsys, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("GPUs use a process group anyway")
    monkeypatch.setenv("FSDP2X_TRANSPORT", "process_group")
    assert "FSDP2X_TRANSPORT says so" in by_name(capsys)[1]["would be used", "transport"]["value"]


@pytest.mark.parametrize(("transport", "status"), [("auto", 0), ("shm", 1)])
def test_limits_that_keep_ranks_from_sharing_memory(capsys, monkeypatch, transport, status):
    """Said as the ranks say it (tests/dist/base/test_sharing.py)."""
    if torch.cuda.is_available():
        pytest.skip("GPUs share no memory")
    monkeypatch.setenv("FSDP2X_TRANSPORT", transport)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (doctor.LEAST_FILE_BYTES - 1, hard))
    try:
        found, rows = by_name(capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == status and "ulimit -f" in rows["would be used", "transport"]["value"]
    assert doctor.shared_memory_fault() == ""


def test_no_descriptor_is_left():
    file = os.open("/dev/null", os.O_RDONLY)
    os.close(file)
    resource_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file, resource_limits[1]))
    try:
        said = doctor.shared_memory_fault()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, resource_limits)
    assert "Too many open files" in said or "ulimit -n" in said


def test_the_size_of_the_shared_file_is_the_engines():
    least = re.search(r"kSizes = \{size_t\{1\} << (\d+),", (ROOT / "csrc/shm/shm_group.cpp").read_text())
    assert 2 ** int(least[1]) == doctor.LEAST_FILE_BYTES


def test_the_version_has_one_home():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, flags=re.MULTILINE)[1] == fsdp2x.__version__
    assert f"\nversion: {fsdp2x.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {fsdp2x.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_examples_of_the_help_can_be_parsed():
    parser = make_parser()
    text = parser.format_help()
    examples = [line.split("  ")[0] for line in re.findall(r"^  ((?:fsdp2x|torchrun) .*)$", text, flags=re.MULTILINE)]
    assert len(examples) >= 5
    for example in examples:
        words = example.removeprefix("torchrun --nproc_per_node=2 -m fsdp2x.").removeprefix("fsdp2x ").split()
        parser.parse_known_args(words)
