"""At its end, a process waits for gloo's threads while they run, and no longer."""

import subprocess
import sys
import threading

import pytest

from fsdp2x.base import gloo_threads
from harness import programs

# Waits for collectives and then ends. Meanwhile a gloo thread may still need the GIL to drop its tensors. This
# interpreter does not release the GIL on request.
SCRIPT = """
import sys
import torch, torch.distributed as dist
import fsdp2x
from fsdp2x.base.gloo_threads import gloo_threads

rank, store = sys.argv[1:]
dist.init_process_group("gloo", rank=int(rank), world_size=2, init_method=f"file://{store}")
sys.kept = dist.group.WORLD
sys.setswitchinterval(100)
for _ in range(3):
    dist.all_reduce(torch.ones(100))
assert gloo_threads(), "torch names gloo's threads otherwise now"
dist.destroy_process_group()
"""


def write_task(tasks, number: int, name: str, state: str):
    folder = tasks / str(number)
    folder.mkdir(exist_ok=True)
    (folder / "comm").write_text(name + "\n")
    (folder / "stat").write_text(f"{number} ({name}) {state} 1 1 1 0 -1")
    return folder


def test_a_thread_that_runs_is_waited_for(tmp_path):
    write_task(tmp_path, 1, "python", "R")
    write_task(tmp_path, 2, "pt_gloo_runloop", "S")
    write_task(tmp_path, 3, "pt_gloo_runloop", "R")
    ended = threading.Event()

    def end():
        ended.set()
        write_task(tmp_path, 3, "pt_gloo_runloop", "S")

    timer = threading.Timer(0.1, end)
    timer.start()
    assert gloo_threads.wait_until_idle(tmp_path, limit_s=60)
    assert ended.is_set()
    timer.join()


def test_a_thread_that_never_rests_does_not_hold_the_process(tmp_path):
    write_task(tmp_path, 2, "pt_gloo_runloop", "R")
    assert not gloo_threads.wait_until_idle(tmp_path, limit_s=0.05)


def run_pair_of_interpreters(store) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", SCRIPT]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(store)], **options) for rank in range(2)]
    try:
        return [(rank.wait(timeout=60), rank.stdout.read()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdout.close()


def test_real_threads_are_found(tmp_path):
    words = ("-c", SCRIPT)
    ranks = [programs.Program(*words, rank, tmp_path / "store", log=tmp_path / str(rank)) for rank in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.log.read_text() for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()


# Without the wait about one process in ten is aborted.
@pytest.mark.full
@pytest.mark.timeout(600)
def test_many_processes_end(tmp_path):
    for number in range(30):
        for code, output in run_pair_of_interpreters(tmp_path / f"store{number}"):
            assert code == 0, output
