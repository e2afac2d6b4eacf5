"""Finds ranks whose process has ended, and only those whose numbers mean something here."""

import dataclasses
import subprocess
import sys
from unittest import mock

import pytest

from fsdp2x.base import processes
from fsdp2x.base.processes import Process, name_ended


@pytest.fixture
def ended() -> Process:
    """A process of this host that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = dataclasses.replace(Process.own(), pid=child.pid, start=processes.start_time(child.pid))
    assert name_ended({0: Process.own(), 7: process}, wait_s=0) == ""
    child.communicate(b"\n")
    return process


def test_an_ended_process_is_named(ended):
    assert name_ended({0: Process.own(), 7: ended}, wait_s=0) == f"rank 7 (pid {ended.pid})"


@pytest.mark.parametrize("part", range(3))
def test_processes_of_other_places_are_not(ended, part):
    """On another host, after another boot, or in a container whose processes this one does not see."""
    host = tuple("another" if i == part else value for i, value in enumerate(ended.host))
    assert name_ended({7: dataclasses.replace(ended, host=host)}, wait_s=0) == ""


def test_containers_of_one_host_differ():
    here = processes.own_host()
    with mock.patch("os.readlink", lambda path: "pid:[7]"):
        assert processes.own_host() != here
