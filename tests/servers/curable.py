"""Our worker extension for vLLM, whose cure for experts on the CPU can be taken away."""

from __future__ import annotations

from vllm_worker import Fsdp2xWorker, LayerwiseReload

forget_kernels = LayerwiseReload._forget_kernels


class Curable(Fsdp2xWorker):
    def cure(self, is_on: bool) -> bool:
        LayerwiseReload._forget_kernels = forget_kernels if is_on else lambda self, model: None
        return is_on
