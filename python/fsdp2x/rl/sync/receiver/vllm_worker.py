"""vLLM's side of ``fsdp2x.sync.Vllm``: a worker extension that takes weights by vLLM's own reload.

    vllm serve MODEL --worker-extension-cls fsdp2x.sync.vllm_worker.Fsdp2xWorker      with VLLM_SERVER_DEV_MODE=1
    LLM(MODEL, worker_extension_cls="fsdp2x.sync.vllm_worker.Fsdp2xWorker")

This file, ``engine.py`` and ``engine_group.py`` need torch, the standard library, and vLLM. If fsdp2x is not installed,
copy them to a folder on the engine's PYTHONPATH, and use ``vllm_worker.Fsdp2xWorker``. It follows the code of vLLM
0.32.0. `tests/servers` runs it in that release, on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch

if __package__:
    from .engine import Receiver
    from .engine_group import GroupReceiver
else:
    from engine import Receiver
    from engine_group import GroupReceiver


ADAPTER_SCHEME = "fsdp2x://"  # of paths of adapters that workers hold


def adapter_path(name: str, version: int | str) -> str:
    """Returns the path by which vLLM knows a version of an adapter. Its prefix cache distinguishes adapters by it."""
    return f"{ADAPTER_SCHEME}{name}/{version}"


def place_of_process() -> list[str]:
    """Returns values that are equal for processes that can connect: the host's boot and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.readlink("/proc/self/ns/net")]


def _as_value(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Turns errors into answers. With several workers vLLM would give the others' answers to the next caller."""

    @functools.wraps(method)
    def answer(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return {"ok": True, **method(self, *args)}
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    return answer


class Fsdp2xWorker:
    """Methods that vLLM adds to its workers, for ``collective_rpc``. None of them raises."""

    device: Any  # of the worker that they are added to

    @_as_value
    def fsdp2x_listen(self, group: str | None = None) -> dict[str, Any]:
        """Opens this worker's receiver once, or lets it join the ``group`` at this address instead.

        Returns:
            Where it listens, what it holds, and values that identify the worker and its host.
        """
        held = getattr(self, "fsdp2x_receiver", None)
        if held is None:
            self.fsdp2x_reload = LayerwiseReload(self)
            self.fsdp2x_name = f"@fsdp2x-vllm-{os.getpid()}-{secrets.token_hex(8)}"
            self.fsdp2x_receiver = held = Receiver(self.fsdp2x_name, self.fsdp2x_reload)
        if group is not None and group != held.address:
            if held.has_trainer:
                raise RuntimeError("another trainer is connected")
            held.close()
            self.fsdp2x_receiver = held = GroupReceiver(group, self.fsdp2x_reload, held=held.status)
        about = {"address": held.address, "worker": self.fsdp2x_name, "place": place_of_process()}
        return {**held.status, **about}

    @_as_value
    def fsdp2x_receive(self, covers_all: bool, contact_s: float) -> dict[str, Any]:
        """Takes one push, to its commit or its end. ``covers_all``: missing parameters are an error."""
        _use_device(self.device)
        self.fsdp2x_reload.covers_all = covers_all
        return self.fsdp2x_receiver.receive(contact_s)

    @_as_value
    def fsdp2x_revert(self) -> dict[str, Any]:
        """Restores the previous adapter after a commit that failed elsewhere."""
        self.fsdp2x_reload.revert_adapter()
        return self.fsdp2x_receiver.status

    @_as_value
    def fsdp2x_tear(self, reason: str) -> dict[str, Any]:
        """Marks the weights as torn, because a step after a push failed."""
        self.fsdp2x_receiver.tear(reason)
        return self.fsdp2x_receiver.status

    @_as_value
    def fsdp2x_release(self) -> dict[str, Any]:
        """Releases the trainers' memory, and leaves their group."""
        self.fsdp2x_receiver.close()
        self.fsdp2x_receiver = Receiver(self.fsdp2x_name, self.fsdp2x_reload, held=self.fsdp2x_receiver.status)
        return self.fsdp2x_receiver.status


def _use_device(name: Any) -> None:
    """Selects the worker's device in this thread, which may not be the worker's."""
    device = torch.device(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


class LayerwiseReload:
    """The sink of a worker's receiver: vLLM's reload by layers, which repacks each layer once per push.

    vLLM keeps tensors until a layer is complete, and padded layers until the end, so the receiver passes copies. A
    failed push leaves layers without memory, and tensors that the next one would trip over. ``abort`` empties these
    layers and lets vLLM restore its old tensors.
    """

    keeps_tensors = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.covers_all = True
        self._is_open = False
        self._kernels: list[tuple[Any, Any]] = []  # of experts on the CPU: (method, its kernel)
        self._adapters: dict[str, Any] = {}  # by name: vLLM's object made from the tensors
        self._adapters_before: dict[str, Any] = {}

    def start(self, mode: str) -> None:
        if mode == "adapter":
            return self._serve_adapters()
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._model() as model:
            self._is_open = True
            if torch.device(self._worker.device).type == "cpu":
                self._forget_kernels(model)
            initialize_layerwise_reload(model)

    def load(self, items: list[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with self._model() as model, disable_mtp_completeness_check():
            try:
                model.load_weights(items)
            except AssertionError as error:  # vLLM's loaders compare shapes by assertions without a text
                said = f" ({error})" if str(error) else ""
                raise ValueError(
                    f"a tensor of {items[0][0]!r} to {items[-1][0]!r} does not have the shape that this engine "
                    f"loads{said}"
                ) from error

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._model() as model:
            missing = _left_out(model) if self.covers_all else []
            if missing:
                raise ValueError(
                    f"the push has nothing for {len(missing)} of this engine's layers, such as {missing[0]!r}, which "
                    "would keep their values. Push all parameters, or use Vllm(..., partial=True)."
                )
            finalize_layerwise_reload(model, self._worker.model_config)
            self._recall_kernels()
            if torch.device(self._worker.device).type == "cpu":
                _pack_tied_heads(model)
            else:
                torch.accelerator.synchronize()
        self._is_open = False
        self._worker.model_runner.reset_lora_state()  # as vLLM's finish_weight_update does

    # vLLM's loader of adapters gets a path that no disk has, and this worker answers for it, even after the adapter has
    # left vLLM's cache.

    def _serve_adapters(self) -> None:
        manager = self._lora_manager()
        if "_load_adapter" not in vars(manager):
            from_disk = manager._load_adapter
            manager._load_adapter = lambda request: self._held_adapter(request) or from_disk(request)

    def _lora_manager(self) -> Any:
        manager = getattr(self._worker.model_runner, "lora_manager", None)
        if manager is None:
            raise RuntimeError("this engine serves no adapters. Start it with --enable-lora (LLM(enable_lora=True)).")
        return manager

    def _held_adapter(self, request: Any) -> Any:
        """Returns the adapter of a request, or None for one on disk."""
        if not request.lora_path.startswith(ADAPTER_SCHEME):
            return None
        held = self._adapters.get(request.lora_name)
        # An error here would end vLLM's engine.
        held = self._lora_manager()._lora_model_cls(1, 1, {}) if held is None else held
        return held.clone(request.lora_int_id)

    def prepare_adapter(self, adapter: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
        """Makes vLLM's adapter of the tensors, by the steps of its loader for folders."""
        from vllm.lora.peft_helper import PEFTHelper

        manager, name = self._lora_manager(), adapter["name"]
        helper = PEFTHelper.from_dict({**adapter, "vllm_max_position_embeddings": manager.max_position_embeddings})
        helper.validate_legal(manager.lora_config)
        own = manager._adapter_manager
        packed = own.packed_modules_mapping
        known = {part for module in own.supported_lora_modules for part in packed.get(module, [module])}
        unknown = sorted(set(adapter["target_modules"]) - known)
        if unknown:  # vLLM would silently omit them
            raise ValueError(
                f"the adapter changes {', '.join(unknown)}, but this engine adapts {', '.join(sorted(known))}"
            )
        mapper = getattr(own.model, "hf_to_vllm_mapper", None)
        lora = manager._lora_model_cls.from_lora_tensors(
            lora_model_id=1,
            tensors=tensors,
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(own.model, "lora_skip_prefixes", None),
        )

        def install() -> None:
            self._adapters_before = self._adapters
            self._adapters = {**self._adapters, name: lora}

        return install

    def revert_adapter(self) -> None:
        self._adapters = self._adapters_before

    def drop_adapter(self) -> None:
        """Drops adapters. All weights were committed, so names stand for these weights alone."""
        for lora in self._adapters.values():
            for layer in lora.loras.values():
                layer.lora_b = torch.zeros_like(layer.lora_b)

    def abort(self, reason: str) -> None:
        if not self._is_open:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._is_open = False
        with self._model() as model:
            for layer in model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            try:
                finalize_layerwise_reload(model, self._worker.model_config)
            finally:
                self._recall_kernels()

    # Experts on the CPU are prepacked if a layer has no kernel, and silently not a second time. Without a kernel the
    # path of the first load is taken.

    def _forget_kernels(self, model: torch.nn.Module) -> None:
        methods: dict[int, Any] = {}
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            methods[id(method)] = method
        for method in methods.values():
            if getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _recall_kernels(self) -> None:
        """Restores the kernels of layers that were not loaded, which keep their values."""
        while self._kernels:
            method, kernel = self._kernels.pop()
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    @contextlib.contextmanager
    def _model(self) -> Iterator[Any]:
        from vllm.config import set_current_vllm_config

        _use_device(self._worker.device)
        with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            yield self._worker.get_model()


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Packs the heads that are tied to an embedding again.

    On a CPU, vLLM multiplies by a packed copy of the head's weights, and packs a layer when its own weights are loaded.
    A tied head has none, so it would silently keep its old copy.
    """
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if hasattr(getattr(layer, "quant_method", None), "tie_weights") and hasattr(layer, "weight")
    ]
    places = [layer.weight.data_ptr() for layer in layers]
    for index, layer in enumerate(layers):
        if places[index] in places[:index]:
            layer.quant_method.process_weights_after_loading(layer)


def _left_out(model: torch.nn.Module) -> list[str]:
    """Returns layers with parameters of which none came, and which are in no layer that got its own."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded: set[int] = set()
    waiting: list[tuple[str, set[int]]] = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # complete: vLLM has restored the tensors that it runs with
            loaded.update(id(param) for param in layer.parameters(recurse=False))
            continue
        held = {id(param) for param in info.kernel_tensors[0].values()}
        if info.loaded_weights:  # perhaps without an element: a worker's rows of the vocabulary may all be padding
            loaded |= held
        elif info.load_numel_total and info.restore_metadata[0] and not is_deferred_attention_layer(layer):
            waiting.append((name, held))
    return [name for name, held in waiting if not held or not held <= loaded]
