"""Supervised fine-tuning against a plain loop over transformers: one row at a time, no sharding, no padding."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from chats import CHATML, MARKED, chat_tokenizer, some_rows, write_rows
from checkpoints import on_first, shared_folder
from fsdp2x.train.chat import render_example
from fsdp2x.train.rows import read_rows
from harness import distributed
from training import MODEL, losses, run, settings, weights

STEPS, ROWS_PER_STEP = 4, 12
WAYS = {
    "padded": {},
    "packed": {"packing": True, "max_tokens": 220},
    "streamed": {"streaming": True},
    "streamed and packed": {"streaming": True, "packing": True},
}


def sft(folder, output, data, **sections):
    return settings(
        folder / "rows.jsonl",
        folder / output,
        model={"config": {**MODEL, "max_position_embeddings": 256}},
        data={"format": "jsonl", "tokenizer": str(folder / "tokenizer"), "block_size": 200, "held_out": 0.0}
        | {"shuffle": False}
        | data,
        schedule={"kind": "constant", "warmup_steps": 0},
        optimizer={"lr": 3e-3, "weight_decay": 0.0},
        train={"steps": STEPS, "global_batch_size": ROWS_PER_STEP, "batch_size": 2, "accumulation": None, "clip": None},
        **sections,
    )


def write(folder, template, num_rows=17):
    write_rows(folder / "rows.jsonl", some_rows(num_rows))
    chat_tokenizer(template).save_pretrained(str(folder / "tokenizer"))


def plain_losses(folder, config):
    """Mean cross-entropy over all labels of a step; the rows go round in the order of the file."""
    from fsdp2x.train.model import build_model
    from fsdp2x.train.parse import parse_config
    from fsdp2x.train.tokenizer import make_tokenizer

    parsed = parse_config(config)
    tokenizer = make_tokenizer(parsed.data.tokenizer)
    model = build_model(parsed.model, tokenizer, parsed.train.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rows = [render_example(tokenizer.inner, row) for row in read_rows([str(folder / "rows.jsonl")], "jsonl")]
    found = []
    for step in range(STEPS):
        chosen = [rows[(step * ROWS_PER_STEP + i) % len(rows)] for i in range(ROWS_PER_STEP)]
        count = sum(label != -100 for _, labels in chosen for label in labels[1:])
        total = 0.0
        for ids, labels in chosen:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / count
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, [param.detach() for param in model.parameters()]


@distributed(world_sizes=(1, 2, 3), timeout=120)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_losses_and_weights_are_those_of_a_plain_loop(ctx, way, template):
    with shared_folder() as folder:
        on_first(lambda: write(folder, template))
        config = sft(folder, "run", WAYS[way])
        trainer = run(config)
        dist.barrier()
        got = [float.fromhex(text) for text in losses(folder / "run").values()]
        expected, plain = plain_losses(folder, config)
        assert got == pytest.approx(expected, abs=2e-6)
        for one, other in zip(weights(trainer), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        assert expected[-1] < expected[0] - 0.1


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("way", ["padded", "packed"])
def test_held_out_loss_is_that_of_a_plain_forward(ctx, way):
    """Also where ranks have different numbers of rows."""
    with shared_folder() as folder:
        on_first(lambda: (write(folder, CHATML), write_rows(folder / "other.jsonl", some_rows(23)[18:])))
        validation = {"validation_files": [str(folder / "other.jsonl")], **WAYS[way]}
        config = sft(folder, "run", validation)
        config["train"] |= {"mode": "evaluate", "eval_batch_size": 2}
        trainer = run(config)
        got = trainer.evaluate()
        plain = trainer.model.eval()
        rows = [
            render_example(trainer.tokenizer.inner, row) for row in read_rows([str(folder / "other.jsonl")], "jsonl")
        ]
        total, count = 0.0, 0
        with torch.no_grad():
            for ids, labels in rows:
                logits = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
                total += float(F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
                count += sum(label != -100 for label in labels[1:])
        assert got == pytest.approx(total / count, abs=1e-6)


@distributed(world_sizes=(2,), timeout=120)
def test_ulysses_and_lora_train_rows(ctx):
    """Two ranks share each conversation; the losses stay those of whole ones."""
    with shared_folder() as folder:
        on_first(lambda: write(folder, CHATML))
        for output, parallel in (("whole", {}), ("cut", {"sequence_parallel": 2})):
            config = sft(folder, output, {"packing": True}, parallel=parallel)
            config["lora"] = {"rank": 2}
            config["train"] |= {"batch_size": None, "accumulation": 1}
            run(config)
        dist.barrier()
        whole, cut = ([float.fromhex(text) for text in losses(folder / name).values()] for name in ("whole", "cut"))
        assert cut == pytest.approx(whole, abs=5e-6) and len(set(whole)) == STEPS
        assert (folder / "cut/adapter/adapter_model.safetensors").exists()
