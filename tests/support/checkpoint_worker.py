"""A worker of checkpoint-engine for tests: the dialogue of release 0.4.2, on memory of the CPU.

Traps: what it loads are views of the buffer, not copies; a bucket that fails is a text, and the worker goes on; the
buffer is let go of at the first end, and used again right after; nothing is answered by a worker that raises.
"""

import weakref

import torch


class Worker:
    """`weights`: what it runs with. `bad`: a tensor that is refused; `breaks_at`: where it raises; each once."""

    def __init__(self, uuid=None):
        self.uuid, self.weights, self.events = uuid, {}, []
        self.bad = self.breaks_at = None
        self.buffer = lambda: None

    def update_weights_from_ipc(self, zmq_handles):
        import zmq

        socket = zmq.Context.instance().socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        update_weights_from_ipc(socket, zmq_handles[self.uuid], None, run=self.load, post_hook=self.post, seen=self.see)

    def see(self, buffer):
        self.buffer = weakref.ref(buffer)
        self.fail_at("handle")

    def load(self, items):
        self.fail_at("load")
        self.events.append([name for name, _ in items])
        for name, tensor in items:
            if name == self.bad:
                self.bad = None
                raise KeyError(name)
            self.weights[name] = tensor.clone()

    def post(self):
        self.fail_at("post")
        assert self.buffer() is None, "the buffer is alive"
        self.events.append("post")

    def fail_at(self, place):
        if self.breaks_at == place:
            self.breaks_at = None
            raise Ended(f"the worker broke at {place}")


class Ended(BaseException):
    """Passes by what catches errors: the worker answers nothing."""


def update_weights_from_ipc(socket, zmq_handle, device_id, *, run, post_hook, seen):
    socket.connect(zmq_handle)
    try:
        rebuild, arguments = socket.recv_pyobj()
        assert device_id is None, "memory of a device"
        buffer = rebuild(*arguments)
        assert buffer.dtype == torch.uint8
        seen(buffer)
        socket.send(b"")
        is_released = False
        while True:
            payload = socket.recv_pyobj()
            if is_released:
                assert payload is None
                post_hook()
                socket.send(b"")
                return
            if payload is None:
                is_released, buffer = True, None
                socket.send(b"")
            elif isinstance(payload, list):
                try:
                    run([(item["name"], view(item, buffer)) for item in payload])
                    socket.send(b"")
                except Exception as error:
                    socket.send_string(f"{type(error).__name__}: {error}")
            elif isinstance(payload, Exception):
                raise payload
            else:
                raise TypeError(f"Unexpected payload type: {type(payload)}")
    finally:
        socket.close()


def view(item, buffer):
    shape, offset = torch.Size(item["shape"]), item["offset"]
    assert offset % 256 == 0
    return buffer[offset : offset + item["dtype"].itemsize * shape.numel()].view(item["dtype"]).view(shape)
