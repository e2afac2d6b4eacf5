"""fsdp2x's worker extension for vLLM. Tests can remove its fix for experts on the CPU, or make it seem far away."""

from __future__ import annotations

import os

import vllm_worker
from vllm_worker import Fsdp2xWorker, LayerwiseReload

if "FSDP2X_TESTS_ELSEWHERE" in os.environ:
    vllm_worker.place_of_process = lambda: ["elsewhere", ""]  # so that trainers do not count on common memory

forget_kernels = LayerwiseReload._forget_kernels


class Curable(Fsdp2xWorker):
    def cure(self, is_on: bool) -> bool:
        LayerwiseReload._forget_kernels = forget_kernels if is_on else lambda self, model: None
        return is_on
