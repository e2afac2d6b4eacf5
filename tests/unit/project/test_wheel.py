"""A wheel names its torch and CUDA versions, finds libraries anywhere, and refuses another torch."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TORCH = "libtorch_python.so", "libtorch_cpu.so", "libc10.so"
RUNPATH = "$ORIGIN/../torch/lib"
METADATA = """\
Metadata-Version: 2.4
Name: fsdp2x
Version: 0.1.0
Requires-Dist: torch<2.16,>=2.11
Provides-Extra: train
Requires-Dist: tqdm; extra == "train"
"""


@pytest.fixture
def tag_wheel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "cmake"))
    spec = importlib.util.spec_from_file_location("tag_wheel", ROOT / "cmake" / "tag_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(folder: Path, *, links=(*TORCH,), runpath: str | None = RUNPATH, text: str = "") -> Path:
    """A shared library that needs libraries of these names."""
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("readelf") is None:
        pytest.skip("g++ or readelf is not installed")
    source = folder / "library.cpp"
    source.write_text("")
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "empty.so")]
    subprocess.run(command, check=True, timeout=60)
    for name in links:  # without a name of its own, a library is needed by the path that it was linked by
        shutil.copy(folder / "empty.so", folder / name)
    source.write_text(f'extern "C" const char* text() {{ return "{text}"; }}\n')
    found = folder / "_C.cpython-311-x86_64-linux-gnu.so"
    options = ["-Wl,--no-as-needed", f"-L{folder}", *(f"-l:{name}" for name in links)]
    options += [f"-Wl,--enable-new-dtags,-rpath,{runpath}"] if runpath else []
    subprocess.run([*command[:3], str(source), *options, "-o", str(found)], check=True, timeout=60)
    return found


def plain_wheel(folder: Path, extension: Path, *, cuda: str = "None") -> Path:
    """A wheel as the build makes it."""
    path = folder / "fsdp2x-0.1.0-cp311-cp311-linux_x86_64.whl"
    info = "fsdp2x-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(extension, f"fsdp2x/{extension.name}")
        archive.writestr("fsdp2x/__init__.py", "")
        archive.writestr("fsdp2x/_build_info.py", f'TORCH_VERSION = "2.15.0+cu132"\nCUDA = {cuda}\n')
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize(("cuda", "expected"), [("None", "torch2.15.cpu"), ('"13.0.88"', "torch2.15.cu130")])
def test_its_version_says_for_what_it_is(tmp_path, tag_wheel, cuda, expected):
    wheel = plain_wheel(tmp_path, library(tmp_path), cuda=cuda)
    tagged = tag_wheel.tag_wheel(wheel, tmp_path / "dist", [])
    version = f"0.1.0+{expected}"
    assert tagged.name == f"fsdp2x-{version}-cp311-cp311-linux_x86_64.whl"
    info = f"fsdp2x-{version}.dist-info"
    with zipfile.ZipFile(tagged) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    metadata = content[f"{info}/METADATA"].decode()
    assert f"\nVersion: {version}\n" in metadata
    assert re.findall(r"Requires-Dist: (.*)", metadata) == ["torch==2.15.*", 'tqdm; extra == "train"']
    lines = [line.rsplit(",", 2) for line in content.pop(f"{info}/RECORD").decode().splitlines()]
    assert lines.pop() == [f"{info}/RECORD", "", ""]
    assert {name: (digest, int(size)) for name, digest, size in lines} == {
        name: (f"sha256={base64.urlsafe_b64encode(hashlib.sha256(each).digest()).decode().rstrip('=')}", len(each))
        for name, each in content.items()
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"links": (*TORCH, "libcudart.so.13")}, r"links libcudart\.so\.13; only torch's and the system's"),
        ({"runpath": "/opt/build/torch/lib"}, r"looks for libraries in /opt/build/torch/lib, expected \$ORIGIN/"),
        ({"runpath": None}, "looks for libraries in no folder"),
        (
            {"text": "/opt/build/torch/include/c10/core/TensorImpl.h"},
            "path of the machine.*: /opt/build/.*Impl.h",
        ),
    ],
)
def test_a_library_of_one_machine_is_refused(tmp_path, tag_wheel, options, reason):
    wheel = plain_wheel(tmp_path, library(tmp_path, **options))
    with pytest.raises(tag_wheel.BadWheel, match=reason):
        tag_wheel.tag_wheel(wheel, tmp_path / "dist", ["/opt/build"])
    assert not (tmp_path / "dist").exists()


def test_what_is_built_here_would_pass(tag_wheel):
    """So that `make wheel` does not find out first."""
    from fsdp2x.base import native

    (extension,) = Path(native.build_info.__file__).parent.glob("_C.*.so")
    tag_wheel.check_library(extension, [str(ROOT), str(Path.home()), sys.prefix])


# ---- in an environment of its own


def requirements_of(name: str, found: dict | None = None, extras: bool = False) -> dict:
    """The distribution and all that it requires here, as far as that is installed; for any extras, or for none."""
    found = {} if found is None else found
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return found
    if distribution.name in found:
        return found
    found[distribution.name] = distribution
    for line in distribution.requires or []:
        if extras or "extra ==" not in line:
            inner, has_extras = re.match(r"([\w.-]+)(\[?)", line).groups()
            requirements_of(inner, found, bool(has_extras))
    return found


def environment_with_torch(folder: Path) -> Path:
    """The interpreter of an environment of torch, numpy and what they require, as links: torch is large."""
    venv.create(folder, with_pip=False)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for distribution in (requirements_of("torch") | requirements_of("numpy")).values():
        for name in {
            file.parts[0] for file in distribution.files if not file.parts[0].startswith(("..", "__pycache__"))
        }:
            if not (place / name).exists():
                (place / name).symlink_to(Path(distribution.locate_file(name)))
    return folder / "bin" / "python"


STEP = """
import torch, torch.distributed as dist, fsdp2x
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
fsdp2x.fully_shard(model)
optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()}: {loss.item():.4f}")
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_wheel_in_an_empty_environment(tmp_path):
    run_options = {"capture_output": True, "text": True, "timeout": 900, "cwd": tmp_path}
    made = subprocess.run(["make", "-C", str(ROOT), "wheel", f"DIST={tmp_path / 'dist'}"], **run_options)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    python = environment_with_torch(tmp_path / "env")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*words, env=environment):
        return subprocess.run([str(word) for word in words], **run_options, env=env)

    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps"]
    installed = run(*pip[:-1], wheel, env={**os.environ, "PIP_FIND_LINKS": ""})
    assert installed.returncode == 0, installed.stderr
    said = run(python.parent / "fsdp2x", "--version")
    assert re.fullmatch(r"fsdp2x \d+\.\d+\.\d+\+torch2\.\d+\.(cpu|cu\d+)\n", said.stdout), said
    assert said.stdout.split()[1] in wheel.name
    doctor = run(python.parent / "fsdp2x", "doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    (tmp_path / "step.py").write_text(STEP)
    steps = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "step.py")
    assert steps.returncode == 0, steps.stderr
    losses = re.findall(r"rank \d: ([\d.]+)", steps.stdout)
    assert len(losses) == 2 and losses[0] == losses[1]

    # With another torch, pip refuses the wheel. Without pip's check, the import raises one sentence.
    other = tmp_path / "other"
    venv.create(other, with_pip=False)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(other), "platbase": str(other)}))
    (place / "torch.py").write_text("__version__ = '2.11.0'\n")
    (place / "torch-2.11.0.dist-info").mkdir()
    (place / "torch-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    pip[4] = other / "bin" / "python"
    refused = run(*pip[:-1], wheel, env={**os.environ, "PIP_FIND_LINKS": ""})
    assert refused.returncode != 0 and "torch==2." in refused.stderr
    assert run(*pip, wheel, env=dict(os.environ)).returncode == 0
    imported = run(other / "bin" / "python", "-c", "import fsdp2x")
    assert imported.returncode == 1
    last = imported.stderr.strip().splitlines()[-1]
    assert re.match(
        r"ImportError: fsdp2x was built for torch 2\.\d+\S*, but torch 2\.11\.0 is installed\. Rebuild", last
    )


def test_only_a_checkout_has_the_test_extension():
    recipes = {
        target: subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        for target in ("build", "wheel")
    }
    assert "FSDP2X_TESTING=ON" in recipes["build"].stdout
    assert "FSDP2X_TESTING" not in recipes["wheel"].stdout
