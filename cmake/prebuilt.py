"""Keeps what was compiled for another machine, and installs it there if its Python, torch, GPU, and sources are those.

`make gpu-prebuilt` writes the folder: a wheel with the test extension, programs for a device, and tags.json. On the
other machine `make build OFFLINE=ON` and `make gpu-kernels OFFLINE=ON` use it, or say why not and compile.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILED = ("CMakeLists.txt", "cmake/*.cmake", "cmake/*.in", "csrc/**/*", "tests/cpp/**/*", "tests/gpu/kernels/*.*u*",
            "benchmarks/gpu/*.c*")  # fmt: skip
SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh", ".txt", ".cmake", ".in"}


def sources(root: Path = ROOT) -> str:
    """Returns a hash of everything that is compiled. Python files are not: they come from the checkout."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in COMPILED for path in root.glob(pattern) if path.suffix in SUFFIXES}):
        digest.update(f"{path.relative_to(root)} {len(path.read_bytes())} ".encode() + path.read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, str]:
    """What a build here would be for. The architecture is empty without a GPU."""
    import torch

    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else ()
    return {
        "python": sysconfig.get_config_var("SOABI"),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "cuda": (torch.version.cuda or "").partition(".")[0],
        "architecture": "".join(map(str, gpu)),
        "sources": sources(),
    }


def misfits(tags: dict[str, str], here: dict[str, str]) -> list[str]:
    """Returns what differs, in words. A machine without a GPU runs any architecture's build."""
    found = []
    for name, value in tags.items():
        mine = here[name]
        if name == "architecture":
            fits = not mine or mine in value.split(";")
        else:
            fits = mine == value
        if not fits:
            found.append(f"the {name} differ" if name == "sources" else f"{name} {value}, here {mine or 'none'}")
    return found


def write(folder: Path, programs: Path, architectures: str) -> None:
    """Adds the programs and the tags to the folder, which has the wheel."""
    for path in programs.iterdir():
        if path.is_file() and (os.access(path, os.X_OK) or path.suffix == ".so"):
            shutil.copy2(path, folder / path.name)
    tags = {**machine(), "architecture": ";".join(part.partition("-")[0] for part in architectures.split(";"))}
    (folder / "tags.json").write_text(json.dumps(tags, indent=1) + "\n")


def install(folder: Path) -> None:
    """Installs the wheel with pip, and the checkout's Python files in the place of its own."""
    (wheel,) = folder.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--force-reinstall", str(wheel)]
    subprocess.run(command, check=True)
    package = Path(sysconfig.get_path("purelib")) / "fsdp2x"
    shutil.copytree(
        ROOT / "python" / "fsdp2x", package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "install", "programs"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", type=Path, nargs="?", help="folder of the compiled programs")
    parser.add_argument("--architectures", default="90", help="those of the build, such as 90 or 80;90")
    chosen = parser.parse_args()
    if chosen.what == "write":
        write(chosen.folder, chosen.programs, chosen.architectures)
        return 0
    tags = chosen.folder / "tags.json"
    if not tags.is_file():
        return 1
    wrong = misfits(json.loads(tags.read_text()), machine())
    if wrong:
        print(f"{chosen.folder} is not used: {'; '.join(wrong)}")
        return 1
    if chosen.what == "install":
        install(chosen.folder)
    else:
        chosen.programs.mkdir(parents=True, exist_ok=True)
        for path in chosen.folder.iterdir():
            if path.suffix not in (".whl", ".json"):
                shutil.copy2(path, chosen.programs / path.name)
    print(f"{chosen.folder}: used, nothing is compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
