"""A trainer that pushes into a running vLLM, and compares the server's greedy answers with transformers' own.

    torchrun push_to_vllm.py URL MODEL RESULT dense|moe

Rank 0 writes what was found, a row for each step: tokens of both sides, the largest difference of log-probabilities.
"""

from __future__ import annotations

import copy
import json
import sys
import urllib.request

import torch
import torch.distributed as dist
from policy import NUM_NEW, answer_of, change, prompt_of, sharded
from transformers import AutoConfig, AutoModelForCausalLM

import fsdp2x
from fsdp2x.sync import SyncError, Vllm

url, folder, result, kind = sys.argv[1:]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
rows: list[dict] = []


def ask(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with opener.open(request, timeout=600) as response:
        return json.loads(response.read() or b"{}")


def answer_of_server(prompt: list[int]) -> tuple[list[int], list[float]]:
    words = {"model": "m", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "logprobs": 1}
    choice = ask("/v1/completions", {**words, "return_token_ids": True, "ignore_eos": True})["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def compare(step: str, **more: object) -> None:
    """The server's answer and that of the weights as they are now, on rank 0."""
    full = dict(fsdp2x.full_tensors(model))
    if rank == 0:
        plain.load_state_dict(full, strict=False)
        prompt = prompt_of(config.vocab_size)
        expected, scores = answer_of(plain, prompt)
        tokens, found = answer_of_server(prompt)
        apart = max(abs(a - b) for a, b in zip(scores, found, strict=True))
        version = ask("/weight_info").get("weight_version")
        row = {"step": step, "same": tokens == expected, "apart": apart, "tokens": tokens, "version": version}
        rows.append({**row, "expected": expected, "scores": scores, "found": found, **more})
    dist.barrier()


def push(sync: fsdp2x.sync.Session, step: str, version: str, **more: object) -> None:
    report = sync.push(version=version)
    compare(step, seconds=report.seconds, buckets=report.num_buckets, tensors=report.num_tensors, **more)


def fail(sync: fsdp2x.sync.Session, step: str) -> None:
    """A push that must fail, everywhere alike; the server stays paused."""
    mine: dict = {"phase": None, "bucket": None, "rank": None, "reason": "nothing was refused"}
    try:
        sync.push(version="never")
    except SyncError as error:
        mine = {"phase": error.phase, "bucket": error.bucket, "rank": error.rank, "reason": error.reason}
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    if rank == 0:
        paused, version = ask("/is_paused"), ask("/weight_info").get("weight_version")
        row = {"step": step, "alike": all(one == mine for one in everywhere), **mine}
        rows.append({**row, "torn": sync.is_torn, "paused": paused["is_paused"], "version": version})


dist.init_process_group("gloo")
rank = dist.get_rank()
config = AutoConfig.from_pretrained(folder)
plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = sharded(copy.deepcopy(plain))
compare("start")
small = {"bucket_bytes": 50_000}  # a layer needs several buckets

if kind == "moe":
    with fsdp2x.sync.connect(model, Vllm(url), **small) as sync:
        for step, is_on in (("without the cure", False), ("with the cure", True)):
            if rank == 0:
                ask("/collective_rpc", {"method": "cure", "args": [is_on]})
            dist.barrier()
            change(model, 1 + is_on)
            push(sync, step, step)

for number, options in enumerate(({"bucket_bytes": 1}, small, {})):
    with fsdp2x.sync.connect(model, Vllm(url), **options) as sync:
        change(model, 10 + number)
        push(sync, f"buckets of {options.get('bucket_bytes', 'all')}", str(number))

for number, step in enumerate(("wrong shapes", "unknown name")):
    other = copy.deepcopy(config)
    if step == "wrong shapes":
        other.intermediate_size //= 2  # of tensors that are too large vLLM takes a part, and says nothing
        other.head_dim //= 2
    strange = AutoModelForCausalLM.from_config(other, dtype=torch.float32)
    if step == "unknown name":
        strange.model.layers[1].nope = torch.nn.Parameter(torch.zeros(3))
    with fsdp2x.sync.connect(sharded(strange), Vllm(url), **small) as sync:
        fail(sync, step)
    with fsdp2x.sync.connect(model, Vllm(url), **small) as sync:
        change(model, 20 + number)
        push(sync, f"after {step}", f"repaired {number}")

some = {"params": lambda name, param: "layers.1." not in name}
with fsdp2x.sync.connect(model, Vllm(url), **some) as sync:
    fail(sync, "left out")
with fsdp2x.sync.connect(model, Vllm(url)) as sync:
    push(sync, "after what was left out", "whole")
with fsdp2x.sync.connect(model, Vllm(url, partial=True), **some) as sync:
    push(sync, "partial", "partial")

if kind == "dense":
    # A CPU gives no memory back, but the order of calls is that of any device.
    target = Vllm(url)
    with fsdp2x.sync.connect(model, target) as sync:
        push(sync, "before sleep", "awake")
        for level in (1, 2):
            target.sleep(level)
            if rank == 0:
                assert ask("/is_sleeping")["is_sleeping"]
            dist.barrier()
            change(model, 30 + level)
            push(sync, f"out of sleep {level}", f"woken {level}")
        target.sleep(1)
        target.wake()
        dist.barrier()
        compare("woken without a push")

with fsdp2x.sync.connect(model, Vllm(url, group="gloo"), **small) as sync:
    for number in range(2):
        change(model, 40 + number)
        push(sync, f"broadcast {number}", f"broadcast {number}")

if rank == 0:
    with open(result, "w") as file:
        json.dump(rows, file, indent=1)
dist.barrier()
dist.destroy_process_group()
