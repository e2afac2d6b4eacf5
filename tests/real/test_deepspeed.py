"""DeepSpeed: the keys of the page of migration are its own, and ZeRO-3 is a peer that computes what the others do."""

import json
import os
import re
import subprocess
from pathlib import Path

from environments import python_with

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrate" / "deepspeed.md"


def run(*words: object, **more: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}
    command = [python_with("deepspeed"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def keys_of_the_page() -> list[tuple[str, str]]:
    """Section and key of each row of the two tables of keys."""
    found = []
    for section, title in (("", "Keys of its configuration"), ("zero_optimization", "Keys of `zero_optimization`")):
        table = PAGE.read_text().partition(title)[2].partition("| --- |")[2].partition("\n\n")[0]
        for cell in re.findall(r"^\| ([^|]*) \|", table, flags=re.MULTILINE):
            for name in re.findall(r"`(\w+(?:\.\w+)?)(?:: \w+)?`", cell):
                inner, _, key = name.rpartition(".")
                found.append((inner or section, key))
    return found


def test_the_keys_of_the_page_are_its_own(tmp_path):
    run(Path(__file__).parent / "scripts" / "deepspeed_keys.py", tmp_path / "keys.json")
    known = json.loads((tmp_path / "keys.json").read_text())
    named = keys_of_the_page()
    assert len(named) > 25 and ("fp16", "loss_scale") in named and ("zero_optimization", "stage") in named
    unknown = [(section, key) for section, key in named if key not in known[section]]
    assert not unknown
    assert "stage4" not in known["zero_optimization"] and "bf32" not in known[""]


def test_zero_3_is_measured_beside_the_others(tmp_path):
    """There is no row unless its losses are those of stock FSDP2."""
    bench = ROOT / "benchmarks" / "bench_step.py"
    run(bench, "--cases", "many", "--steps", "2", "--json", tmp_path / "step.json", TORCH_EXTENSIONS_DIR=str(tmp_path))
    text = (tmp_path / "step.json").read_text()
    assert '"zero3"' in text
