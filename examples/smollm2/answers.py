"""Answers held-out questions with a HuggingFace folder and counts exact matches. transformers only, no fsdp2x.

    python examples/smollm2/answers.py FOLDER QUESTIONS.jsonl... [--show 4] [--json FILE]

Answers are greedy. An answer matches if it equals the expected one, apart from case, spaces and a final period.
``names`` counts answers that contain the expected one as whole words: it is fair to a model that answers in sentences.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path


def normalize(text: str) -> str:
    """Text without what an exact match ignores: case, quotes, repeated spaces, and a final period."""
    return " ".join(text.replace("`", "").replace('"', "").split()).rstrip(".").lower()


def contains(answer: str, expected: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalize(expected))}(?!\w)", normalize(answer)) is not None


def exact_match(completions: list, answer: list[str], **columns) -> list[float]:
    """TRL's reward function: 1 for each completion that equals its row's answer."""
    texts = [messages[0]["content"] for messages in completions]
    return [float(normalize(text) == normalize(expected)) for text, expected in zip(texts, answer, strict=True)]


def load(folder: str | Path):
    """Model in evaluation mode, and tokenizer that pads on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")


def respond(model, tokenizer, prompts: list, *, max_tokens: int = 32, batch: int = 32, **sampling) -> list[str]:
    """Texts of the responses to chats (lists of messages); greedy unless ``sampling`` has options of ``generate``."""
    import torch

    found = []
    for start in range(0, len(prompts), batch):
        rows = tokenizer.apply_chat_template(
            prompts[start : start + batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            ids = model.generate(**rows, max_new_tokens=max_tokens, **{"do_sample": False, **sampling})
        found += tokenizer.batch_decode(ids[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def judge(model, tokenizer, questions: list[dict], **options) -> dict:
    """Answers all questions; returns counts by kind, and a row for each question."""
    answers = respond(model, tokenizer, [question["prompt"] for question in questions], **options)
    rows, counts = [], defaultdict(lambda: {"questions": 0, "exact": 0, "names": 0})
    for question, answer in zip(questions, answers, strict=True):
        exact = normalize(answer) == normalize(question["answer"])
        names = contains(answer, question["answer"])
        rows.append({"question": question["prompt"][-1]["content"], "expected": question["answer"], "answer": answer})
        for kind in (question["kind"], "all"):
            counts[kind]["questions"] += 1
            counts[kind]["exact"] += exact
            counts[kind]["names"] += names
    return {"counts": dict(counts), "rows": rows}


def read_rows(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="HuggingFace folder of the model")
    parser.add_argument("questions", type=Path, nargs="+", help="JSONL with prompt (messages), answer and kind")
    parser.add_argument("--limit", type=int, help="Questions of each file to ask. Default: all.")
    parser.add_argument("--show", type=int, default=4, help="Answers to print. Default: 4.")
    parser.add_argument("--json", type=Path, help="File for counts and answers. Default: none.")
    args = parser.parse_args()
    asked = [row for path in args.questions for row in read_rows(path)[: args.limit]]
    result = judge(*load(args.folder), asked)
    for kind, count in result["counts"].items():
        print(f"{kind}: {count['exact']} of {count['questions']} exact, {count['names']} name the answer")
    for row in result["rows"][: args.show]:
        print(f"  Q: {row['question']}\n  A: {row['answer']}\n     (expected: {row['expected']})")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
