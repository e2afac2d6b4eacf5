"""An engine in a process of its own, for tests: nothing of fsdp2x but the files that engines are given.

    python engine_process.py PATH_OF_ENGINE_PY ADDRESS

Answers each line of its standard input with the state of the weights and their digests, as JSON.
"""

import hashlib
import importlib
import json
import os
import select
import sys

import torch


def digests(weights):
    """Describes each tensor by name: dtype, shape, and the SHA-256 of its bytes in order."""
    found = {}
    for name, tensor in sorted(weights.items()):
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


def main(path, address):
    sys.path.insert(0, os.path.dirname(path))
    weights = {}
    if address.startswith("tcp:"):
        make = importlib.import_module("engine_group").GroupReceiver
    else:
        make = importlib.import_module("engine").Receiver
    receiver = make(address, weights.update, timeout_s=10)
    assert "fsdp2x" not in sys.modules
    print("ready", flush=True)
    while True:
        receiver.poll(0.05)
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps({**receiver.status, "digests": digests(weights)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2])
