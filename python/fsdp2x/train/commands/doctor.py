"""`fsdp2x doctor`: reports what training would use on this machine, and whether it can run.

`python -m torch.utils.collect_env` reports the machine itself: its compilers, drivers, and devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fsdp2x.train.commands.shared import show

GIB = 2**30
PACKAGES = ("transformers", "tokenizers", "safetensors", "pydantic", "accelerate", "peft", "matplotlib", "tensorboard")
VARIABLES = (
    "FSDP2X_TRANSPORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_DIST_USE_NCCL2", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG",
)  # fmt: skip
# A rank opens a shared-memory file and a socket for each rank of its host, in addition to data and libraries.
LEAST_FILES = 1024
# Size of the sparse file that ranks share (csrc/shm/shm_group.cpp). Only written pages take memory.
LEAST_FILE_BYTES = 2**36
LEAST_SHM_BYTES = GIB
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Verdict = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. A note costs speed or a feature. A wrong finding prevents training."""

    topic: str
    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor",
        help="report what this machine would use, and whether it can run",
        description=(
            "Report versions, the build, limits, and what training would use, with the reason. Starts nothing; "
            "`fsdp2x selftest` trains. torch.utils.collect_env reports compilers, drivers, and devices. Exit "
            "status 1: nothing can run."
        ),
    )
    command.add_argument("--json", action="store_true", help="Print everything as one JSON object.")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    found = findings()
    runs = all(finding.verdict != "wrong" for finding in found)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in found]
        show(json.dumps({"can_run": runs, "findings": rows}, indent=1))
    else:
        show(_table(found, runs))
    return 0 if runs else 1


def _table(found: list[Finding], runs: bool) -> str:
    """Formats topics as headings and values in one column, with marks and advice for problems."""
    marks = {"ok": " ", "note": "!", "wrong": "x"}
    width = max(len(finding.name) for finding in found)
    lines, topic = [], ""
    for finding in found:
        if finding.topic != topic:
            topic = finding.topic
            lines += [*([""] if lines else []), topic]
        advice = f"  ({finding.advice})" if finding.advice else ""
        lines.append(f"{marks[finding.verdict]} {finding.name.ljust(width)}  {finding.value}{advice}")
    wrong = ", ".join(finding.name for finding in found if finding.verdict == "wrong")
    lines += ["", "can run: yes; `fsdp2x selftest` shows it" if runs else f"can run: no, because of {wrong}"]
    return "\n".join(lines)


def findings() -> list[Finding]:
    """Returns all findings, topic by topic. Starts no process group and makes no device context."""
    return [*_versions(), *_build(), *_limits(), *_variables(), *_choices()]


def _versions() -> Iterator[Finding]:
    import torch

    yield Finding("versions", "fsdp2x", importlib.metadata.version("fsdp2x"))
    yield Finding("versions", "Python", platform.python_version())
    yield Finding("versions", "torch", torch.__version__)
    for package in PACKAGES:
        try:
            yield Finding("versions", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", package, "not installed", "note", "pip install '.[train]' for the command train")


def _build() -> Iterator[Finding]:
    from fsdp2x.api import build_info

    yield Finding("build", "built for torch", build_info.TORCH_VERSION)  # the import rejects any other
    if build_info.CUDA is None:
        advice = "build again where nvcc is, or with `make build CUDA=wheels`" if _has_gpu() else ""
        text = "none: torch operations replace them on a GPU"
        yield Finding("build", "CUDA kernels", text, "note" if advice else "ok", advice)
    else:
        yield Finding("build", "CUDA kernels", f"compiled by CUDA {build_info.CUDA}")


def _limits() -> Iterator[Finding]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    short = locked != resource.RLIM_INFINITY and _has_gpu()
    advice = "`ulimit -l unlimited`: networks of GPUs and pinned memory lock pages" if short else ""
    text = _limit_text(locked, f"{locked / 2**20:.1f} MiB")
    yield Finding("limits", "memlock", text, "note" if short else "ok", advice)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    short = files != resource.RLIM_INFINITY and files < LEAST_FILES
    advice = f"`ulimit -n {LEAST_FILES}`, or ranks may be unable to share memory" if short else ""
    yield Finding("limits", "nofile", _limit_text(files, str(files)), "note" if short else "ok", advice)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    yield Finding("limits", "file size", _limit_text(size, f"{size / 2**20:.1f} MiB"))
    yield from _shm_folder()


def _shm_folder() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield Finding(
            "limits", "/dev/shm", f"{error}", "note", "NCCL and workers of data loaders use it; fsdp2x does not"
        )
        return
    short = free < LEAST_SHM_BYTES
    advice = "NCCL and workers of data loaders use it (a container's --shm-size); fsdp2x does not" if short else ""
    yield Finding("limits", "/dev/shm", f"{free / GIB:.1f} GiB free", "note" if short else "ok", advice)


def _variables() -> Iterator[Finding]:
    for name in VARIABLES:
        if name in os.environ:
            yield Finding("environment", name, os.environ[name])
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        advice = "nothing overlaps with one hardware queue: unset it"
        yield Finding("environment", "one queue", "CUDA_DEVICE_MAX_CONNECTIONS is 1", "note", advice)


def _choices() -> Iterator[Finding]:
    """Yields what `fully_shard(model)` would use here, and why."""
    import torch.distributed as dist

    from fsdp2x.api import TransportKind, check_transport

    topic = "would be used"
    has_gpu = _has_gpu()
    yield Finding(topic, "device", "cuda: this torch sees a GPU" if has_gpu else "cpu: this torch sees no GPU")
    yield Finding(topic, "ranks", "one per GPU" if has_gpu else "as many as torchrun starts")
    try:
        name = check_transport("auto")
    except ValueError as error:
        yield Finding(topic, "transport", str(error), "wrong", "unset FSDP2X_TRANSPORT")
        return
    if has_gpu:
        yield _nccl(topic)
    elif name == TransportKind.PROCESS_GROUP:
        yield Finding(topic, "transport", "process group: FSDP2X_TRANSPORT says so")
    else:
        fault = shared_memory_fault()
        if not fault:
            yield Finding(topic, "transport", "shared memory, between ranks of this host and user; gloo across hosts")
        else:
            advice = 'a limit of the system; transport="process_group" chooses gloo without the warning'
            yield Finding(
                topic, "transport", f"process group: {fault}", "wrong" if name == TransportKind.SHM else "note", advice
            )
    if not dist.is_gloo_available():
        yield Finding(topic, "gloo", "missing in this torch", "wrong", "install a torch that has it")
    yield Finding(topic, "kernels", _kernels(has_gpu))


def _nccl(topic: str) -> Finding:
    import torch
    import torch.distributed as dist

    from fsdp2x.api import gathers_of_nccl

    if not dist.is_nccl_available():
        return Finding(topic, "transport", "none: this torch has no NCCL", "wrong", "install a torch built for CUDA")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    how = {"grouped": "many gathers in one launch", "in turn": "a launch for each gather, so small ones are packed"}
    faster = "registered memory may be faster: model.set_allocate_memory_from_process_group_for_comm(True)"
    advice = faster if torch.cuda.device_count() > 1 else ""
    return Finding(topic, "transport", f"process group: NCCL {version}; {how[gathers_of_nccl()]}", "ok", advice)


def _kernels(has_gpu: bool) -> str:
    import torch

    from fsdp2x.api import can_run_kernels, has_device_kernels

    if not has_gpu:
        return "the CPU's, one thread a rank by torchrun"
    if can_run_kernels(torch.device("cuda", 0)):
        return "ours"
    return "torch's operations: " + (
        "this driver or GPU cannot run fsdp2x's" if has_device_kernels() else "built without nvcc"
    )


def shared_memory_fault() -> str:
    """Returns why ranks of this host could not share memory, or an empty string if they can."""
    try:
        from fsdp2x.api import boot_id

        boot_id()
    except OSError as error:
        return f"the number of this boot cannot be read ({error})"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILE_BYTES:
        return f"files are limited to {limit} bytes, but a larger sparse one is needed: check `ulimit -f`"
    try:
        file = os.memfd_create("fsdp2x-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"no memfd ({error}): check `ulimit -n`"
    try:
        os.ftruncate(file, LEAST_FILE_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        return f"no sparse memfd ({error})"
    finally:
        os.close(file)
    return ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _limit_text(limit: int, text: str) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else text
