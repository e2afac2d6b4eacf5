"""The simulator: what must hold of any schedule on any machine, published figures, and mistakes in what is asked."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2x.cli import main
from fsdp2x.memory.plan import planned_facts
from fsdp2x.memory.steps import MicroBatches
from fsdp2x.simulate.lanes import Collective, Task, play
from fsdp2x.simulate.machines import MACHINES, Axis, Machine
from fsdp2x.simulate.schedules import PEERS
from fsdp2x.simulate.step import OURS, Simulation, simulate
from fsdp2x.simulate.work import work_of
from training import MODEL

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
H100 = MACHINES["h100"]


@functools.cache
def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


LLAMA3_8B = (32, 4096, 14336, 32, 8, 128256)


def step_of(model, world: int, machine: Machine = H100, name: str = OURS, **options) -> Simulation:
    tokens = options.pop("tokens", 4096)
    facts = planned_facts(model, world, mp_policy=MIXED, replicas=options.pop("replicas", 1))
    peers = () if name == OURS else (name,)
    return simulate(
        model, facts, machine, tokens=tokens, sequence_length=options.pop("sequence_length", tokens), mfu=0.4,
        peers=peers, **options,
    )  # fmt: skip


# ---- properties


@st.composite
def schedules(draw) -> list[Task]:
    """Gathers, uses, compute and reductions in any order; of groups inside a node, between nodes and of one rank."""
    tasks = []
    for key in range(draw(st.integers(1, 8))):
        axis = draw(st.sampled_from([Axis(1, 1), Axis(8, 8), Axis(64, 8), Axis(16, 1)]))
        kind = draw(st.sampled_from(["gather", "reduce"]))
        names = ["all_gather"] if kind == "gather" else ["reduce_scatter", "all_reduce"]
        sizes = st.lists(st.integers(0, 2**30), max_size=3)
        calls = tuple(Collective(draw(st.sampled_from(names)), size, axis) for size in draw(sizes))
        seconds = st.floats(0, 1e-2)
        tasks.append(
            Task(
                kind,
                key,
                calls,
                draw(st.integers(0, 4)),
                draw(seconds),
                draw(seconds) * (kind == "reduce"),
                draw(seconds),
                draw(seconds),
                draw(st.sampled_from(["compute", "use"])),
                draw(st.booleans()),
            )  # fmt: skip
        )
        tasks.append(Task("run", compute_s=draw(seconds)))
        if draw(st.booleans()):
            tasks.append(Task("use" if kind == "gather" else "reduced", draw(st.integers(0, key))))
    return tasks


@settings(max_examples=60, deadline=None)
@given(schedules(), st.sampled_from([*MACHINES.values()]), st.floats(1.0, 10.0), st.booleans())
def test_faster_links_are_never_slower_and_exposure_is_part_of_the_communication(tasks, machine, factor, is_device):
    machine = replace(machine, is_device=is_device)
    faster = replace(
        machine,
        inside_bytes_per_s=factor * machine.inside_bytes_per_s,
        across_bytes_per_s=factor * machine.across_bytes_per_s,
    )
    now, then = play(tasks, machine), play(tasks, faster)
    alone = play(tasks, machine, has_instant_links=True)
    rounding = 1e-9
    assert then.step_s <= now.step_s + rounding and then.communication_s <= now.communication_s + rounding
    assert -rounding <= now.step_s - alone.step_s <= now.communication_s + rounding
    assert alone.communication_s == 0 and now.compute_s == alone.compute_s and now.host_s == alone.host_s
    assert now.step_s >= max(now.compute_s, now.host_s) - rounding


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*MACHINES.values()]),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(0, 9),
    st.integers(0, 2**32),
)
def test_more_ranks_wait_longer_and_more_bytes_take_longer(machine, kind, power, num_bytes):
    fewer, more = machine.axis(2**power), machine.axis(2 ** (power + 1))
    assert machine.collective_s_of(kind, 0, fewer) <= machine.collective_s_of(kind, 0, more)
    assert machine.collective_s_of(kind, num_bytes, more) <= machine.collective_s_of(kind, 2 * num_bytes, more)
    assert machine.collective_s_of(kind, num_bytes, machine.axis(1)) == 0


@pytest.mark.parametrize("name", [OURS, *PEERS])
def test_one_rank_talks_to_nobody(name):
    step = step_of(llama(2, 64, 128, 4, 2, 96), 1, name=name).steps[-1]
    assert step.communication_s == step.exposed_s == step.sent_bytes == 0 < step.compute_s <= step.step_s


@pytest.mark.parametrize("name", [OURS, *PEERS])
def test_steps_of_more_ranks_send_more_and_take_what_is_exposed(name):
    model = llama(2, 64, 128, 4, 2, 96)
    steps = [step_of(model, world, name=name).steps[-1] for world in (1, 2, 8, 64, 1024)]
    assert [step.sent_bytes for step in steps] == sorted(step.sent_bytes for step in steps)
    assert [step.communication_s for step in steps] == sorted(step.communication_s for step in steps)
    assert all(0 <= step.exposed_s <= step.communication_s for step in steps)


def test_replicas_of_a_node_send_little_between_nodes():
    model = llama(2, 64, 128, 4, 2, 96)
    whole, replicated = step_of(model, 64).steps[0], step_of(model, 64, replicas=8).steps[0]
    assert replicated.communication_s < whole.communication_s
    assert replicated.all_reduce_bytes > whole.all_reduce_bytes == 0


def test_micro_batches_gather_each_time_and_reduce_once():
    model = llama(2, 64, 128, 4, 2, 96)
    one, four = (step_of(model, 8, micro_batches=MicroBatches(num)).steps[0] for num in (1, 4))
    assert four.gather_bytes == 4 * one.gather_bytes and four.reduce_bytes == one.reduce_bytes
    assert 3 * one.step_s < four.step_s < 4.5 * one.step_s


def test_work_is_that_of_the_formula():
    """Two operations a weight and token, the embedding left out, and four a pair of tokens for attention."""
    model = llama(*LLAMA3_8B)
    forward = sum(one.flops for one in work_of(model, 1, 8192).values())
    weights = sum(param.numel() for param in model.parameters() if param.dim() > 1) - 128256 * 4096
    assert forward == 2 * weights + 4 * 32 * 4096 * 8192


# ---- published behaviour


def test_stock_from_8_to_128_h100s():
    """Llama 3.1 8B, 2 samples of 8,192 a rank: 5,762 and 5,605 tokens/s, compiled 6,667 and 6,514: 2.7 and 2.3 % less.

    github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md. The model is held to the same rate at 8
    GPUs, by its MFU, and to the published loss at 128 within three points: it loses nothing there, since eight adapters
    carry as much as rings over NVLink.
    """
    model = llama(*LLAMA3_8B)
    eight, many = (
        simulate(
            model, planned_facts(model, world, mp_policy=MIXED), H100, tokens=2 * 8192, sequence_length=8192,
            mfu=0.346, peers=("fsdp2",),
        ).steps[-1].step_s
        for world in (8, 128)
    )  # fmt: skip
    assert 2 * 8192 / eight == pytest.approx(5762, rel=0.02)
    assert 1 - eight / many == pytest.approx(0.025, abs=0.03)


# Layers, shape and vocabulary, GPUs, tokens of a rank and iteration time of YaFSDP in seconds: runs without
# checkpointing of github.com/yandex/YaFSDP's README, A100 80 GB, one sample a rank.
LLAMA2_7B, LLAMA2_13B = (32, 4096, 11008, 32, 32, 32000), (40, 5120, 13824, 40, 40, 32000)
LLAMA2_34B = (48, 8192, 22016, 64, 8, 32000)
YAFSDP = [
    (LLAMA2_7B, 64, 2048, 0.81), (LLAMA2_7B, 64, 4096, 1.16), (LLAMA2_7B, 64, 8192, 2.23),
    (LLAMA2_7B, 128, 2048, 0.87), (LLAMA2_7B, 128, 4096, 1.19), (LLAMA2_13B, 128, 2048, 1.55),
    (LLAMA2_13B, 128, 4096, 2.06), (LLAMA2_34B, 128, 2048, 3.39), (LLAMA2_34B, 256, 2048, 3.51),
    (LLAMA3_8B, 64, 2048, 0.97), (LLAMA3_8B, 64, 4096, 1.36),
]  # fmt: skip
ABOUT_YAFSDP = 0.15


def test_yafsdp_on_a100s():
    """Its cluster's network is not published: the bandwidth is fitted, one number for all, and so is the MFU."""
    machine = replace(MACHINES["a100"], inside_bytes_per_s=55e9)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    errors = {}
    for shape, world, tokens, seconds in YAFSDP:
        model = llama(*shape)
        facts = planned_facts(model, world, mp_policy=bf16)
        step = simulate(model, facts, machine, tokens=tokens, sequence_length=tokens, mfu=0.6, peers=("yafsdp",)).steps[
            -1
        ]
        errors[shape[1], world, tokens] = step.step_s / seconds - 1
    assert max(map(abs, errors.values())) < ABOUT_YAFSDP, errors


def test_megatron_fsdp_against_stock():
    """Its package promises up to 25 % more speed than FSDP2: with the same units it is never slower here, nor more."""
    model = llama(*LLAMA3_8B)
    for world in (8, 64, 512):
        for tokens in (1024, 8192):
            sim = simulate(
                model,
                planned_facts(model, world, mp_policy=MIXED),
                H100,
                tokens=tokens,
                sequence_length=tokens,
                mfu=0.4,
            )
            times = {step.name: step.step_s for step in sim.steps}
            assert 1.0 <= times["fsdp2"] / times["megatron_fsdp"] <= 1.25, (world, tokens)
            assert times[OURS] <= times["fsdp2"], (world, tokens)


# ---- the command


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MODEL, "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "vocab_size": 50}))
    return path


def test_the_command_prints_steps_and_assumptions(config, capsys):
    asked = ["--world-size", "16", "--simulate", "--node", "b200", "--tokens", "512", "--mfu", "0.5"]
    assert main(["plan", str(config), *asked]) == 0
    text = capsys.readouterr().out
    assert "a step on 16 rank(s) of b200: foretold, not measured" in text and "- links: 722 GB/s" in text
    assert all(f"\n{name} " in text for name in (OURS, *PEERS))
    assert main(["plan", str(config), *asked, "--json"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulation"]
    assert simulation["world"] == 16 and simulation["tokens"] == 512
    ours = simulation["steps"][0]
    assert ours["name"] == OURS and 0 < ours["exposed_s"] <= ours["communication_s"] and ours["collectives"] > 0
    assert main(["plan", str(config), "--world-size", "16", "--json"]) == 0
    assert "simulation" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate", "--node", "h101"], "node: got 'h101', expected one of h100, b200, a100"),
        (["--simulate", "--world-size", "12"], "world_size: got 12 ranks, expected at most 8, or a multiple of 8"),
        (["--simulate", "--world-size", "48", "--replicas", "4"], "shards: got 12 ranks, expected at most 8"),
        (["--simulate", "--tokens", "0"], "tokens: got 0, expected at least 1"),
        (["--simulate", "--tokens", "64", "--sequence-length", "65"], "expected 1 to the 64 tokens of a micro-batch"),
        (["--simulate", "--mfu", "0"], "mfu: got 0.0, expected a share of the peak above 0 and at most 1"),
        (["--simulate", "--mfu", "40"], "mfu: got 40.0, expected a share"),
        (["--simulate", "--device", "cpu"], "expected cuda with --simulate"),
        (["--simulate", "--offload", "all"], "offload: got all, whose copies are not simulated; expected none"),
        (["--node", "h100"], "node: got h100, which --simulate alone reads; add it"),
        (["--tokens", "64"], "tokens: got 64, which --simulate alone reads; add it"),
        (["--recompute"], "recompute: got True, which --simulate alone reads; add it"),
    ],
)
def test_each_mistake_names_the_way_out(config, capsys, arguments, message):
    assert main(["plan", str(config), "--world-size", "16", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_expert_parallelism_is_refused_by_name(tmp_path, capsys):
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **experts, "architectures": ["Qwen3MoeForCausalLM"]}))
    asked = ["--world-size", "8", "--simulate", "--expert-parallel", "2"]
    assert main(["plan", str(tmp_path), *asked]) == 2
    assert "expert_parallel: got 2, whose exchange of tokens is not simulated" in capsys.readouterr().err


# ---- launches


def test_collectives_of_one_kind_and_group_are_one_launch_where_they_are_grouped():
    """A lone rank's task has none; replicas are another group."""
    shards, replicas = Axis(8, 8), Axis(4, 1)
    calls = (
        Collective("reduce_scatter", 10, shards),
        Collective("reduce_scatter", 20, shards),
        Collective("all_reduce", 5, replicas),
    )
    grouped = Task("reduce", 0, calls, is_one_launch=True)
    assert grouped.launches == (Collective("reduce_scatter", 30, shards), Collective("all_reduce", 5, replicas))
    assert Task("reduce", 0, calls).launches == calls
    alone = Task("gather", 0, (), 1, is_one_launch=True)
    assert alone.launches == ()
    assert play([alone], H100).host_s == H100.launch_s
    host_s = play([grouped], H100).host_s
    assert host_s == pytest.approx(2 * H100.collective_s + H100.grouped_s)


def test_the_compute_waits_for_all_reductions_over_shards_but_not_for_replicas():
    calls = [Collective("reduce_scatter", 2**28, Axis(8, 8))] * 2
    replicas = Collective("all_reduce", 2**30, Axis(8, 1))

    def compute_begins(*collectives: Collective) -> float:
        tasks = [Task("reduce", 0, tuple(collectives)), Task("reduced", 0), Task("run", compute_s=1.0)]
        return play(tasks, H100).step_s - 1.0

    one, two = compute_begins(calls[0]), compute_begins(*calls)
    assert two > 1.5 * one
    assert compute_begins(*calls, replicas) == pytest.approx(two, abs=2e-4)


def test_a_plan_counts_its_units_once(monkeypatch, tmp_path):
    from fsdp2x.commands.plan_request import Request, make_plan
    from fsdp2x.memory import plan

    counted = []
    count = plan.facts_of_plan
    monkeypatch.setattr(plan, "facts_of_plan", lambda *args, **options: counted.append(args) or count(*args, **options))
    llama(2, 64, 128, 4, 2, 256).config.save_pretrained(tmp_path)
    made = make_plan(Request(str(tmp_path), world_size=8, simulate=True))
    assert len(counted) == 1
    assert made.simulation.world == 8 and made.report.shard_bytes > 0


@pytest.mark.parametrize("gathers", ["grouped", "in turn"])
def test_gradients_that_are_not_packed_are_collectives_of_their_own(gathers):
    """Of a dense layer the large weights, and the rest: less to copy, as many bytes to send."""
    model = llama(*LLAMA3_8B)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    packed, unpacked = (
        simulate(
            model,
            planned_facts(model, 2, mp_policy=bf16, gathers=gathers, reduces_unpacked=reduces),
            H100, tokens=4096, sequence_length=4096, mfu=0.4, peers=(),
        ).steps[0]
        for reduces in (False, True)
    )  # fmt: skip
    if gathers == "grouped":
        assert unpacked.collectives - packed.collectives == 32 * 5 + 2
        assert unpacked.collective_launches == packed.collective_launches
    else:  # of 64 MiB and more, and a quarter of the largest: the MLP's
        assert unpacked.collective_launches - packed.collective_launches == 32 * 3 + 2
    assert unpacked.compute_s < packed.compute_s
    assert unpacked.reduce_bytes == packed.reduce_bytes
    fp32 = [
        planned_facts(model, 2, mp_policy=MIXED, gathers=gathers, reduces_unpacked=reduces) for reduces in (False, True)
    ]
    sums = [[group.direct_reduce_bytes for unit in facts.units for group in unit.groups] for facts in fp32]
    assert sums[0] == sums[1], "gradients of another dtype are cast while they are packed"
