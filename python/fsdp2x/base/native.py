"""Imports `fsdp2x._C`, after checking that the extension fits the installed torch. No other module imports it."""

import torch

from fsdp2x.base.built import build_info, check_torch

check_torch(build_info.TORCH_VERSION, torch.__version__)

import fsdp2x._C as _C  # noqa: E402  (the check above must come first)

__all__ = ["_C", "build_info", "check_torch"]
