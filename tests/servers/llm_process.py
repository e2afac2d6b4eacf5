"""A ``vllm.LLM`` in the environment of vLLM, whose methods another process calls.

    python llm_process.py SOCKET MODEL        answers (method, arguments) with (whether it came to an end, what of it)

Each call is made in a thread of its own, as ``fsdp2x.sync.Vllm`` does in the process of an ``LLM``.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Client


def answer(llm, prompt: list[int], num_new: int) -> tuple[list[int], list[float]]:
    from vllm import SamplingParams

    words = SamplingParams(temperature=0, max_tokens=num_new, logprobs=0, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], words, use_tqdm=False)[0].outputs[0]
    tokens = list(output.token_ids)
    return tokens, [row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True)]


def main() -> None:
    from vllm import LLM

    socket, model = sys.argv[1:]
    with Client(socket) as caller:
        llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            block_size=32,
            skip_tokenizer_init=True,
            worker_extension_cls="vllm_worker.Fsdp2xWorker",
        )
        extension = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
        caller.send((True, extension))

        def run(name: str, arguments: tuple) -> None:
            try:
                method = (lambda *words: answer(llm, *words)) if name == "answer" else llm
                for part in name.split(".") if name != "answer" else ():
                    method = getattr(method, part)
                caller.send((True, method(*arguments)))
            except Exception as error:
                caller.send((False, f"{type(error).__name__}: {error}"))

        while True:
            try:
                asked = caller.recv()
            except EOFError:
                return
            thread = threading.Thread(target=run, args=asked)
            thread.start()
            thread.join()


if __name__ == "__main__":
    main()
