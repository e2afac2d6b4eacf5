"""A vLLM for tests: the names, order, and traps of release 0.32.0, in threads of this process.

`installed()` makes `import vllm` find the modules that a worker extension imports. `Core` is an engine that does one
thing at a time. Each of its workers has a thread and queues, as with tensor parallelism. Use it through `Llm` and
`serving`.

Traps: The engine keeps tensors until a layer is complete, and padded ones until the end. Parameters are prepacked, and
experts are repacked only without a kernel. A bad tensor breaks the session, and a worker that raised leaves answers in
the queues. The engine does not reset its prefix cache while requests hold it. Wakes are partial, and sleep drops
weights.

Adapters: The engine loads them by path, and does not load a known number again. New weights drop them. Modules without
an adapter are skipped.
"""

import contextlib
import json
import queue
import sys
import threading
from types import ModuleType, SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import torch
from torch import nn

from fsdp2x.rl.sync.receiver.vllm_worker import Fsdp2xWorker
from http_server import http_server

# ---- layers


class Layer(nn.Module):
    """`loads`: name in files -> the slice of `weight` that it fills. It runs with `packed`, not with `weight`."""

    def __init__(self, shape, loads, has_packing=True):
        super().__init__()
        self.shape, self.loads, self.has_packing = shape, loads, has_packing
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.info = SimpleNamespace(restore_metadata=({"weight": torch.empty(shape, device="meta")}, {}))
        self.info.reset = self.reset
        self.info.can_load = lambda: self.info.load_numel_total is not None
        self.reset()
        self.process()

    def reset(self):
        self.info.loaded_weights, self.info.load_numel, self.info.load_numel_total = [], 0, None
        self.info.kernel_tensors = None

    def process(self):
        """Repacks the weight after a load, which leaves the parameter without elements."""
        if self.has_packing:
            self.packed = self.weight.detach().t().clone()
            self.weight.data = torch.empty(0)

    def value(self):
        assert not self.weight.is_meta, "a layer without memory runs"
        return self.packed.t() if self.has_packing else self.weight.detach()

    def start(self):
        if not self.info.can_load():
            self.info.kernel_tensors = ({"weight": self.weight}, {})
            self.weight = nn.Parameter(torch.empty(self.shape, device="meta"), requires_grad=False)
            self.info.load_numel_total = self.weight.numel()

    def load(self, name, tensor, rank):
        target = self.loads[name]
        if not self.info.can_load():
            if self.weight.numel() != torch.Size(self.shape).numel():
                raise ValueError(f"load weight {list(tensor.shape)} into parameter [0]")
            return  # complete already: vLLM ignores what comes on top
        self.info.loaded_weights.append((name, tensor))
        part = target(torch.empty(self.shape, device="meta"))
        self.require_fit(tensor, part)
        self.info.load_numel += part.numel()
        if self.info.load_numel >= self.info.load_numel_total:
            self.complete(rank)

    @staticmethod
    def num_parts(tensor, part):
        return max(1, tensor.shape[0] // max(1, part.shape[0]))

    def require_fit(self, tensor, part):
        if not part.numel() and tensor.shape[0] > 1:
            return  # this rank has padding alone
        if tensor.chunk(self.num_parts(tensor, part))[0].shape != part.shape:
            raise ValueError(f"Attempted to load weight ({tensor.shape}) into parameter ({part.shape})")

    def complete(self, rank):
        held = self.info.kernel_tensors[0]["weight"]
        fresh = torch.zeros(self.shape)
        for name, tensor in self.info.loaded_weights:
            part = self.loads[name](fresh)
            self.require_fit(tensor, part)
            part.copy_(tensor.chunk(self.num_parts(tensor, part))[rank % self.num_parts(tensor, part)])
        self.weight = held
        held.data = fresh
        self.process()
        self.reset()

    def finish(self, rank):
        if self.info.can_load():
            if self.info.load_numel > 0:
                self.complete(rank)
            else:
                self.weight = self.info.kernel_tensors[0]["weight"]
                self.reset()


class Experts(Layer):
    """Prepacked where its method has no kernel; else what comes is copied as it is into packed storage."""

    def __init__(self, shape, loads):
        self.quant_method = SimpleNamespace(moe_kernel=None)
        super().__init__(shape, loads)

    def process(self):
        if self.quant_method.moe_kernel is None:
            self.packed = self.weight.detach().transpose(1, 2).contiguous()
            self.quant_method.moe_kernel = object()
        else:
            self.packed = self.weight.detach().clone().reshape(self.packed.shape)
        self.weight.data = torch.empty(0)

    def value(self):
        assert self.quant_method.moe_kernel is not None, "experts without a kernel run"
        assert not self.weight.is_meta, "a layer without memory runs"
        return self.packed.transpose(1, 2)


def whole(tensor):
    return tensor


class Model(nn.Module):
    """embed (padded, 10 rows, on rank 0); per layer qkv (fused, cut over ranks), norm, experts; `bad`: raises once."""

    def __init__(self, rank, world, num_layers=2, width=8, num_experts=2):
        super().__init__()
        self.rank, self.bad = rank, None
        rows = width // world
        layers = {"embed": Layer((16, width), {"embed.weight": lambda t: t[: 0 if rank else 10]})}
        for i in range(num_layers):
            qkv = {f"layers.{i}.{n}.weight": (lambda t, k=k: t[k * rows : (k + 1) * rows]) for k, n in enumerate("qkv")}
            layers[f"qkv{i}"] = Layer((3 * rows, width), qkv)
            layers[f"norm{i}"] = Layer((width,), {f"layers.{i}.norm.weight": whole}, has_packing=False)
            experts = {f"layers.{i}.experts.{e}.weight": (lambda t, e=e: t[e]) for e in range(num_experts)}
            layers[f"experts{i}"] = Experts((num_experts, 4, width), experts)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.attention = nn.Module()
        self.attention.info = SimpleNamespace(
            restore_metadata=({"k_scale": torch.empty(1, device="meta")}, {}),
            load_numel=0,
            load_numel_total=1,
            kernel_tensors=({}, {}),
            loaded_weights=[],
            can_load=lambda: True,
            reset=lambda: None,
        )

    def load_weights(self, items):
        for name, tensor in items:
            layer = next((layer for layer in self.children() if name in getattr(layer, "loads", ())), None)
            if layer is None:
                raise ValueError(f"There is no module or parameter named {name!r}")
            if name == self.bad:
                self.bad, tensor = None, tensor[:1]
            layer.load(name, tensor, self.rank)

    def values(self):
        """Returns the weights that it runs with, by their names in files, as this rank's parts."""
        return {
            name: part(layer.value()).clone()
            for layer in self.children()
            if isinstance(layer, Layer)
            for name, part in layer.loads.items()
        }


class Whole(Model):
    """A layer for each of ``shapes``, by the names in files, on one rank."""

    def __init__(self, shapes):
        nn.Module.__init__(self)
        self.rank, self.bad = 0, None
        for index, (name, shape) in enumerate(shapes.items()):
            self.add_module(f"layer{index}", Layer(shape, {name: whole}, has_packing=len(shape) == 2))


@contextlib.contextmanager
def installed():
    def initialize(model):
        for layer in model.children():
            if isinstance(layer, Layer):
                layer.start()

    def finalize(model, config):
        assert config == "model config"
        for layer in model.children():
            if isinstance(layer, Layer):
                layer.finish(model.rank)

    nothing = SimpleNamespace(
        restore_metadata=({}, {}),
        kernel_tensors=({}, {}),
        load_numel=0,
        load_numel_total=0,
        loaded_weights=[],
        can_load=lambda: True,
    )
    content = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": contextlib.nullcontext},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {
            "is_deferred_attention_layer": lambda layer: "k_scale" in layer.info.restore_metadata[0]
        },
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": contextlib.nullcontext},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: getattr(layer, "info", nothing)
        },
    }
    content |= {"vllm.lora": {}, "vllm.lora.peft_helper": {"PEFTHelper": PeftHelper}}
    content["vllm.lora.request"] = {"LoRARequest": LoraRequest}
    before = {name: sys.modules.get(name) for name in content}
    for name, names in content.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


# ---- adapters


class LoraRequest(SimpleNamespace):
    def __init__(self, lora_name, lora_int_id, lora_path, load_inplace=False):
        super().__init__(lora_name=lora_name, lora_int_id=lora_int_id, lora_path=lora_path, load_inplace=load_inplace)


class PeftHelper(SimpleNamespace):
    @classmethod
    def from_dict(cls, config):
        return cls(**{name: config[name] for name in ("r", "lora_alpha", "target_modules", "use_rslora")})

    def validate_legal(self, config):
        if self.r > config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank {config.max_lora_rank}.")


class LoraModel:
    def __init__(self, lora_model_id, rank, loras):
        self.id, self.rank, self.loras = lora_model_id, rank, loras

    @classmethod
    def from_lora_tensors(cls, lora_model_id, tensors, peft_helper, **options):
        return cls(lora_model_id, peft_helper.r, {n: SimpleNamespace(lora_b=t) for n, t in tensors.items()})

    def clone(self, lora_model_id):
        return LoraModel(lora_model_id, self.rank, dict(self.loras))


class LoraManager:
    """A worker's adapters. `active`: adapters by request number. `bad`: raises once after a load."""

    max_position_embeddings, vocab_size = 64, 32
    lora_config = SimpleNamespace(max_lora_rank=4, lora_dtype=torch.float32)
    _lora_model_cls = LoraModel

    def __init__(self, model):
        self.active, self.bad = {}, False
        packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self._adapter_manager = SimpleNamespace(
            supported_lora_modules=["qkv_proj", "down_proj"], packed_modules_mapping=packed, model=model
        )

    def _load_adapter(self, request):
        raise FileNotFoundError(f"no adapter is at {request.lora_path!r}")

    def add_adapter(self, request):
        if request.lora_int_id not in self.active or request.load_inplace:
            lora = self._load_adapter(request)
            self.active.pop(request.lora_int_id, None)
            if self.bad:
                self.bad = False
                raise ValueError("the slot is of another shape")
            self.active[request.lora_int_id] = lora
        return True


# ---- workers and the engine's core


class Worker(Fsdp2xWorker):
    device = torch.device("cpu")
    vllm_config, model_config = "vllm config", "model config"

    def __init__(self, model):
        self.model, self.lora_resets = model, 0
        self.model_runner, self.lora_manager = self, LoraManager(model)

    def reset_lora_state(self):
        self.lora_resets += 1
        self.lora_manager.active.clear()

    def get_model(self):
        return self.model

    def drop(self):
        for layer in self.model.children():
            if isinstance(layer, Layer):
                (layer.packed if hasattr(layer, "packed") else layer.weight.data).fill_(7)


class Core:
    """An engine, with as many workers as `world`; `events`: what was asked of it, in order.

    ``shapes``: the parameters of another model than `Model`, for one worker.
    """

    def __init__(self, world=1, extension="fsdp2x.sync.vllm_worker.Fsdp2xWorker", shapes=None):
        self.workers = [Worker(Model(rank, world) if shapes is None else Whole(shapes)) for rank in range(world)]
        self.events, self.busy = [], threading.Lock()
        self.mode, self.asleep, self.version, self.cache_of = None, set(), "default", None
        self.running, self.world_size, self.extension = [], world, extension
        self.lora_config, self.adapters = LoraManager.lora_config, {}  # requests by the names that are registered
        self.requests, self.replies = [queue.Queue() for _ in range(world)], [queue.Queue() for _ in range(world)]
        for rank in range(world):
            threading.Thread(target=self._work, args=(rank,), daemon=True).start()

    def _work(self, rank):
        while (request := self.requests[rank].get()) is not None:
            try:
                method, args = request
                self.replies[rank].put((True, getattr(self.workers[rank], method)(*args)))
            except Exception as error:
                self.replies[rank].put((False, repr(error)))

    def stop(self):
        for rank, requests in enumerate(self.requests):
            requests.put(None)
            if hasattr(self.workers[rank], "fsdp2x_receiver"):
                self.workers[rank].fsdp2x_receiver.close()

    def ask(self, name, *args):
        """One request at a time, in the order in which they come."""
        with self.busy:
            self.events.append((name, *args) if name != "collective_rpc" else args[0])
            return getattr(self, f"on_{name}")(*args)

    def on_collective_rpc(self, method, args):
        assert "weights" not in self.asleep or "receive" not in method, "weights that sleep are written"
        for requests in self.requests:
            requests.put((method, args))
        answers = []
        for replies in self.replies:  # the first failure raises, and the other replies stay in their queues
            is_well, answer = replies.get()
            if not is_well:
                raise RuntimeError(f"Worker failed with error {answer!r}")
            answers.append(answer)
        return answers

    def on_add_lora(self, request):
        assert not self.asleep, "memory that sleeps is written"
        for worker in self.workers:
            worker.lora_manager.add_adapter(request)

    def on_load_lora_adapter(self, lora_name, lora_path, load_inplace):
        assert load_inplace or lora_name not in self.adapters
        number = self.adapters[lora_name].lora_int_id if lora_name in self.adapters else 1 + len(self.adapters)
        request = LoraRequest(lora_name, number, lora_path, load_inplace)
        self.on_add_lora(request)
        self.adapters[lora_name] = request

    def adapted(self, request):
        """The tensors that a request for an adapter runs with, the same on all workers."""
        assert self.mode is None and not self.asleep, "it is paused or asleep"
        touched = LoraRequest(request.lora_name, request.lora_int_id, request.lora_path)
        self.on_add_lora(touched)
        active = [worker.lora_manager.active[request.lora_int_id].loras for worker in self.workers]
        return [{name: layer.lora_b for name, layer in one.items()} for one in active]

    def on_pause(self, mode):
        self.mode = mode
        if mode != "keep":
            self.running.clear()
            self.cache_of = None

    def on_resume(self):
        assert not self.asleep, "an engine resumes without its memory"
        self.mode = None

    def on_sleep(self, level):
        self.on_pause("abort")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            for worker in self.workers:
                worker.drop()

    def on_wake_up(self, tags):
        self.asleep -= set(tags)
        if not self.asleep:
            self.mode = None
        return not self.asleep

    def on_is_sleeping(self):
        return self.mode is not None or bool(self.asleep)

    def on_reset_prefix_cache(self, reset_running_requests=False):
        if self.running and not reset_running_requests:
            return False
        self.cache_of = None
        return True

    def on_reset_encoder_cache(self):
        pass

    def on_set_weight_version(self, version):
        self.version = version

    def generate(self, keeps=False):
        """(label of the weights, label of those that the cache was computed with) that a request is answered with."""
        assert self.mode is None and not self.asleep, "it is paused or asleep"
        for worker in self.workers:
            worker.model.values()
        if keeps:
            self.running.append(object())
        self.cache_of = self.cache_of or self.version
        return self.version, self.cache_of


class Llm:
    def __init__(self, core):
        self._core = core

        class Config:
            parallel_config = SimpleNamespace(worker_extension_cls=core.extension)
            lora_config = property(lambda self: core.lora_config)

        config = Config()
        self.llm_engine = SimpleNamespace(
            vllm_config=config,
            is_sleeping=lambda: core.ask("is_sleeping"),
            add_lora=lambda request: core.ask("add_lora", request),
            reset_encoder_cache=lambda: core.ask("reset_encoder_cache"),
        )

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self._core.ask("collective_rpc", method, args)

    def sleep(self, level=1, mode="abort"):
        return self._core.ask("sleep", level)

    def wake_up(self, tags=None):
        return self._core.ask("wake_up", tags)

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self._core.ask("reset_prefix_cache", reset_running_requests)

    def update_weight_version(self, new_version):
        self._core.ask("set_weight_version", new_version)


def serving(core, has_dev_routes=True, complete=None):
    """The address of a server in front of `core`. ``complete``: the choice for the body of a completion request."""

    def answer(method, path, query, body):
        def one(name, default):
            return query.get(name, [default])[0]

        match method, path:
            case "GET", "/v1/models":
                return {"data": [{"id": "m"}]}
            case "POST", "/v1/completions" if complete is not None:
                return {"choices": [complete(body)]}
            case "GET", "/server_info":
                return {"vllm_config": {"parallel_config": {"worker_extension_cls": core.extension}}}
            case "POST", "/v1/unload_lora_adapter" if core.lora_config is not None:
                raise LookupError("'lora_name' needs to be provided to unload a LoRA adapter.")
            case "POST", "/v1/load_lora_adapter" if core.lora_config is not None:
                return core.ask("load_lora_adapter", *body.values()) or "Success: LoRA adapter added"
            case "GET", "/get_world_size":
                return {"world_size": core.world_size}
            case "GET", "/is_sleeping":
                return {"is_sleeping": core.ask("is_sleeping")}
            case "POST", "/collective_rpc":
                results = core.ask("collective_rpc", body["method"], tuple(body.get("args", [])))
                return {"results": [r if isinstance(r, dict | list) else str(r) for r in results]}
            case "POST", "/pause":
                return {"status": core.ask("pause", one("mode", "abort")) or "paused"}
            case "POST", "/resume":
                return {"status": core.ask("resume") or "resumed"}
            case "POST", "/sleep":
                return {"status": core.ask("sleep", int(one("level", "1"))) or "sleeping"}
            case "POST", "/wake_up":
                return {"status": "awake" if core.ask("wake_up", query.get("tags")) else "sleeping"}
            case "POST", "/reset_prefix_cache":
                running = one("reset_running_requests", "false") == "true"
                return {"success": core.ask("reset_prefix_cache", running)}
            case "POST", "/reset_encoder_cache":
                return core.ask("reset_encoder_cache")
            case "POST", "/update_weight_version":
                return {"success": core.ask("set_weight_version", body["new_version"]) is None}
        return None

    def handle(request, text):
        url = urlsplit(request.path)
        try:
            known = has_dev_routes or url.path == "/health"
            content = (
                answer(request.command, url.path, parse_qs(url.query), json.loads(text or b"{}")) if known else None
            )
            is_empty = known and url.path == "/reset_encoder_cache"
            status = 200 if content is not None or is_empty else 404
            return status, b"" if is_empty else json.dumps(content).encode()
        except LookupError as error:
            return 400, json.dumps({"error": {"message": str(error)}}).encode()
        except Exception as error:
            return 500, json.dumps({"error": {"message": str(error)}}).encode()

    return http_server(handle)
