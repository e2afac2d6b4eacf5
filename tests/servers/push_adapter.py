"""A trainer that pushes a LoRA adapter into a running vLLM, and compares the server's answers with PEFT's own.

torchrun push_adapter.py URL MODEL RESULT SCALE

SCALE: of the adapters' random factors.
"""

from __future__ import annotations

import copy
import json
import sys
import urllib.request

import torch
import torch.distributed as dist
from policy import NUM_NEW, answer_of, prompt_of
from transformers import AutoModelForCausalLM

import fsdp2x
from fsdp2x.sync import SyncError, Vllm

url, folder, result, scale = sys.argv[1:]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
rows: list[dict] = []


def answer_of_server(name: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    words = {"model": name, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "logprobs": 1}
    data = json.dumps({**words, "return_token_ids": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with opener.open(request, timeout=600) as response:
        choice = json.loads(response.read())["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def compare(step: str, name: str, plain: torch.nn.Module, **more: object) -> None:
    """The server's answer and that of the unsharded model, on rank 0."""
    if rank == 0:
        prompt = prompt_of(plain.config.vocab_size)
        expected, scores = answer_of(plain, prompt)
        tokens, found = answer_of_server(name, prompt)
        apart = max(abs(a - b) for a, b in zip(scores, found, strict=True))
        rows.append({"step": step, "same": tokens == expected, "apart": apart, "tokens": tokens, **more})
    dist.barrier()


def adapted(r: int) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return fsdp2x.add_lora(base, {"r": r, "lora_alpha": 2 * r, "target_modules": "all-linear"})


def change(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Other factors, and the model sharded in the place of a copy."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = float(scale) * torch.randn(param.shape, generator=generator)
    return fsdp2x.fully_shard(copy.deepcopy(model))


dist.init_process_group("gloo")
rank = dist.get_rank()
twin, target = adapted(4), Vllm(url)
compare("base", "m", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
for version in range(2):
    model = change(twin, version)
    with fsdp2x.sync.connect(model, target, weights="adapter", adapter_name="policy") as sync:
        report = sync.push(version=version)
    compare(f"adapter {version}", "policy", twin, seconds=report.seconds, bytes=report.bytes_sent)
with fsdp2x.sync.connect(change(adapted(32), 5), target, weights="adapter", adapter_name="policy") as sync:
    try:
        sync.push(version="never")
    except SyncError as error:
        rows.append({"step": "refused", "phase": error.phase, "reason": error.reason})
compare("after a refused one", "policy", twin)
with fsdp2x.sync.connect(model, target, merge_adapters=True) as sync:
    report = sync.push(version="merged")
compare("merged", "m", twin, seconds=report.seconds, bytes=report.bytes_sent)
compare("merged, by the adapter's name", "policy", twin)
if rank == 0:
    with open(result, "w") as file:
        json.dump(rows, file, indent=1)
dist.barrier()
dist.destroy_process_group()
