"""`fsdp2x plan`: reads configs of both kinds, plans without a process group, and names mistakes in one sentence."""

import json
import re

import pytest
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fsdp2x import HostOffloadPolicy
from fsdp2x.base.failures import ConfigError
from fsdp2x.memory import plan_memory
from fsdp2x.train.cli import main
from fsdp2x.train.commands.plan_request import COLUMNS, WORDS, explanation, parse_bytes
from models import Stack
from training import MODEL, MOE


@pytest.fixture
def config(tmp_path):
    """A config.json of 2 layers; `dtype` is what transformers would load it in."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MODEL, "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "vocab_size": 50}))
    return path


def plan_json(capsys, *arguments) -> tuple[int, dict]:
    status = main(["plan", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_config_json(config, capsys):
    on_cpu = ("--device", "cpu", "--transport", "process_group")
    status, plan = plan_json(capsys, config, "--world-size", 4, *on_cpu)
    assert status == 0 and plan["fits"] is None and plan["model"] == "Qwen3ForCausalLM"
    assert plan["policy"]["dtype"] == "bfloat16"
    assert [unit["name"] for unit in plan["report"]["units"]] == [
        "<root>",
        "model.norm, model.embed_tokens, lm_head",
        "model.layers.0",
        "model.layers.1",
    ]
    assert not dist.is_initialized()
    assert plan_json(capsys, config.parent, "--world-size", 4, *on_cpu) == (status, plan), "a folder is its config"


def test_a_training_config_and_its_overrides(tmp_path, capsys):
    path = tmp_path / "train.yaml"
    parallel = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "device": "cpu"}
    path.write_text(yaml.safe_dump({"model": {"config": MODEL}, "parallel": parallel}))
    status, plan = plan_json(capsys, path, "model.config.num_hidden_layers=3", "--world-size", 2)
    assert status == 0
    assert len(plan["report"]["units"]) == 5 and plan["report"]["transport"] == "shm"
    assert plan["policy"]["dtype"] == "float32" and plan["policy"]["param_dtype"] == "bfloat16"
    _, other = plan_json(capsys, path, "--world-size", 2, "--param-dtype", "float32", "--transport", "process_group")
    assert other["policy"]["param_dtype"] == "float32" and other["report"]["transport"] == "process_group"


def test_options_reach_the_planner(config, capsys):
    def report(*options):
        return plan_json(capsys, config, "--world-size", 4, *options)[1]["report"]

    base = report()
    assert len(report("--auto-wrap", "false")["units"]) == 1
    assert [unit["name"] for unit in report("--auto-wrap", "Qwen3MLP")["units"]].count("model.layers.0.mlp") == 1
    assert report("--reshard-after-forward", "2")["after_forward_bytes"] > 0 == base["after_forward_bytes"]
    kept = report("--reshard-after-forward", "false")
    assert kept["traffic"]["gathers"] < base["traffic"]["gathers"]
    assert kept["gather_slot_bytes"] >= base["gather_slot_bytes"]
    assert report("--optimizer", "sgd")["optimizer_bytes"] == 0
    assert report("--dtype", "float32")["shard_bytes"] > 1.9 * base["shard_bytes"] - 64 * 64
    replicated = report("--replicas", "2")
    assert (
        replicated["world"] == 2
        and replicated["traffic"]["all_reduce_bytes"] > 0 == base["traffic"]["all_reduce_bytes"]
    )


def test_parameters_that_are_counted_as_a_config_says(config, tmp_path, capsys):
    """One line has the options for float32 parameters; there is none where a dtype was given, or nothing is trained."""

    def lines(*arguments):
        assert main(["plan", *map(str, arguments), "--world-size", "2"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "as the config says" in line]

    (said,) = lines(config)
    assert said.startswith("parameters are counted in bfloat16") and said.endswith(
        ": --dtype float32 --param-dtype bfloat16"
    )
    assert lines(config, "--param-dtype", "fp16")[0].endswith(" --dtype float32 --param-dtype float16")
    assert lines(config, *said.rpartition(": ")[2].split()) == lines(config, "--dtype", "bf16") == []
    assert lines(config, "--optimizer", "none") == []
    config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
    assert lines(config) == []
    training = tmp_path / "train.yaml"
    training.write_text(yaml.safe_dump({"model": {"config": MODEL, "dtype": "bfloat16"}}))
    assert lines(training) == []


def test_whether_it_fits(config, capsys):
    _, plan = plan_json(capsys, config, "--world-size", 4)
    total = plan["report"]["peak_bytes"] + plan["runtime_bytes"] + plan["activation_bytes"]
    assert plan["total_bytes"] == total and plan["activation_bytes"] > 0
    assert plan_json(capsys, config, "--world-size", 4, "--memory", f"{total}B")[0] == 0
    status, plan = plan_json(capsys, config, "--world-size", 4, "--memory", f"{total - 1}B")
    assert status == 1 and plan["fits"] is False
    assert main(["plan", str(config), "--world-size", "4", "--memory", "1KiB", "--explain"]) == 1
    text = capsys.readouterr().out
    assert "of 1.00 KiB on each rank: does not fit" in text and "No two of the settings" in text
    assert "peak, without activations" in text


def total_of(line: str) -> int:
    return parse_bytes(line.split()[-2] + line.split()[-1])


@pytest.mark.parametrize("kind", ["config.json", "run.yaml"])
@pytest.mark.parametrize("share", [0.95, 0.5])
def test_what_would_make_it_fit_does(config, tmp_path, capsys, kind, share):
    """The printed settings, given to the command, make the run fit at the printed total."""
    model = {**MODEL, "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 300}
    config.write_text(json.dumps({**model, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": {"config": model}, "train": {"tiled_loss": False}}))
    command = [str(tmp_path / kind), "--world-size", "4", "--device", "cpu"]
    _, plan = plan_json(capsys, *command)
    memory = ("--memory", f"{int(share * plan['total_bytes'])}B")
    assert main(["plan", *command, *memory]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert 1 <= len(lines) <= 2
    for line in lines:
        words = re.sub(r"\(.*\)", "", line).split()[:-2]
        assert bool(kind == "run.yaml") == any(word.startswith("train.") for word in words) or "--world-size" in words
        status, changed = plan_json(capsys, *command, *words, *memory)
        assert status == 0 and changed["fits"] is True
        assert changed["total_bytes"] == pytest.approx(total_of(line), rel=1e-2)


def test_the_sum_adds_up(config, tmp_path, capsys):
    """The rows of the summary give the total, with experts whose activations are not estimated, too."""
    (tmp_path / "moe.yaml").write_text(yaml.safe_dump({"model": {"config": MOE}}))
    for path, more in ((config, "--offload=all"), (config, "--device=cpu"), (tmp_path / "moe.yaml", "--tokens=64")):
        assert main(["plan", str(path), "--world-size", "2", more]) == 0
        text = capsys.readouterr().out
        rows = dict(re.findall(r"^([a-zA-Z ]+?)  +([\d.]+ \w+)", text, flags=re.MULTILINE))
        total = parse_bytes(rows.pop("total"))
        summed = sum(
            parse_bytes(size) for name, size in rows.items() if name not in ("in CPU memory", "sent in a step")
        )
        assert summed == pytest.approx(total, rel=0.02), text
        assert ("not estimated" in text) == (path != config)


@pytest.mark.parametrize(
    ("options", "mib"), [((1,), 544), ((4,), 1056), ((4, "--replicas", 2), 1568), ((4, "--device", "cpu"), 0)]
)
def test_memory_of_the_runtime_is_counted_on_a_gpu(config, capsys, options, mib):
    assert plan_json(capsys, config, "--world-size", *options)[1]["runtime_bytes"] == mib * 2**20


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, 1), (3, 3)])
def test_the_default_is_a_rank_for_each_gpu_of_this_host(config, capsys, monkeypatch, num_gpus, ranks):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert plan_json(capsys, config)[1]["world_size"] == ranks


@pytest.mark.parametrize("name", ["config.json", "train.yaml"])
def test_quantized_weights_are_refused(config, tmp_path, capsys, name):
    quantized = {**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(quantized))
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"model": {"path": str(tmp_path)}}))
    assert main(["plan", str(tmp_path / name)]) == 2
    assert "plans do not count quantized weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--world-size", "2"], "missing.json: no such file"),
        (["CONFIG", "a.b=1", "--world-size", "2"], "unknown key a.b"),
        (["CONFIG", "model.path=other", "--world-size", "2"], "model.path=other: the model is that of"),
        (["CONFIG", "--world-size", "4", "--replicas", "3"], "3 replicas do not divide"),
        (["CONFIG", "--world-size", "4", "--reshard-after-forward", "3"], "a factor of 4, not 3"),
        (["CONFIG", "--world-size", "2", "--memory", "much"], "--memory: expected a size with a unit"),
        (["CONFIG", "--world-size", "2", "--auto-wrap", "Qwen3MPL"], "did you mean Qwen3MLP"),
    ],
)
def test_each_mistake_is_named(config, capsys, arguments, message):
    assert main(["plan", *(str(config) if word == "CONFIG" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_config_that_names_code_of_its_own_runs_none(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    assert main(["plan", str(tmp_path), "--world-size", "2"]) == 2
    assert not (tmp_path / "ran").exists()


def test_the_model_stays_as_it_is():
    model = Stack()
    before = {name: (id(param), param._version) for name, param in model.named_parameters()}
    report = plan_memory(model, 4, auto_wrap=True)
    assert [unit.name for unit in report.units] == ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    assert {name: (id(param), param._version) for name, param in model.named_parameters()} == before
    assert type(model) is Stack and not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * 2**30), ("80G", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("12B", 12), ("7B", 7)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1 XB", "1e9", "80", "85899345920"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="expected a size with a unit, such as .*GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "rprop"}, "expected one of adamw"),
        ({"transport": "nccl"}, "transport must be .*got 'nccl'"),
        ({"device": "tpu"}, "device must be .*got 'tpu'"),
        ({"offload": "half"}, "offload must be .*got 'half'"),
        ({"device": "cuda", "transport": "shm"}, "expected process_group with device cuda"),
        ({"offload": "optimizer", "optimizer": "sgd_momentum"}, "Use gradients or all with sgd_momentum"),
        ({"offload": "optimizer", "optimizer": "muon_int8"}, "Use gradients or all with muon_int8"),
        ({"offload": {"head.bias": OffloadPolicy(), "no": CPUOffloadPolicy()}}, "names 'no', which is no parameter"),
        ({"offload": {"head.bias": HostOffloadPolicy("optimizer")}, "optimizer": "muon"}, "Use gradients or all with"),
        ({"optimizer": "muon"}, "optimizer: got muon: .*no get_output_embeddings"),
    ],
)
def test_what_no_plan_is_for(options, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(Stack(), 2, **options)


def test_the_device_decides_who_counts(config, capsys):
    def report(*options):
        return plan_json(capsys, config, "--world-size", 3, *options)[1]

    cuda, cpu, shm = report(), report("--device", "cpu", "--transport", "process_group"), report("--transport", "shm")
    assert [plan["policy"]["device"] for plan in (cuda, cpu, shm)] == ["cuda", "cpu", "cpu"]
    assert [plan["report"]["transport"] for plan in (cuda, cpu, shm)] == ["device", "process_group", "shm"]
    assert report("--device", "cpu") == shm and report("--device", "cuda") == cuda
    # 50 rows over 3 ranks: the slot has room for whole chunks, and two packed units may be on their way.
    assert cuda["report"]["gather_slot_bytes"] > cpu["report"]["gather_slot_bytes"]
    assert cuda["report"]["own_gather_slot_bytes"] > 0 == cpu["report"]["own_gather_slot_bytes"]
    assert plan_json(capsys, config, "--world-size", 1)[1]["report"]["transport"] == "device"


def test_a_budget_of_offloaded_parameters(config, capsys):
    def plan(*options):
        return plan_json(capsys, config, "--world-size", 2, *options)[1]

    nothing, some, everything = (plan("--offload-budget", size) for size in ("1B", "8KiB", "1TiB"))
    assert nothing["report"] == plan()["report"] and everything["report"] == plan("--offload", "all")["report"]
    hosts = [one["report"]["host_bytes"] for one in (nothing, some, everything)]
    assert hosts == sorted(set(hosts)) and 0 < len(some["policy"]["offload"]) < len(everything["policy"]["offload"])
    assert main(["plan", str(config), "--offload-budget", "8KiB", "--offload", "all"]) == 2
    assert main(["plan", str(config), "--offload-budget", "8"]) == 2
    assert "--offload-budget: expected a size with a unit" in capsys.readouterr().err
    assert main(["plan", str(config), "--offload-budget", "8KiB"]) == 0
    assert f"offload {len(some['policy']['offload'])} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [{}, {"transport": "shm"}, {"replicas": 2}, {"offload": "all"}, {"offload": "optimizer"}]
)
def test_every_row_and_column_is_explained(options):
    model = nn.Sequential(nn.Embedding(64, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 64))
    report = plan_memory(model, 4, auto_wrap=["Linear"], **options)
    assert {"shards"} <= {name for name, _, _ in report.sizes()} <= set(WORDS)
    said = explanation(report)
    assert all(f"\n{name}  " in said for name in ("shards", "at rest", "peak, without activations"))
    assert set(COLUMNS) < set(str(report).splitlines()[0].split())
