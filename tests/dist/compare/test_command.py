"""`fsdp2x compare`: its report, and its exit status for runs that agree, differ, and fail."""

from harness import programs

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()
    if "double" in sys.argv and step == 1:
        model[2].weight.grad.mul_(2)
    if "fail" in sys.argv and step == 1 and dist.get_rank() == 1:
        raise ValueError("a bad row")
    if "hang" in sys.argv and dist.get_rank() == 1:
        import time
        time.sleep(100)
    optimizer.step()
    optimizer.zero_grad()
"""


def compare(folder, *words):
    (folder / "train.py").write_text(SCRIPT)
    return programs.run("-m", "fsdp2x", "compare", *words, cwd=folder, timeout=240)


def test_agreeing_runs(tmp_path):
    done = compare(tmp_path, "--against", "unsharded", "--steps", "2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no difference: a and b agree in all" in done.stdout


def test_the_first_difference_is_measured(tmp_path):
    done = compare(tmp_path, "--a", "train.py double", "--b", "train.py", "--against", "unsharded", "--steps", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("first difference:"))
    assert line == "first difference: gradient after reduction of 2.weight, step 1 (all ranks)"
    assert "relative error 1.00e+00" in done.stdout
    assert "100.0% of 15 elements differ, up to 8.39e+06 ulps" in done.stdout
    assert "a is 2 times b" in done.stdout
    assert "right before, and equal: gradient after reduction of 0.bias" in done.stdout


def test_a_side_that_fails(tmp_path):
    done = compare(tmp_path, "--a", "train.py fail", "--b", "train.py")
    assert done.returncode == 2
    assert "side a (train.py fail, sharded as the script says) failed. Rank 1" in done.stderr
    assert "ValueError: a bad row" in done.stderr


def test_a_side_that_hangs(tmp_path):
    done = compare(tmp_path, "--a", "train.py hang", "--b", "train.py", "--timeout", "15")
    assert done.returncode == 2
    assert "took longer than 15 s" in done.stderr


def test_mistakes(tmp_path):
    for words, message in (
        (["train.py"], "both runs are the same"),
        (["--against", "fsdp2", "other.py"], "no such script: other.py"),
        (["--against", "fsdp2"], "no script"),
        (["--a", "train.py", "--b", "train.py x", "train.py"], "either --a and --b, or a script"),
    ):
        done = compare(tmp_path, *words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
