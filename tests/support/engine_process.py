"""An engine in a process of its own, for tests: nothing of fsdp2x but the files that engines are given.

    python engine_process.py PATH_OF_ENGINE_PY ADDRESS BUCKET_IN_WHICH_IT_DIES SECRET

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


def main(path, address, last_bucket, secret):
    sys.path.insert(0, os.path.dirname(path))
    engine = importlib.import_module("engine")
    assert "fsdp2x" not in sys.modules
    weights, num_calls = {}, 0

    def load(items):
        nonlocal num_calls
        num_calls += 1
        if num_calls == last_bucket:
            os._exit(9)
        weights.update(items)

    if address.startswith("tcp:"):
        receiver = importlib.import_module("engine_tcp").TcpReceiver(address, load, secret=secret, timeout_s=20)
    else:
        receiver = engine.Receiver(address, load, timeout_s=20)
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
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
