"""What `fsdp2x plan` says in words: rows are explained, and repeated units folded."""

import pytest
from torch import nn

from fsdp2x.commands.plan_words import COLUMNS, WORDS, explanation
from fsdp2x.memory.plan import plan_memory
from fsdp2x.memory.report import _folded

KINDS = {
    "device": {},
    "shared memory": {"transport": "shm"},
    "replicas": {"replicas": 2},
    "offload": {"offload": "all"},
    "moments": {"offload": "optimizer"},
}


def report(**options):
    model = nn.Sequential(nn.Embedding(64, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 64))
    return plan_memory(model, 4, auto_wrap=["Linear"], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_and_column_is_explained(kind):
    made = report(**KINDS[kind])
    pooled = {"slots and staging", "scratch"}
    assert {name for name, _, _ in made.sizes()} | pooled >= {"shards", *pooled}
    assert {name for name, _, _ in made.sizes()} <= set(WORDS)
    said = explanation(made)
    assert all(f"\n{name}  " in said for name in ("shards", "at rest", "peak, without activations"))
    head = str(made).splitlines()[0].split()
    assert set(COLUMNS) < set(head)


@pytest.mark.parametrize(
    "ranks, reduce, said",
    [(1, "float32", None), (8, "float32", "registered memory"), (16, "float32", "between 2 nodes; --reduce-dtype"),
     (16, "bfloat16", "registered memory")],
)  # fmt: skip
def test_faster_collectives_are_named_where_they_apply(tmp_path, capsys, ranks, reduce, said):
    from fsdp2x.cli import main

    path = tmp_path / "config.json"
    sizes = '"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2'
    path.write_text(f'{{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, {sizes}}}')
    options = ["--dtype", "float32", "--param-dtype", "bfloat16", "--reduce-dtype", reduce]
    assert main(["plan", str(path), "--world-size", str(ranks), *options]) == 0
    remarks = [line for line in capsys.readouterr().out.splitlines() if "registered" in line or "nodes;" in line]
    assert len(remarks) == (said is not None) and all(said in line for line in remarks)


def rows(text):
    return [(name, name[0]) for name in text.split()]


def test_repeated_units_become_one_line_a_pattern():
    names = [name for name, _ in _folded(rows("e0 a0 a1 a2 a3 a4 n"))]
    assert names == ["e0", "a0 .. a4 (5 units, each)", "n"]
    names = [name for name, _ in _folded(rows("e0 " + " ".join(f"a{i} x{i}" for i in range(5)) + " n"))]
    assert names == ["e0", "a0 .. a4 (5 units, each)", "x0 .. x4 (5 units, each)", "n"]
    assert len(_folded(rows("a0 x0 a1 x1 a2 x2 a3 x3"))) == 8
