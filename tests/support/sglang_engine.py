"""An SGLang for tests: the routes, order, and traps of release 0.5.23, in threads of this process.

Buckets: The engine refuses a bucket outside of a session. It unpickles only an exact list of globals, and views a
bucket at offsets that the dtype must divide. Each worker reads the payload of its number, and copies run after the
answer. The engine ignores unknown names, and an error in a loader ends it. Post-load work runs once, at the end of the
session. A label that comes with a bucket takes effect at once. The engine refuses to flush its cache while requests
hold it, which fails the bucket that asked for the flush.

Memory: Only an idle engine releases it, and released memory keeps no weights.

Adapters: The engine refuses a name that exists. An unloaded adapter is gone. The scale is only alpha / r.
"""

import base64
import datetime
import io
import json
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

import device_handles
from http_server import http_server


class Unpickler(pickle.Unpickler):
    """Allows those of SGLang's globals that a bucket of bytes needs."""

    ALLOWED = {("collections", "OrderedDict"), ("types", "SimpleNamespace"), ("torch", "Size")}
    ALLOWED |= {("torch", "Tensor"), ("torch.storage", "UntypedStorage")}
    ALLOWED |= {("torch", "bfloat16"), ("torch", "float32"), ("torch", "uint8"), ("torch", "FloatStorage")}
    ALLOWED |= {("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes")}

    def find_class(self, module, name):
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return device_handles.rebuilding
        if (module, name) not in self.ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


class Refused(Exception):
    """An answer with the status 400."""


class Member:
    """A worker in a weights-update group, with its own thread.

    It joins the group under the names that torch's functions use. SGLang calls these, but a thread in the trainer's
    process cannot (`test_sync_sglang.py` calls them). A bucket has no gaps, like SGLang's own.
    """

    def __init__(self, about, rank):
        self._thread = ThreadPoolExecutor(1)
        self.answer = self._thread.submit(self._join, about, rank)

    def _join(self, about, rank):
        limit, name = datetime.timedelta(seconds=20), about["group_name"]
        store = dist.TCPStore(about["master_address"], about["master_port"], about["world_size"], timeout=limit)
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._group = dist.ProcessGroupGloo(store, rank, about["world_size"], timeout=limit)

    def take(self, dtypes, shapes):
        self.answer = self._thread.submit(self._take, [getattr(torch, dtype) for dtype in dtypes], shapes)

    def _take(self, dtypes, shapes):
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        bucket = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast(bucket, 0).wait()
        parts = zip(bucket.split(sizes), dtypes, shapes, strict=True)
        return [part.view(dtype).view(shape) for part, dtype, shape in parts]

    def end(self):
        self._group = None
        self._thread.shutdown()


class Server:
    """One engine. `shapes`: the parameters that it has; `weights` is what it runs with, None while it cannot."""

    def __init__(self, shapes, num_workers=1, num_replicas=1, has_sessions=True):
        self.shapes, self.num_workers, self.num_replicas = shapes, num_workers, num_replicas
        self.has_sessions, self.is_open, self.is_dead = has_sessions, False, False
        self.loaded = [{} for _ in range(num_workers)]
        self.queued, self.num_post_loads = [], 0
        self.weights, self.version, self.cache_of = None, "default", None
        self.mode, self.asleep, self.running, self.events = None, set(), [], []
        self.broken, self.bad, self.flags, self.groups = {}, None, [], {}
        self.enable_lora, self.adapters = True, {}  # by name: (scale, tensors of each worker)

    # requests

    def on_server_info(self, body):
        return {"tp_size": self.num_workers, "dp_size": self.num_replicas, "enable_lora": self.enable_lora}

    def on_load_lora_adapter_from_tensors(self, body):
        name, config = body["lora_name"], body["config_dict"]
        if name in self.adapters:
            raise Refused(f"Failed to load LoRA adapter {name} because it is already loaded")
        assert config["target_modules"] and not config.get("use_dora")
        found = [
            Unpickler(io.BytesIO(base64.b64decode(one, validate=True))).load()
            for one in body["serialized_named_tensors"]
        ]
        assert len(found) == self.num_workers
        self.adapters[name] = config["lora_alpha"] / config["r"], found

    def on_unload_lora_adapter(self, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused("LoRA adapter is not loaded")

    def on_pause_generation(self, body):
        self.mode = body["mode"]
        if self.mode == "abort":
            self.running.clear()

    def on_continue_generation(self, body):
        assert not self.asleep, "an engine goes on without its memory"
        self.mode = None

    def on_begin_weight_update(self, body):
        if self.is_open:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.is_open, self.weights = True, None

    def on_update_weights_from_tensor(self, body):
        assert body["load_format"] == "flattened_bucket"
        self.flags.append((body["flush_cache"], body.get("weight_version")))
        if self.has_sessions and not self.is_open:
            raise Refused("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        assert "weights" not in self.asleep, "weights that are released are written"
        for worker in range(self.num_workers):
            data = base64.b64decode(body["serialized_named_tensors"][worker], validate=True)
            bucket = Unpickler(io.BytesIO(data)).load()
            for place in bucket["metadata"]:
                view = bucket["flattened_tensor"][place.start_idx : place.end_idx].view(place.dtype)
                self.load(worker, place.name, view.reshape(place.shape))
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        if body["flush_cache"] and not self.flush():
            raise Refused("Weights were updated, but the cache was not flushed")
        if not self.has_sessions:
            self.settle()

    def on_init_weights_update_group(self, body):
        assert body["group_name"] not in self.groups and body["backend"] == "gloo"
        members = [Member(body, body["rank_offset"] + worker) for worker in range(self.num_workers)]
        self.groups[body["group_name"]] = members
        for member in members:
            member.answer.result()

    def on_update_weights_from_distributed(self, body):
        assert body["load_format"] == "flattened_bucket"
        self.flags.append((body["flush_cache"], body.get("weight_version")))
        if self.has_sessions and not self.is_open:
            raise Refused("update_weights_from_distributed must run between begin_weight_update() and end_...()")
        if body["group_name"] not in self.groups:
            self.is_dead = True
            raise ConnectionError("an assertion ends the scheduler")
        for member in self.groups[body["group_name"]]:
            member.take(body["dtypes"], body["shapes"])
        for worker, member in enumerate(self.groups[body["group_name"]]):
            for name, tensor in zip(body["names"], member.answer.result(), strict=True):
                self.load(worker, name, tensor)
        if not self.has_sessions:
            self.settle()

    def on_destroy_weights_update_group(self, body):
        if body["group_name"] not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        for member in self.groups.pop(body["group_name"]):
            member.end()

    def load(self, worker, name, tensor):
        if name == self.bad:
            self.is_dead = True
            raise ConnectionError("the scheduler is gone")
        if name in self.shapes:
            assert tensor.shape == self.shapes[name]
            self.queued.append((worker, name, tensor))

    def settle(self):
        """Does the copies that run after the answers."""
        for worker, name, tensor in self.queued:
            self.loaded[worker][name] = tensor.clone()
        self.queued, self.weights = [], [dict(one) for one in self.loaded]

    def on_end_weight_update(self, body):
        if not self.is_open:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.is_open, self.num_post_loads = False, self.num_post_loads + 1
        self.settle()

    def on_update_weight_version(self, body):
        if body.get("abort_all_requests", True):
            self.running.clear()
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    def flush(self):
        if self.running and self.mode != "retract":
            return False
        self.cache_of = None
        return True

    def on_flush_cache(self, body):
        if not self.flush():
            raise Refused("Flush cache failed.")
        return "Cache flushed.\n"

    def on_release_memory_occupation(self, body):
        assert not self.running, "release_memory_occupation should be called only when server is idle."
        self.asleep |= set(body["tags"])
        if "weights" in body["tags"]:
            self.weights, self.loaded = None, [{} for _ in self.loaded]
        return None

    def on_resume_memory_occupation(self, body):
        for tag in body["tags"]:
            self.asleep.remove(tag)
        return None

    # generation

    def generate(self, keeps=False):
        """(label of the weights, label of those that the cache was computed with)."""
        assert self.mode is None and not self.asleep and not self.is_open, "it is paused, asleep or in a session"
        if keeps:
            self.running.append(object())
        self.cache_of = self.cache_of or self.version
        return self.version, self.cache_of


def serving(server):
    """The address of an HTTP server in front of `server`."""
    busy = threading.Lock()

    def answer(request, text):
        url = urlsplit(request.path)
        route, body = url.path.strip("/"), {**parse_qs(url.query), **json.loads(text or b"{}")}
        method = getattr(server, f"on_{route}", None)
        if route in ("begin_weight_update", "end_weight_update") and not server.has_sessions:
            method = None
        with busy:
            if server.is_dead:
                return None  # the connection is closed without an answer
            server.events.append(route)
            status, content = 404, {"detail": "Not Found"}
            try:
                if route in server.broken:
                    raise Refused(server.broken.pop(route))
                if method is not None:
                    status, content = 200, method(body)
                    if content is None and "memory" not in route:
                        content = {"success": True, "message": "Success"}
            except Refused as error:
                status, content = 400, {"success": False, "message": str(error)}
            except ConnectionError:
                return None
            except Exception as error:
                status, content = 500, {"message": f"{type(error).__name__}: {error}"}
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        return status, data

    return http_server(answer)
