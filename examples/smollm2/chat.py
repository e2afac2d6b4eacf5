"""Chats with a HuggingFace folder in the terminal, by transformers alone.

python examples/smollm2/chat.py FOLDER                      a conversation; end it with Ctrl-D
python examples/smollm2/chat.py FOLDER --say "..." "..."    one answer to each text
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from answers import load, respond
from make_data import SYSTEM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="HuggingFace folder of the model")
    parser.add_argument("--say", nargs="+", help="Texts to answer, each in a new chat. Default: a conversation.")
    parser.add_argument(
        "--system", default=SYSTEM["content"], help="System message. Default: that of the training rows."
    )
    parser.add_argument("--max_tokens", type=int, default=64, help="Most tokens of an answer. Default: 64.")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    head = [{"role": "system", "content": args.system}]
    messages = list(head)
    texts: Iterable[str] = args.say or (line.strip() for line in sys.stdin)
    for text in texts:
        messages = [*(head if args.say else messages), {"role": "user", "content": text}]
        (answer,) = respond(model, tokenizer, [messages], max_tokens=args.max_tokens)
        messages.append({"role": "assistant", "content": answer})
        print(f"> {text}\n{answer}" if args.say else answer, flush=True)


if __name__ == "__main__":
    main()
