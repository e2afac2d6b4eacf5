"""Where nvcc comes from when no CUDA toolkit is installed: NVIDIA's packages, in the version of the installed torch.

`requirements` prints what to install, for `pip install -r`; `nvcc` prints the compiler's path afterwards.
"""

import argparse
import re
import site
import sys
from pathlib import Path

from find_torch import Torch, TorchNotUsable, find_torch

# The front end of nvcc, and what it calls and includes, come in one version: a newer nvvm writes what an older ptxas
# cannot read, and pip would take the newest of those that nvcc merely depends on.
SAME_VERSION = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
INSTEAD = "install the CUDA toolkit and build with CUDA=ON, or build without kernels with CUDA=OFF"


class NoWheels(Exception):
    """No packages fit this torch, or they are not installed; the message is for the user."""


def cuda_release(torch: Torch) -> tuple[int, int]:
    """Major and minor CUDA version of `torch`. Raises `NoWheels` when its compiler is not to be had as packages."""
    if torch.cuda is None:
        raise NoWheels(
            f"torch {torch.version} in {torch.path} is built without CUDA, so CUDA=wheels has no version to follow: "
            "install a torch with CUDA, or build with CUDA=OFF."
        )
    match = re.match(r"(\d+)\.(\d+)", torch.cuda)
    if match is None:
        raise NoWheels(
            f"torch {torch.version} says it is built for CUDA {torch.cuda!r}, which cannot be read: {INSTEAD}."
        )
    release = int(match[1]), int(match[2])
    if release[0] < 13:
        raise NoWheels(
            f"torch {torch.version} is built for CUDA {torch.cuda}; there is an nvcc on PyPI from CUDA 13.0 on: "
            f"{INSTEAD}."
        )
    return release


def requirements(torch: Torch) -> list[str]:
    """The packages that hold nvcc and what it needs, for torch's CUDA version."""
    major, minor = cuda_release(torch)
    # CCCL is headers alone, follows its own schedule, and torch may have installed one already.
    return [f"{name}=={major}.{minor}.*" for name in SAME_VERSION] + [f"nvidia-cuda-cccl>={major}.0,<{major + 1}"]


def find_nvcc(torch: Torch, site_packages: list[str] | None = None) -> Path:
    """The nvcc that the packages of `requirements` have put into this environment."""
    major, _ = cuda_release(torch)
    directories = site.getsitepackages() if site_packages is None else site_packages
    for directory in directories:
        nvcc = Path(directory) / "nvidia" / f"cu{major}" / "bin" / "nvcc"
        if nvcc.is_file():
            return nvcc
    raise NoWheels(
        f"no nvidia/cu{major}/bin/nvcc in {', '.join(directories)}: run `pip install {' '.join(requirements(torch))}`."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The compiler of CUDA from packages.")
    parser.add_argument("what", choices=("requirements", "nvcc"))
    parser.add_argument("--torch-dir", default="", help="directory of the torch package; empty: search for it")
    arguments = parser.parse_args()
    try:
        torch = find_torch(arguments.torch_dir)
        print("\n".join(requirements(torch)) if arguments.what == "requirements" else find_nvcc(torch))
    except (TorchNotUsable, NoWheels) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
