"""verl told that it runs on CPUs: a platform, through its own registry, and its FSDP engines for that device."""

# ruff: noqa: E402
import contextlib
import os
import types

os.environ |= {"VERL_PLATFORM": "cpu"}
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_, **__):
    return None


class CPU(PlatformBase):
    device_name, vendor_name = "cpu", "cpu"
    device_module = types.SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=nothing,
        mem_get_info=lambda *_: (1, 1),
        get_device_name=lambda *_: "cpu",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    is_available = is_ipc_supported = lambda self: True
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    get_device_capability = lambda self, index=0: (None, None)  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    visible_devices_envvar = lambda self: "NO_DEVICES"  # noqa: E731
    nvtx_range = lambda self, message: contextlib.nullcontext()  # noqa: E731
    ray_resource_name = lambda self: "CPU"  # noqa: E731
    ray_noset_envvars = lambda self: []  # noqa: E731
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing
    manual_seed = manual_seed_all = lambda self, seed: torch.manual_seed(seed)


PlatformRegistry.register(platform="cpu")(CPU)

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

for kind, engine in {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}.items():
    EngineRegistry.register(model_type=kind, backend=["fsdp", "fsdp2"], device="cpu")(engine)
