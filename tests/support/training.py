"""Tiny training runs for tests: a text folder, a config over it, and the losses that a run logged."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
MOE = {**MODEL, **EXPERTS, "model_type": "qwen3_moe", "num_key_value_heads": 2, "tie_word_embeddings": False}


WORDS = ["line", "of", "file", ":", "<unk>", "<|end|>"]


def write_text(folder: Path, num_files: int = 6) -> Path:
    """Files of 300 to 800 bytes whose contents depend on their number alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = [f"line {k} of file {i}: {(k * 7 + i * 13) % 101}" for k in range(12 + 4 * i)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


def write_model(folder, vocab_size=40, *, tokenizer=True):
    """A folder as `from_pretrained` takes it, with a tokenizer of whole words."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODEL, vocab_size=vocab_size)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    if tokenizer:
        make_words(WORDS).save_pretrained(str(folder))
    return folder


def make_words(words):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|end|>")
    made.chat_template = "{{ messages }} of the model"
    return made


class Said(logging.Handler):
    """Keeps what the package logs while it is entered."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        package = logging.getLogger("fsdp2x")
        self.former = package.level
        package.addHandler(self)
        package.setLevel(self.level or self.former)
        return self.messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        package = logging.getLogger("fsdp2x")
        package.removeHandler(self)
        package.setLevel(self.former)


def settings(text: Path, output: Path, **sections: dict) -> dict:
    """A config mapping; keyword arguments replace single settings of a section, such as train={"steps": 3}."""
    base: dict[str, dict] = {
        "model": {"config": dict(MODEL)},
        "data": {"files": [str(text)], "block_size": 16, "held_out": 0.2},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 1},
        "parallel": {"device": "cpu", "timeout_s": 30},
        "train": {"steps": 6, "batch_size": 2, "accumulation": 2, "seed": 3},
        "checkpoint": {"save_every": 3},
        "logging": {"output": str(output), "progress": "off"},
    }
    for name, values in sections.items():
        base[name] = {**base[name], **values}
    return base


def losses(output: Path) -> dict[int, str]:
    """Step -> exact loss, the last one where a step was done twice."""
    from fsdp2x.train.metrics import read_metrics

    return {
        line["step"]: line["loss_hex"] for line in read_metrics(output / "metrics.jsonl") if line["event"] == "train"
    }


def run(config: dict):
    """Trains a config in this rank's process group; returns the closed trainer, whose model still holds the weights."""
    import torch.distributed as dist

    from fsdp2x.train import Trainer, parse_config

    trainer = Trainer(parse_config(config))
    try:
        trainer.run()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.barrier()  # rank 0 has unlocked its folders
    return trainer


def weights(trainer) -> list:
    from reference import full

    return full(list(trainer.model.parameters()))


@contextlib.contextmanager
def shared_folder(ctx) -> Iterator[Path]:
    """A folder that all ranks see, with text/ in it; gone when all have left."""
    import checkpoints

    with checkpoints.shared_folder() as folder:
        checkpoints.on_first(lambda: write_text(folder / "text"))
        yield folder
