"""Makes training rows and questions from the docstrings of the Python standard library. No network, no chance.

    python examples/smollm2/make_data.py out/smollm2/data

train.jsonl, for SFT: facts about functions. Which module has one? What does its docstring say? Several wordings ask
for each fact. A few rows show how to sort words.
questions.jsonl, held out: each fact in a wording that training used only for other facts. The control asks about
functions that no training row names.
sort_train.jsonl and sort_test.jsonl, for GRPO: lists of words to sort. All are different, and none is in train.jsonl.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
from pathlib import Path

MODULES = (
    "base64 binascii bisect calendar colorsys compileall difflib dis filecmp fileinput fnmatch gc getpass glob heapq "
    "html inspect keyword linecache locale mimetypes pkgutil platform plistlib pprint py_compile quopri random secrets "
    "shlex shutil signal statistics struct sysconfig tempfile textwrap timeit tokenize traceback unicodedata uuid "
    "weakref webbrowser zlib"
).split()
WORDINGS = {
    "module": [
        "Which module of Python's standard library has the function {name}?",
        "In which standard module do I find {name}()?",
        "I want to call {name} in Python. Which module do I import?",
        "Where is the Python function {name} defined?",
        "{name} belongs to which module of the standard library?",
        "Name the Python module that provides {name}.",
    ],
    "purpose": [
        "What does {module}.{name} do?",
        "Describe the Python function {module}.{name} in one sentence.",
        "What is {name} in the module {module} for?",
        "Explain {module}.{name}() briefly.",
        "I found {module}.{name} in some code. What does it do?",
        "Give the first line of the docstring of {module}.{name}.",
    ],
}
WORDS = "apple banana cherry date fig grape kiwi lemon mango olive peach raisin".split()
SYSTEM = {"role": "system", "content": "Answer briefly."}


def read_facts() -> list[dict]:
    """Functions whose docstring begins with a sentence of 4 to 9 words, in the order of their names."""
    facts, seen = [], set()
    for module in MODULES:
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not inspect.isroutine(function) or function.__module__ != module:
                continue
            text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=\.)\s", text)[0]
            # A name or a sentence that occurs twice has no single answer.
            if 4 <= len(sentence.split()) <= 9 and sentence.endswith(".") and "e.g" not in sentence:
                if name not in seen and sentence not in seen:
                    facts.append({"module": module, "name": name, "purpose": sentence})
                seen |= {name, sentence}
    return facts


def ask(question: str) -> list[dict]:
    return [SYSTEM, {"role": "user", "content": question}]


def show(question: str, answer: str) -> dict:
    """A row for SFT, whose loss counts the completion only."""
    return {"prompt": ask(question), "completion": [{"role": "assistant", "content": answer}]}


def make_questions(num_facts: int, num_wordings: int, num_control: int, seed: int = 0) -> tuple[list, list]:
    """Training rows as `show` makes them, and held-out rows with ``prompt``, ``answer``, ``kind`` and ``about``."""
    chosen = random.Random(seed).sample(read_facts(), num_facts + num_control)
    rows, held_out = [], []
    for i, fact in enumerate(chosen):
        for kind, wordings in WORDINGS.items():
            asked = [wordings[(i + shift) % len(wordings)].format(**fact) for shift in range(num_wordings + 1)]
            about, trained = f"{fact['module']}.{fact['name']}", i < num_facts
            row = {"prompt": ask(asked[0]), "answer": fact[kind], "kind": kind if trained else "control"}
            held_out.append({**row, "about": about})
            if trained:
                rows += [show(question, fact[kind]) for question in asked[1:]]
    random.Random(seed).shuffle(rows)
    return rows, held_out


def make_lists(sizes: list[int], seed: int) -> list[tuple[str, str]]:
    """Different questions to sort as many words as each size says, and their answers."""
    chance, found = random.Random(seed), {}
    for size in sizes:
        while True:
            words = chance.sample(WORDS, size)
            question = f"Sort these words: {', '.join(words)}."
            if words != sorted(words) and question not in found:
                found[question] = ", ".join(sorted(words))
                break
    return list(found.items())


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def make_all(folder: Path, *, num_facts: int = 24, num_wordings: int = 3, num_prompts: int = 400) -> dict[str, int]:
    """Writes all files to ``folder`` and returns the number of rows of each.

    Args:
        num_facts: functions to train on; each makes two facts. The control has a quarter as many.
        num_wordings: wordings of each fact in the training rows, at most 5.
        num_prompts: lists to sort for GRPO.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_shown, num_test = 2 * num_facts, 48
    rows, questions = make_questions(num_facts, num_wordings, num_facts // 4)
    sizes = [3 + i % 3 for i in range(num_shown)] + [4 + i % 2 for i in range(num_test + num_prompts)]
    lists = make_lists(sizes, seed=1)
    rows += [show(question, answer) for question, answer in lists[:num_shown]]
    prompts = [{"prompt": ask(question), "answer": answer, "kind": "sort"} for question, answer in lists[num_shown:]]
    files = {"train": rows, "questions": questions, "sort_test": prompts[:num_test], "sort_train": prompts[num_test:]}
    for name, content in files.items():
        write(folder / f"{name}.jsonl", content)
    return {name: len(content) for name, content in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the files")
    parser.add_argument("--facts", type=int, default=24, help="Functions to train on. Default: 24.")
    args = parser.parse_args()
    for name, count in make_all(args.folder, num_facts=args.facts).items():
        print(f"{args.folder / name}.jsonl: {count} rows")


if __name__ == "__main__":
    main()
