"""Checks a wheel of fsdp2x and writes it again under a version that says for which torch and CUDA it was made.

`make wheel` runs it. A version such as `0.1.0+torch2.15.cu130` is of a build for torch 2.15 with kernels of CUDA 13.0,
`+torch2.15.cpu` of one without kernels. The wheel requires that minor version of torch, so pip refuses another one; one
that is changed afterwards is refused at import, by `fsdp2x.base.native`.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from find_torch import find_torch

# Whose interface may be linked: torch's, which lies beside fsdp2x, and those that every Linux has that runs torch.
TORCH_LIBRARIES = {"libtorch_python.so", "libtorch_cpu.so", "libc10.so"}
SYSTEM_LIBRARIES = re.compile(r"(lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)|ld-linux-[\w-]+)\.so\.\d+")
RUNPATH = "$ORIGIN/../torch/lib"


class BadWheel(Exception):
    """The wheel would not work elsewhere; the message says why."""


def build_facts(text: str) -> tuple[str, str | None]:
    """The torch and the CUDA version of a `_build_info.py`."""
    values: dict[str, str | None] = {}
    exec(text, values)
    return values["TORCH_VERSION"], values["CUDA"]


def minor_of(torch: str) -> str:
    return ".".join(torch.split(".")[:2])


def local_version(torch: str, cuda: str | None) -> str:
    """The local part of a version: for torch 2.15.0+cu132 and kernels of CUDA 13.0.88 it is `torch2.15.cu130`."""
    return f"torch{minor_of(torch)}." + ("cu" + "".join(cuda.split(".")[:2]) if cuda else "cpu")


def check_library(path: Path, built_in: list[str]) -> None:
    """Raises `BadWheel` for a shared library that looks for others where only the machine of its build has them.

    Args:
        built_in: folders of the build, whose names the file must not contain.
    """
    said = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", said))
    others = sorted(name for name in needed - TORCH_LIBRARIES if not SYSTEM_LIBRARIES.fullmatch(name))
    if others:
        raise BadWheel(
            f"{path.name} links {', '.join(others)}; only torch's and the system's libraries are everywhere."
        )
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*?)\]", said)
    if paths != [RUNPATH]:
        raise BadWheel(f"{path.name} looks for libraries in {':'.join(paths) or 'no folder'}, expected {RUNPATH}.")
    content = path.read_bytes()
    for folder in built_in:
        at = content.find(folder.encode() + b"/")
        if at >= 0:
            text = re.match(rb"[ -~]*", content[at:])[0].decode()
            raise BadWheel(f"{path.name} contains a path of the machine it was built on: {text}")


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def tag_wheel(wheel: Path, folder: Path, built_in: list[str]) -> Path:
    """Writes `wheel` with its local version into `folder`, and returns the new file. Raises `BadWheel`."""
    project, version, *tags = wheel.name.split("-")
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: (info, archive.read(info)) for info in archive.infolist() if not info.is_dir()}
    libraries = [name for name in files if name.endswith(".so")]
    if len(libraries) != 1:
        raise BadWheel(f"{wheel.name} holds {len(libraries)} shared libraries, expected fsdp2x/_C alone.")
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / Path(libraries[0]).name
        library.write_bytes(files[libraries[0]][1])
        check_library(library, built_in)
    torch, cuda = build_facts(files[f"{project}/_build_info.py"][1].decode())
    tagged = f"{version}+{local_version(torch, cuda)}"
    old_info, new_info = f"{project}-{version}.dist-info/", f"{project}-{tagged}.dist-info/"
    metadata = files[f"{old_info}METADATA"][1].decode()
    metadata, num_versions = re.subn(rf"(?m)^Version: {re.escape(version)}$", f"Version: {tagged}", metadata)
    metadata, num_torches = re.subn(
        r"(?m)^Requires-Dist: torch\b[^;\n]*$", f"Requires-Dist: torch=={minor_of(torch)}.*", metadata
    )
    if (num_versions, num_torches) != (1, 1):
        raise BadWheel(
            f"{wheel.name} has {num_versions} versions and requires torch {num_torches} times; expected 1 of each."
        )
    target = folder / "-".join([project, tagged, *tags])
    folder.mkdir(parents=True, exist_ok=True)
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (info, content) in files.items():
            if name == f"{old_info}RECORD":
                continue
            if name == f"{old_info}METADATA":
                content = metadata.encode()
            info.filename = name.replace(old_info, new_info, 1)
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
            record.append(record_line(info.filename, content))
        record.append(f"{new_info}RECORD,,")
        archive.writestr(f"{new_info}RECORD", "\n".join(record) + "\n")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="where the tagged wheel is written")
    arguments = parser.parse_args()
    built_in = [str(Path(__file__).resolve().parents[1]), str(Path.home()), sys.prefix, str(find_torch().path)]
    try:
        print(tag_wheel(arguments.wheel, arguments.folder, built_in))
    except BadWheel as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
