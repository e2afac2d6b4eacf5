"""``Vllm(llm)`` with a real ``LLM``, asleep and awake; and `fsdp2x grpo` with a real server as its engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_vllm_server import DIGITS, PUSH_S, run_ranks, save_model
from transformers import AutoConfig
from vllm_server import INSTALL_S, ROOT, copy_engine_files, python_of_vllm, say_release, serving

from training import MODEL

pytestmark = [pytest.mark.full, pytest.mark.timeout(INSTALL_S + 2400)]


@pytest.fixture
def path_of_engine(tmp_path):
    """A folder with what an engine's process needs of ours."""
    path = tmp_path / "path"
    path.mkdir()
    copy_engine_files(path)
    say_release(path)
    return path


def test_pushes_into_an_llm(tmp_path, path_of_engine, capsys):
    save_model("dense", tmp_path / "model")
    found = tmp_path / "found.json"
    words = [python_of_vllm(), str(path_of_engine), str(tmp_path / "model"), str(found)]
    run_ranks(Path(__file__).with_name("push_to_llm.py"), words)
    rows = {row["step"]: row for row in json.loads(found.read_text())}
    with capsys.disabled():
        print("\nan LLM of the trainer")
        for step, row in rows.items():
            said = row.get("refused")
            print(f"{step:28} " + (f"refused: {said[:60]}" if said else f"log-probs {row['apart']:.0e} apart"))
    assert "level 2 dropped the weights" in rows.pop("wake after level 2")["refused"]
    assert "has nothing for" in rows.pop("left out")["refused"]
    assert len(rows) == 6
    for row in rows.values():
        assert row["same"] and row["apart"] < DIGITS, row


@pytest.mark.parametrize("ahead", [0, 1])
def test_grpo_with_a_server(tmp_path, ahead, capsys):
    """`fsdp2x grpo` with vLLM as its engine: log-probabilities agree after each push, and tokens are as old as said."""
    sys.path.append(str(ROOT / "examples" / "grpo_toy"))
    from grpo_toy import write_rows

    write_rows(tmp_path)
    # vLLM's attention on a CPU knows no heads of 16.
    model = {**MODEL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
    (tmp_path / "model").mkdir()
    AutoConfig.for_model(**model, vocab_size=257).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    options = ["--served-model-name", "policy", "--enable-scale-out", "--skip-tokenizer-init", "--load-format", "dummy"]
    options += ["--logprobs-mode", "processed_logprobs", "--max-model-len", "32", "--max-num-seqs", "64"]
    with serving(tmp_path / "model", tmp_path / "server", options=options) as url:
        words = [str(ROOT / "examples/grpo_toy/grpo.yaml"), "model.path=null", f"model.config={json.dumps(model)}"]
        words += [f"data.files={tmp_path / 'prompts.jsonl'}", f"data.validation_files={tmp_path / 'held_out.jsonl'}"]
        words += ["rollout.engine=vllm", f"rollout.addresses=[{url}]", f"rollout.ahead={ahead}", "train.eval_every=0"]
        words += ["train.steps=4", "train.global_batch_size=8", f"logging.output={tmp_path / 'out'}"]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*start, "-m", "fsdp2x.grpo", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PUSH_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "train"]
    with capsys.disabled():
        print(f"\nfsdp2x grpo, rollout.engine=vllm, rollout.ahead={ahead}")
        for step in steps:
            print({name: step[name] for name in ("step", "difference_max", "staleness_max", "reward")})
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["difference_max"] < 1e-4 for step in steps)
    ages = [step["staleness_max"] for step in steps]
    assert ages == [0, 0, 0, 0] if not ahead else ages[0] == 0 and set(ages[1:]) <= {0, 1}
