"""The recorder names the place of planted faults under three engines, and raises no alarm without one."""

from dataclasses import replace

import pytest
import torch

from fsdp2x.compare.engines import ENGINES
from fsdp2x.compare.judge import judge
from fsdp2x.compare.recorder import Recorder
from fsdp2x.compare.report import describe
from harness import distributed
from planted_faults import FAULTS, Case, clean_cases, is_right_place, record, references

ENGINES_OF_SCRIPTS = ("fsdp2x", "fsdp2", "ddp")
each_engine = pytest.mark.parametrize("engine", ENGINES_OF_SCRIPTS)
quick_engine = pytest.mark.parametrize(
    "engine", ["fsdp2x", *(pytest.param(name, marks=pytest.mark.full) for name in ("fsdp2", "ddp"))]
)
# Kinds that take seconds together. The others run with --full.
QUICK = ("mask_leaks", "one_parameter_not_reduced", "gradient_one_percent", "buffer_per_rank")


def check_fault(name, run, reference, noisy):
    fault, found = FAULTS[name], judge(run, reference, noisy)
    assert found, f"{name}: not found"
    assert is_right_place(fault, found[0].key), f"{name}: {describe(found, run, reference)}"


def check_faults(engine, names):
    case = Case(engine=engine)
    reference, noisy = references(case)
    for name in names:
        if engine in FAULTS[name].engines:
            check_fault(name, record(case, name), reference, noisy)


@distributed(timeout=120)
@quick_engine
def test_faults_are_found(ctx, engine):
    check_faults(engine, QUICK)


@pytest.mark.full
@distributed(timeout=900)
@each_engine
def test_all_faults_are_found(ctx, engine):
    check_faults(engine, FAULTS)


def check_clean(engines, cases):
    for case in cases:
        reference, noisy = references(case)
        for engine in engines:
            if case.half and engine == "ddp":
                continue
            run = record(replace(case, engine=engine))
            assert run.order.keys() == reference.order.keys()
            found = judge(run, reference, noisy)
            assert not found, f"{case} {engine}: {describe(found, run, reference)}"


@distributed(timeout=120)
@quick_engine
def test_clean_runs_agree(ctx, engine):
    check_clean([engine], [Case(half=engine != "ddp")])


@pytest.mark.full
@distributed(timeout=3600)
def test_all_clean_runs_agree(ctx):
    """All engines have the same reference, which costs two of five runs."""
    check_clean(ENGINES_OF_SCRIPTS, clean_cases())


@distributed
@pytest.mark.parametrize(
    "engine", ["unsharded", "ddp", *(pytest.param(name, marks=pytest.mark.full) for name in ("fsdp2", "fsdp2x"))]
)
def test_engines_replace_ddp_and_fully_shard(ctx, engine):
    """A script of each kind agrees with the unsharded side under every replacement."""
    for script in ("ddp", "fsdp2", "fsdp2x"):
        if (script, engine) == ("ddp", "ddp"):
            continue
        reference, noisy = references(Case())
        found = judge(record(Case(engine=script), engine=engine), reference, noisy)
        assert not found, f"{script}: {found[0]}"


@distributed
def test_nothing_stays_patched(ctx):
    before = torch.nn.Module.__call__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    with Recorder(ENGINES["fsdp2x"]()):
        assert torch.autograd.backward is not before[1]
    assert (torch.nn.Module.__call__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == before
    assert not torch.nn.modules.module._global_forward_hooks
