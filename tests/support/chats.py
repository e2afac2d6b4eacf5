"""A tiny tokenizer with chat templates, and files of rows."""

import functools
import json
import string
from pathlib import Path

# Appends a turn after the other, as ChatML does.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text, which marks what the assistant says.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _trained():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["user assistant system the answer is a question of the user"] * 3, trainer)
    return inner


def chat_tokenizer(template: str | None = CHATML):
    """Bytes and a few merged words, with `<|im_end|>` as its end mark."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=_trained(),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def some_rows(num_rows: int, longest: int = 40) -> list[dict]:
    """Conversations of different lengths and numbers of turns, by their number alone."""
    rows = []
    for i in range(num_rows):
        messages = []
        for k in range(1 + i % 3):
            answer = " ".join(string.ascii_lowercase[(i + j) % 26] * (1 + j % 3) for j in range(1 + (i * 7) % 5))
            messages += [turn("user", f"{i} and {k}?"), turn("assistant", answer[:longest])]
        rows.append({"messages": messages})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
