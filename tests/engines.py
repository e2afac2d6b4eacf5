"""Engines for tests of weight pushes: they take weights as real ones do, traps included."""

import threading

import torch

from fsdp2x.sync.engine import Parameters, Receiver


class Layerwise:
    """Like vLLM's reload of layers: keeps what it is given until the end, and only then copies."""

    def __init__(self):
        self.weights, self.waiting, self.calls, self.modes = {}, [], [], []

    def start(self, mode):
        self.modes.append(mode)
        self.waiting = []

    def load(self, items):
        items = list(items)
        self.calls.append([name for name, _ in items])
        self.waiting += items

    def finish(self, version=None):
        self.weights.update((name, tensor.clone()) for name, tensor in self.waiting)
        self.waiting = []


class Store(Parameters):
    """Copies at once, makes its tensors as they come, and takes deltas."""

    def __init__(self):
        super().__init__({})
        self.bucket_sizes = []

    @property
    def weights(self):
        return self._tensors

    def check(self, layout):
        self._tensors = {name: torch.full(shape, 77).to(dtype) for name, dtype, shape in layout}

    def load(self, items):
        items = list(items)
        self.bucket_sizes.append(len(items))
        for name, tensor in items:
            self._tensors.setdefault(name, torch.empty_like(tensor))
        super().load(items)


class Served:
    """A receiver whose thread polls until the block ends."""

    def __init__(self, address, sink, timeout_s=20.0):
        self.receiver, self.versions = Receiver(address, sink, timeout_s=timeout_s), []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        while not self._stop.is_set():
            version = self.receiver.poll(0.02)
            if version is not None:
                self.versions.append(version)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.receiver.close()
