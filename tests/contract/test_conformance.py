"""The contract of FSDP2 on fsdp2x. With CI=1 or --full also over gloo, and on FSDP2."""

import os

import pytest

from harness import programs

SUITE = ("-m", "pytest", "--noconftest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "fsdp2x.conformance.plugin")
OURS = ("--engine", "fsdp2x:fully_shard")
AT_LEISURE = () if os.environ.get("CI") else pytest.mark.full


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*OURS, "--world", "2"), id="shm"),
        pytest.param((*OURS, "--world", "1"), id="one rank", marks=AT_LEISURE),
        pytest.param(
            (*OURS, "--world", "4", "-k", "hybrid or scales or mesh or fewer or partial"), id="meshes of 2 x 2"
        ),
        pytest.param(
            (*OURS, "--world", "2", "--engine-option", "transport=process_group"), id="gloo", marks=AT_LEISURE
        ),
        pytest.param(("--engine", "torch.distributed.fsdp:fully_shard"), id="FSDP2", marks=AT_LEISURE),
    ],
)
def test_contract(words):
    ran = programs.run(*SUITE, "--pyargs", "fsdp2x.conformance", *words, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
