"""python -m fsdp2x.run: the untouched script sees what `python script.py` shows it, and our fully_shard."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness import programs

SCRIPT = """
import inspect, json, sys
import neighbour

class Here: pass

import torch.distributed.fsdp as torch_fsdp
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__,
    "ours": "auto_wrap" in inspect.signature(torch_fsdp.fully_shard).parameters,
    "main": sys.modules["__main__"].Here is Here, "file": __file__,
}))
if "--fail" in sys.argv:
    sys.exit(7)
if "--raise" in sys.argv:
    raise KeyError("of the script")
"""


def _python(*words, cwd: Path, **more) -> subprocess.CompletedProcess:
    return programs.run(*words, cwd=cwd, env=programs.environment(**more), timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "neighbour.py").write_text("")
    return tmp_path


def test_script(folder):
    done = _python("-m", "fsdp2x.run", "scripts/train.py", "--lr", "1e-3", "-m", cwd=folder)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    plain = json.loads(_python("scripts/train.py", "--lr", "1e-3", "-m", cwd=folder).stdout)
    assert not plain["ours"] and seen == {**plain, "ours": True, "file": seen["file"]}
    assert os.path.samefile(folder / seen["file"], folder / plain["file"])
    assert "fsdp2x: installed in" in done.stderr


def test_module(folder):
    done = _python("-m", "fsdp2x.run", "-m", "train", "--lr", "1e-3", cwd=folder / "scripts")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    plain = json.loads(_python("-m", "train", "--lr", "1e-3", cwd=folder / "scripts").stdout)
    assert not plain["ours"] and seen == {**plain, "ours": True}


def test_exit_status_and_exceptions_are_the_scripts(folder):
    """Also: ranks other than 0 do not say that they installed."""
    failed = _python("-m", "fsdp2x.run", "scripts/train.py", "--fail", cwd=folder, RANK="1")
    assert failed.returncode == 7 and "installed" not in failed.stderr and json.loads(failed.stdout)["ours"]
    raised = _python("-m", "fsdp2x.run", "scripts/train.py", "--raise", cwd=folder)
    assert raised.returncode == 1 and "KeyError: 'of the script'" in raised.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got nothing"),
        (["-m"], "got nothing"),
        (["--lr", "1"], "got the option --lr"),
        (["missing.py"], "no such script: missing.py"),
    ],
)
def test_mistakes(words, message, capsys):
    from fsdp2x.run import main

    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_under_torchrun(folder):
    """Two ranks train an untouched script, and it is ours that shards."""
    (folder / "train.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import FSDPModule, fully_shard\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))\n"
        "[fully_shard(part) for part in (*model, model)]\n"
        "[model(torch.ones(2, 6)).sum().backward() for _ in range(2)]\n"
        "assert isinstance(model, FSDPModule)\n"
        "open(f'{dist.get_rank()}.txt', 'w').write(type(model).__mro__[1].__module__)\n"
        "dist.destroy_process_group()\n"
        "sys.exit(0)\n"
    )
    words = [*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", "-m", "fsdp2x.run", "train.py"]
    done = _python(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [(folder / f"{rank}.txt").read_text() for rank in (0, 1)] == ["fsdp2x.lifecycle.module"] * 2
    assert done.stderr.count("fsdp2x: FSDPSequential has 3 unit(s) on 2 rank(s), transport shm\n") == 1
    assert "fsdp2x.run: " not in done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "never called fully_shard: nothing was sharded. Call it"),
        ("sys.exit()", "never called fully_shard"),
        ("sys.exit(0)", "never called fully_shard"),
        ("shard()", "no forward of a sharded model ran"),
        ("shard()(torch.ones(2, 6))", "fsdp2x: FSDPLinear has 1 unit(s) on 1 rank(s), transport local"),
        ("fork()", "fsdp2x: FSDPLinear has 1 unit(s) on 1 rank(s), transport local"),
        ("sys.exit(1)", ""),
        ("1 // 0", ""),
        ("os.environ['RANK'] = '1'", ""),
    ],
)
def test_what_was_sharded_is_said_once(tmp_path, body, said):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch, fsdp2x\n"
        "def shard():\n"
        "    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "    return fsdp2x.fully_shard(torch.nn.Linear(6, 5))\n"
        "def fork():\n"
        "    if os.fork() == 0:\n"
        "        shard()(torch.ones(2, 6)); sys.stderr.flush(); os._exit(0)\n"
        "    os.wait()\n"
        f"{body}\n"
    )
    done = _python("-m", "fsdp2x.run", "train.py", cwd=tmp_path)
    own = [line for line in done.stderr.splitlines() if line.startswith("fsdp2x") and "installed" not in line]
    assert len(own) == bool(said) and said in "".join(own), done.stderr


@pytest.mark.parametrize("words", [(), ("--auto-wrap",)])
def test_auto_wrap_is_an_option_before_the_script(tmp_path, words):
    (tmp_path / "show.py").write_text(
        "import sys, fsdp2x; print(sys.argv, fsdp2x.install(auto_wrap=len(sys.argv) > 1))"
    )
    arguments = ("x",) if words else ()
    done = _python("-m", "fsdp2x.run", *words, "show.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(["show.py", *arguments]))
