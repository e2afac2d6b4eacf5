"""How ``Vllm`` steers an engine: a server by HTTP, an ``LLM`` of this process by its methods."""

from __future__ import annotations

import urllib.parse
from typing import Any

from fsdp2x.sync.targets.routes import ControlError, Routes

EXTENSION = "fsdp2x.sync.vllm_worker.Fsdp2xWorker"


class EngineControl:
    """One engine. ``timeout_s`` is how long it may take to answer; every method raises ``ControlError``."""

    name = ""
    host: str | None = None  # by which it is spoken to; None in this process
    timeout_s = 300.0

    def require_ready(self) -> None:
        """The engine can be spoken to, and its workers have the extension."""
        raise NotImplementedError

    def call(self, method: str, *args: Any, patient: bool = False) -> list[dict[str, Any]]:
        """What each worker's ``method`` returns; ``patient``: however long it takes."""
        raise NotImplementedError

    def is_sleeping(self) -> bool:
        """Whether it is paused or asleep: vLLM does not tell one from the other."""
        raise NotImplementedError

    def sleep(self, level: int) -> None:
        """Frees memory: 1 keeps the weights in host memory, 2 drops them."""
        raise NotImplementedError

    def wake(self, tags: list[str]) -> None:
        """Brings "weights" or "kv_cache" back."""
        raise NotImplementedError

    def pause(self, mode: str) -> None:
        """Nothing is generated from here on."""

    def resume(self) -> None:
        """Generates again."""

    def reset_caches(self) -> None:
        """Forgets what was computed with the old weights; requests that were kept are computed again."""
        raise NotImplementedError

    def publish(self, version: str) -> None:
        """The label that outputs carry from here on."""
        raise NotImplementedError


class ServerControl(EngineControl):
    """A vLLM server that runs with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, url: str) -> None:
        self._routes = Routes(url, "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1")
        self.name = self._routes.name
        self.host = urllib.parse.urlsplit(url).hostname

    def _ask(self, *args: Any, **options: Any) -> dict[str, Any]:
        self._routes.timeout_s = self.timeout_s
        return self._routes.ask(*args, **options)

    def require_ready(self) -> None:
        config = self._ask("GET", "/server_info", {"config_format": "json"})["vllm_config"]
        _require_extension(self.name, config["parallel_config"]["worker_extension_cls"])

    def call(self, method: str, *args: Any, patient: bool = False) -> list[dict[str, Any]]:
        body = {"method": method, "args": list(args)}
        results = self._ask("POST", "/collective_rpc", body=body, patient=patient)["results"]
        num_workers = self._ask("GET", "/get_world_size")["world_size"]
        if num_workers != len(results):
            raise ControlError(
                f"{self.name} has {num_workers} workers, of which {len(results)} answer: a data-parallel server passes "
                "calls on to one of its replicas; start a server for each, and give Vllm all their addresses"
            )
        return results

    def is_sleeping(self) -> bool:
        return self._ask("GET", "/is_sleeping")["is_sleeping"]

    def sleep(self, level: int) -> None:
        self._ask("POST", "/sleep", {"level": level})

    def wake(self, tags: list[str]) -> None:
        self._ask("POST", "/wake_up", {"tags": tags})

    def pause(self, mode: str) -> None:
        self._ask("POST", "/pause", {"mode": mode})

    def resume(self) -> None:
        self._ask("POST", "/resume")

    def reset_caches(self) -> None:
        # While requests hold blocks the cache is kept, which older servers do not even say: they are preempted first.
        answer = self._ask("POST", "/reset_prefix_cache", {"reset_running_requests": "true"})
        _require_reset(self.name, answer.get("success", True))
        self._ask("POST", "/reset_encoder_cache")

    def publish(self, version: str) -> None:
        self._ask("POST", "/update_weight_version", body={"new_version": version})


class LocalControl(EngineControl):
    """A ``vllm.LLM``, which does nothing between two calls of ``generate`` and so needs no pause."""

    name = "the LLM of this process"

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def require_ready(self) -> None:
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        _require_extension(self.name, parallel.worker_extension_cls)

    def call(self, method: str, *args: Any, patient: bool = False) -> list[dict[str, Any]]:
        return self._told(self._llm.collective_rpc, method, None if patient else self.timeout_s, args)

    def is_sleeping(self) -> bool:
        return self._told(self._llm.llm_engine.is_sleeping)

    def sleep(self, level: int) -> None:
        self._told(self._llm.sleep, level)

    def wake(self, tags: list[str]) -> None:
        self._told(self._llm.wake_up, tags)

    def reset_caches(self) -> None:
        _require_reset(self.name, self._told(self._llm.reset_prefix_cache))
        self._told(self._llm.llm_engine.reset_encoder_cache)

    def publish(self, version: str) -> None:
        self._told(self._llm.update_weight_version, version)

    def _told(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            raise ControlError(f"{self.name}: {type(error).__name__}: {error}") from error


def _require_extension(name: str, extension: str | None) -> None:
    # Asking a worker for a method that it has not would leave the other workers' answers in vLLM's queues.
    if not extension:
        raise ControlError(
            f"{name} has no worker extension: start it with --worker-extension-cls {EXTENSION} (LLM(..., "
            f'worker_extension_cls="{EXTENSION}")), or with the copy that lies on its PYTHONPATH'
        )


def _require_reset(name: str, success: bool) -> None:
    if not success:
        raise ControlError(f"{name} did not reset its prefix cache: it would go on with what old weights computed")
