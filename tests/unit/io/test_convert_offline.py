"""fsdp2x.convert in one process: keys, mistakes that are named, fallbacks, the command, memory."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from checkpoints import tensors
from fsdp2x.base.failures import CheckpointError
from fsdp2x.convert import dcp_to_hf, ranks_to_hf
from fsdp2x.io.convert.stored import match
from fsdp2x.train.cli import main
from harness import programs
from models import build
from reference import same


def refuses(pattern):
    return pytest.raises(CheckpointError, match=pattern)


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def doubled(name, **options):
    model = build(name, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return model


@pytest.fixture
def origin(tmp_path):
    build("llama").save_pretrained(tmp_path / "origin")
    return tmp_path / "origin"


def test_prefixes(caplog):
    names = {"model.embed.weight", "model.norm.weight", "lm_head.weight"}
    for prefix in ("", "model.", "model_state.model.", "module.", "state.model."):
        keys = [prefix + name for name in names]
        more = ["optim.state.model.norm.weight.exp_avg", "rng"]
        assert match(keys + more, names, None, "x") == {name: prefix + name for name in names}
    wrapped = {"model._orig_mod.model._checkpoint_wrapped_module.norm.weight": "model.norm.weight"}
    assert match(wrapped, names, None, "x") == {name: key for key, name in wrapped.items()}
    both = [prefix + name for prefix in ("model.", "ema.") for name in names]
    with refuses("the prefixes '(model|ema).' and '(model|ema).' match 3 weights each. Choose one with --prefix"):
        match(both, names, None, "x")
    assert match(both, names, "ema.", "x") == {name: f"ema.{name}" for name in names}
    with refuses("no key ends with the name of a weight of the origin. There are a, b"):
        match(["a", "b"], names, None, "x")
    with refuses("no key is 'z.' and the name of a weight"):
        match(both, names, "z.", "x")
    match([*(f"model.{name}" for name in names), "model.value_head.weight"], names, None, "where")
    assert (
        "where: 1 tensors are not weights of the origin's model and are omitted: model.value_head.weight" in caplog.text
    )


def test_what_does_not_fit(tmp_path, origin):
    out = tmp_path / "out"
    state = {f"model.{key}": value for key, value in build("llama").state_dict().items()}

    def converted(state, pattern):
        shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
        save(tmp_path / "ckpt", state)
        with refuses(pattern):
            dcp_to_hf(tmp_path / "ckpt", out, origin)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "origin"]

    name = "model.layers.1.mlp.up_proj.weight"
    converted({key: value for key, value in state.items() if name not in key}, f"lacks 1 tensors of .*origin: {name}")
    converted({**state, f"model.{name}": torch.zeros(25, 16)}, r"up_proj.weight has shape \[25, 16\], .* \[24, 16\]")
    converted(
        {"model.base_model.lora_A.weight": torch.zeros(1), **dict(list(state.items())[1:])},
        "fsdp2x export --merge merges them",
    )
    config = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    state["model.lm_head.weight"] = state["model.lm_head.weight"] + 1
    converted(state, "lm_head.weight are tied in the origin's model, but differ. Set tie_word_embeddings to false")
    (origin / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    converted(state, "quantized weights, which are not supported")
    (origin / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    converted(state, "transformers cannot build the model")
    (origin / "config.json").unlink()
    converted(state, "config.json: no such file")
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "ckpt").mkdir()
    with refuses("There is no DCP directory"):
        dcp_to_hf(tmp_path / "ckpt", out, origin)
    with refuses("no file model_world_size_W_rank_R.pt"):
        (tmp_path / "ckpt" / "1").mkdir()
        ranks_to_hf(origin, tmp_path / "ckpt", out, 1)


def test_damaged_shards_are_named(tmp_path, origin):
    save(tmp_path / "ckpt", {f"model.{key}": value for key, value in build("llama").state_dict().items()})
    (shards,) = (tmp_path / "ckpt").glob("*.distcp")
    shards.write_bytes(shards.read_bytes()[: shards.stat().st_size // 2])
    with refuses(f"would have bytes .* of {shards.name}, which has"):
        dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", origin)
    shards.unlink()
    with refuses(f"{shards.name}: No such file"):
        dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", origin)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "origin"]


def test_layouts_of_other_frameworks(tmp_path, origin):
    """A folder of steps with a pointer, and the model in a folder of its own."""
    state = {f"model_state.model.{key}": value for key, value in doubled("llama").state_dict().items()}
    save(tmp_path / "run" / "iter_0000012" / "model", state)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    expected = {key: 2 * value for key, value in tensors(origin).items()}
    for number, path in enumerate(("run", "run/iter_0000012", "run/iter_0000012/model")):
        same(tensors(dcp_to_hf(tmp_path / path, tmp_path / f"out{number}", origin)), expected)


def test_what_only_one_side_has(tmp_path, origin, caplog):
    """Copied: what the class does not know. Added: what was trained, but is in no file of the origin."""
    state = load_file(origin / "model.safetensors")
    extra = {"mtp.head.weight": torch.ones(2, 2)}
    head = state.pop("lm_head.weight")
    save_file({**state, **extra}, origin / "model.safetensors", metadata={"format": "pt"})
    save(tmp_path / "ckpt", {"model": doubled("llama").state_dict()})
    out = tensors(dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", origin))
    same(
        out,
        dict(sorted({**{key: 2 * value for key, value in state.items()}, "lm_head.weight": 2 * head, **extra}.items())),
    )
    assert "1 tensors that LlamaForCausalLM does not have are copied from the origin: mtp.head.weight" in caplog.text
    assert "not in the origin, added: lm_head.weight" in caplog.text


def test_names_of_the_files_as_keys(tmp_path):
    """Checkpoints of versions of transformers that did not fuse experts; a .bin origin; another dtype."""
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "expected")
    expected = tensors(tmp_path / "expected")
    (tmp_path / "origin").mkdir()
    shutil.copy(tmp_path / "expected" / "config.json", tmp_path / "origin")
    torch.save(
        {key: torch.zeros_like(value) for key, value in expected.items()}, tmp_path / "origin" / "pytorch_model.bin"
    )
    save(tmp_path / "ckpt", {f"model.{key}": value for key, value in expected.items()})
    out = dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", tmp_path / "origin")
    assert [file.name for file in sorted(out.iterdir())] == ["config.json", "model.safetensors"]
    same(tensors(out), expected)
    out = dcp_to_hf(tmp_path / "ckpt", tmp_path / "half", tmp_path / "origin", dtype=torch.bfloat16)
    same(tensors(out), {key: value.bfloat16() for key, value in expected.items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_fused_experts_of_files_without_the_prefix(tmp_path):
    """The files of the model without its head keep their names, and a missing weight is one of theirs."""
    build("qwen3_moe").save_pretrained(tmp_path / "origin")
    file = tmp_path / "origin" / "model.safetensors"
    inner = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(inner, file, metadata={"format": "pt"})
    state = doubled("qwen3_moe").state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save(tmp_path / "ckpt", {"model": state})
    out = tensors(dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", tmp_path / "origin"))
    expected = {name: 2 * tensor for name, tensor in inner.items()} | {"lm_head.weight": state["lm_head.weight"]}
    same(out, dict(sorted(expected.items())))
    del state["model.layers.1.mlp.experts.down_proj"]
    save(tmp_path / "less", {"model": state})
    with refuses("lacks 4 tensors of .*: layers.1.mlp.experts.0.down_proj.weight"):
        dcp_to_hf(tmp_path / "less", tmp_path / "out2", tmp_path / "origin")


def test_the_command(tmp_path, origin, capsys):
    def run(*words):
        return main(["convert", *map(str, words)]), capsys.readouterr().err

    save(tmp_path / "ckpt", {"model": doubled("llama").state_dict()})
    expected = {key: 2 * value for key, value in tensors(origin).items()}
    out = tmp_path / "out"
    forward = ["--input-dir", tmp_path / "ckpt", "--output-dir", out, "--origin-hf-dir", origin]
    assert run(*forward)[0] == 0
    same(tensors(out), expected)
    (out / "precious").write_text("x")
    status, said = run(*forward)
    assert status == 2 and "out: exists already" in said and (out / "precious").exists()
    assert run(*forward, "-f", "--dtype", "bfloat16")[0] == 0 and not (out / "precious").exists()
    same(tensors(out), {key: value.bfloat16() for key, value in expected.items()})
    status, said = run(*forward[:3], origin, "--origin-hf-dir", origin, "-f")
    assert status == 2 and "which is read. Choose another folder" in said
    assert run("--to", "dcp", "--input-dir", out, "--output-dir", tmp_path / "dcp", "--dtype", "float32")[0] == 0
    assert run("--input-dir", tmp_path / "dcp", "--output-dir", out, "--origin-hf-dir", origin, "-f")[0] == 0
    same(tensors(out), {key: value.bfloat16().float() for key, value in expected.items()})
    (tmp_path / "ranks" / "5").mkdir(parents=True)
    torch.save(doubled("llama").state_dict(), tmp_path / "ranks" / "5" / "model_world_size_1_rank_0.pt")
    ranks = ["--hf_dir", origin, "--ckpt_dir", tmp_path / "ranks", "--save_dir", tmp_path / "out2", "--iter", 5]
    assert run(*ranks)[0] == 0
    same(tensors(tmp_path / "out2"), expected)
    status, said = run(*ranks[:-2])
    assert status == 2 and "needs exactly --hf-dir, --ckpt-dir, --save-dir, --iter" in said
    status, said = run(*ranks, "--groupgemm", "1", "-f")
    assert status == 2 and "does not have it" in said
    status, said = run(*forward, "--groupgemm")
    assert status == 2 and "--groupgemm has no effect in this form" in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_disk_leaves_nothing_behind(tmp_path, origin, monkeypatch):
    import os

    save(tmp_path / "ckpt", {"model": doubled("llama").state_dict()})
    out = dcp_to_hf(tmp_path / "ckpt", tmp_path / "out", origin)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def pwrite(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with refuses("No space left on device"):
        dcp_to_hf(tmp_path / "ckpt", out, origin, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "origin", "out"]


_MEASURE = """
import sys
from fsdp2x.train.cli import main
words = sys.argv[1:]
middle = len(words) // 2
assert main(["convert", *words[:middle]]) == 0  # a tiny model first: imports, tables of transformers
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
def field(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])
before = field("VmRSS")
assert main(["convert", *words[middle:]]) == 0
print("GREW", field("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path, origin):
    """Resident memory, mapped files included, of a conversion there and back of a 100 MB model: some MiB."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 8192, "num_hidden_layers": 6, "head_dim": 256}
    model = build("llama", **sizes)
    big, tiny = tmp_path / "big", tmp_path
    model.save_pretrained(big / "origin", max_shard_size="40MB")
    total = sum(file.stat().st_size for file in (big / "origin").glob("*.safetensors"))
    save(big / "ckpt", {"model": model.state_dict()})
    save(tiny / "ckpt", {"model": build("llama").state_dict()})
    expected = tensors(big / "origin")
    del model
    largest = max(value.nbytes for value in expected.values())

    def grew(*words):
        both = [word.format(folder) for folder in (tiny, big) for word in words]
        done = programs.run("-c", _MEASURE, *both)
        assert done.returncode == 0, done.stderr
        return int(re.search(r"GREW (\d+)", done.stdout)[1]) << 10

    forth = grew("--input-dir={}/ckpt", "--output-dir={}/out", "--origin-hf-dir={}/origin")
    back = grew("--to=dcp", "--input-dir={}/out", "--output-dir={}/dcp")
    same(tensors(big / "out"), expected)
    assert total > 90e6 and largest > 15e6
    print(f"grew by {forth / 1e6:.0f} and {back / 1e6:.0f} MB, model {total / 1e6:.0f} MB, largest {largest / 1e6:.0f}")
    assert forth < 45e6, f"{forth / 1e6:.0f} MB of {total / 1e6:.0f}"
    assert back < 45e6 + 33.6e6 + largest, f"{back / 1e6:.0f} MB of {total / 1e6:.0f}"
