"""How the build finds torch, and what a build for another torch says at import."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from harness import programs

ROOT = Path(__file__).resolve().parents[3]
FIND_TORCH = ROOT / "cmake" / "find_torch.py"
CUDA_DIR = ROOT / "csrc" / "kernels" / "cuda"
FILES = ("include/ATen/ATen.h", "include/pybind11/pybind11.h", "lib/libtorch_python.so")
NEW_ABI = b"\0_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\0"
OLD_ABI = b"\0_ZN3c105ErrorC1ENS_14SourceLocationESs\0"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"build_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


find_torch = load(FIND_TORCH)


def fake_torch(path: Path, version: str, libc10: bytes = NEW_ABI) -> Path:
    for name in (*FILES, "lib/libc10.so"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(libc10)
    # As in torch's own file; importing it instead of reading it would raise.
    (path / "version.py").write_text(
        "from typing import Optional\n\n"
        "__all__ = ['__version__', 'debug']\n"
        f"__version__ = '{version}'\n"
        "raise AssertionError('version.py was executed')\n"
    )
    return path


@pytest.mark.parametrize("version", ["1.13.1", "2.10.2", "2.16.0", "3.0.0"])
def test_unsupported_version_names_both(tmp_path, version):
    path = fake_torch(tmp_path / "torch", version)
    with pytest.raises(find_torch.TorchNotUsable) as error:
        find_torch.find_torch(str(path))
    assert "supports torch 2.11 to 2.15" in str(error.value)
    assert f"found torch {version} in {path}" in str(error.value)


def test_explicit_directory_wins_and_must_hold_a_torch(tmp_path):
    other = fake_torch(tmp_path / "other", "2.12.0")
    explicit = fake_torch(tmp_path / "explicit", "2.14.0")
    assert find_torch.find_torch(str(explicit), [other]).version == "2.14.0"
    with pytest.raises(find_torch.TorchNotUsable, match="FSDP2X_TORCH_DIR is .*nowhere"):
        find_torch.find_torch(str(tmp_path / "nowhere"), [other])


def test_no_torch_says_what_to_do():
    with pytest.raises(find_torch.TorchNotUsable) as error:
        find_torch.find_torch(None, [])
    sentence = str(error.value)
    assert "\n" not in sentence
    for remedy in ("--no-build-isolation", "FSDP2X_TORCH_DIR", "extra-build-dependencies", "match-runtime = true"):
        assert remedy in sentence


def test_torch_without_headers(tmp_path):
    path = fake_torch(tmp_path / "torch", "2.15.0")
    (path / "include/pybind11/pybind11.h").unlink()
    with pytest.raises(find_torch.TorchNotUsable, match=r"has no include/pybind11/pybind11\.h"):
        find_torch.find_torch(str(path))


@pytest.mark.parametrize(("symbols", "abi"), [(NEW_ABI, 1), (OLD_ABI, 0)])
def test_cxx11_abi(tmp_path, symbols, abi):
    assert find_torch.find_torch(str(fake_torch(tmp_path / "torch", "2.15.0", symbols))).cxx11_abi == abi


def test_command_line_agrees_with_the_installed_torch():
    import torch

    # Without its site-packages on sys.path an interpreter is where pip's build isolation puts it.
    hide = "import runpy, sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; sys.argv = sys.argv[1:]; "
    isolated = ["-c", hide + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    for flags in ([], isolated):
        output = subprocess.run(
            [sys.executable, *flags, str(FIND_TORCH)], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        values = dict(line.split("=", 1) for line in output.splitlines())
        assert values["version"] == torch.__version__
        assert Path(values["dir"]) == Path(torch.__file__).resolve().parent
        assert values["cxx11_abi"] == str(int(torch.compiled_with_cxx11_abi()))


def test_import_with_the_torch_it_was_built_for():
    import torch

    from fsdp2x.base import native

    assert native.build_info.TORCH_VERSION == torch.__version__
    native.check_torch("2.15.0+cu132", "2.15.1+cpu")


@pytest.mark.parametrize("installed", ["2.14.1", "2.11.0+cu130", "3.15.0", "2.1"])
def test_import_with_another_torch_says_what_to_do(installed):
    from fsdp2x.base.native import check_torch

    with pytest.raises(ImportError) as error:
        check_torch("2.15.0+cu132", installed)
    sentence = str(error.value)
    assert f"built for torch 2.15.0+cu132, but torch {installed} is installed" in sentence
    assert "--no-build-isolation" in sentence
    assert sentence.endswith("or install torch 2.15.")


def test_the_check_comes_before_the_extension(tmp_path):
    # A copy of the module that imports torch, with a build record for another torch and an unloadable extension.
    package = tmp_path / "fsdp2x"
    (package / "base").mkdir(parents=True)
    (package / "__init__.py").write_text("from fsdp2x.base import native\n")
    (package / "base" / "__init__.py").write_text("")
    for name in ("built.py", "native.py"):
        (package / "base" / name).write_text((ROOT / "python/fsdp2x/base" / name).read_text())
    (package / "_C.py").write_text("raise ImportError('undefined symbol')\n")
    (package / "_build_info.py").write_text("TORCH_VERSION = '2.1.0'\n")
    # A stand-in for torch makes this a test of the order of imports alone.
    (tmp_path / "torch.py").write_text("__version__ = '2.15.0'\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fsdp2x"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("ImportError: fsdp2x was built for torch 2.1.0, but torch")
    (package / "_build_info.py").unlink()
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert "fsdp2x has not been built" in result.stderr


# --- nvcc from packages ----------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "cmake"))
    return load(ROOT / "cmake" / "cuda_wheels.py")


def torch_for_cuda(tmp_path: Path, line: str):
    path = fake_torch(tmp_path / "torch", "2.15.0")
    (path / "version.py").write_text(f"from typing import Optional\n__version__ = '2.15.0'\n{line}\n")
    return find_torch.find_torch(str(path))


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '13.0'", 'cuda = "13.0"'])
def test_the_compiler_has_the_version_of_torch(tmp_path, cuda_wheels, line):
    torch = torch_for_cuda(tmp_path, line)
    assert torch.cuda == "13.0"
    wanted = cuda_wheels.requirements(torch)
    for name in ("nvcc", "crt", "runtime"):
        assert f"nvidia-cuda-{name}==13.0.*" in wanted
    assert "nvidia-nvvm==13.0.*" in wanted
    assert [name for name in wanted if name.startswith("nvidia-cuda-cccl")] == ["nvidia-cuda-cccl>=13.0,<14"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("cuda: Optional[str] = None", "built without CUDA.*CUDA=OFF"),
        ("cuda = '12.8'", "built for CUDA 12.8; there is an nvcc on PyPI from CUDA 13.0 on.*CUDA=ON"),
        ("cuda = 'next'", "CUDA 'next', which cannot be read"),
    ],
)
def test_no_compiler_fits(tmp_path, cuda_wheels, line, reason):
    torch = torch_for_cuda(tmp_path, line)
    with pytest.raises(cuda_wheels.NoWheels, match=reason):
        cuda_wheels.requirements(torch)
    with pytest.raises(cuda_wheels.NoWheels, match=reason):
        cuda_wheels.find_nvcc(torch, [str(tmp_path)])


def test_the_compiler_is_found_or_its_packages_are_named(tmp_path, cuda_wheels):
    torch = torch_for_cuda(tmp_path, "cuda = '13.2'")
    with pytest.raises(cuda_wheels.NoWheels, match=r"pip install nvidia-cuda-nvcc==13\.2"):
        cuda_wheels.find_nvcc(torch, [str(tmp_path)])
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    assert cuda_wheels.find_nvcc(torch, [str(tmp_path / "empty"), str(tmp_path)]) == nvcc


@pytest.mark.parametrize("line", ["cuda = '13.0'", "cuda = '12.8'", "cuda = None"])
def test_pip_fetches_the_compiler_that_fits_torch(tmp_path, monkeypatch, cuda_wheels, line):
    """Only where kernels are wanted and no nvcc is installed; the build then uses the one that was fetched."""
    has_wheels = "13.0" in line
    torch = torch_for_cuda(tmp_path, line)
    monkeypatch.setitem(sys.modules, "cuda_wheels", cuda_wheels)
    backend = load(ROOT / "cmake" / "build_backend.py")
    monkeypatch.setenv("FSDP2X_TORCH_DIR", str(torch.path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDACXX", raising=False)
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: str(path).startswith(str(tmp_path)) and is_file(path))
    for name in ("wheel", "editable"):
        hook = getattr(backend, f"get_requires_for_build_{name}")
        assert set(cuda_wheels.requirements(torch) if has_wheels else []) <= set(hook({}))
        assert any("nvcc" in one for one in hook({})) == has_wheels
        assert not any("nvcc" in one for one in hook({"cmake.define.FSDP2X_CUDA": "OFF"}))
    fetched = tmp_path / "overlay" / "nvidia" / "cu13" / "bin" / "nvcc"
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    monkeypatch.syspath_prepend(str(tmp_path / "overlay"))
    used = []
    for name in ("wheel", "editable"):
        monkeypatch.delenv("CUDACXX", raising=False)
        build = lambda *args: used.append(os.environ.get("CUDACXX"))  # noqa: E731
        monkeypatch.setattr(backend._backend, f"build_{name}", build)
        getattr(backend, f"build_{name}")(tmp_path)
    assert used == [str(fetched) if has_wheels else None] * 2
    monkeypatch.setenv("CUDACXX", "/of/the/user/nvcc")
    assert not any("nvcc" in one for one in backend.get_requires_for_build_wheel({}))


def test_a_build_without_kernels_says_so_at_the_first_gpu(monkeypatch):
    import torch

    from fsdp2x.sharding import transport

    for built_with in (True, False):
        monkeypatch.setattr(
            transport, "_C", types.SimpleNamespace(has_device_kernels=lambda b=built_with: b, TorchLayer=print)
        )
        transport._warn_without_kernels.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert transport.layer_maker(torch.device("cuda", 0)) is not None
        assert len(caught) == (not built_with)
    assert "built without nvcc" in str(caught[0].message) and "CUDA=wheels" in str(caught[0].message)
    transport._warn_without_kernels.cache_clear()


# --- architectures ----------------------------------------------------------------------------------------------------


def fake_nvcc(tmp_path: Path, version: str, known: tuple[int, ...]) -> Path:
    """An nvcc that tells its version and what it compiles for."""
    known = "\n".join(f"compute_{number}" for number in known)
    path = tmp_path / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --version) echo "Cuda compilation tools, release {version}, V{version}.1";;\n'
        f'--list-gpu-arch) echo "{known}";; *) exit 1;; esac\n'
    )
    path.chmod(0o755)
    return path


def architectures_of(nvcc: Path) -> tuple[list[str], str]:
    """Returns the default GPU architectures for an nvcc, and the reason if the build skips the kernels."""
    program = nvcc.parent / "choose.cmake"
    program.write_text(
        f'include("{ROOT}/cmake/cuda_architectures.cmake")\n'
        f'fsdp2x_choose_cuda_architectures("{nvcc}" chosen why_not)\n'
        'execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${chosen}|${why_not}")\n'
    )
    cmake = Path(sys.executable).parent / "cmake"
    cmake = str(cmake) if cmake.exists() else shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    output = subprocess.run([cmake, "-P", str(program)], capture_output=True, text=True, timeout=60, check=True).stdout
    chosen, why_not = output.strip().split("|")
    return [one for one in chosen.split(";") if one], why_not


@pytest.mark.parametrize(
    ("version", "known", "expected"),
    [
        ("12.0", (50, 70, 75, 80, 86, 87, 89, 90), ["80-real", "90"]),
        ("12.6", (50, 70, 75, 80, 86, 87, 89, 90), ["80-real", "90"]),
        ("12.8", (50, 70, 75, 80, 86, 87, 89, 90, 100, 101, 120), ["80-real", "90-real", "100"]),
        ("13.2", (75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121), ["80-real", "90-real", "100"]),
        ("15.0", (100, 103, 120), ["100"]),
    ],
)
def test_kernels_are_compiled_for_what_nvcc_knows(tmp_path, version, known, expected):
    assert architectures_of(fake_nvcc(tmp_path, version, known)) == (expected, "")


@pytest.mark.parametrize(
    ("version", "known", "reason"),
    [
        ("11.8", (50, 80, 90), "is of CUDA 11.8; C\\+\\+20 needs 12.0 or later"),
        ("16.1", (120, 130), "of CUDA 16.1 knows none of sm_80, sm_90 and sm_100"),
    ],
)
def test_an_nvcc_that_cannot_compile_the_kernels_is_told(tmp_path, version, known, reason):
    chosen, why_not = architectures_of(fake_nvcc(tmp_path, version, known))
    assert chosen == []
    assert re.search(reason, why_not)


# --- what nvcc makes of the kernels ----------------------------------------------------------------------------------


def nvcc(*arguments: str, timeout: float = 250) -> subprocess.CompletedProcess:
    found = shutil.which(os.environ.get("CUDACXX", "nvcc")) or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("nvcc is not installed")
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=timeout)


def kernel_options(werror: bool) -> list[str]:
    """The options of csrc/kernels/cuda/CMakeLists.txt."""
    text = (CUDA_DIR / "CMakeLists.txt").read_text()
    options = re.search(r"set\(cuda_options (.*?)\)", text, re.DOTALL)[1].split()
    return options + (re.search(r"list\(APPEND cuda_options (.*?)\)", text)[1].split() if werror else [])


PROBE = """
import warnings, torch
from fsdp2x.base.native import _C
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    can = [_C.can_run_kernels(torch.device("cuda", index)) for index in (0, 0, 1)]
print(_C.has_device_kernels(), *can)
for warning in caught:
    print(warning.message)
"""


def test_kernels_that_the_driver_cannot_run_are_not_used():
    """One warning for each device. Without a driver they could not be launched either."""
    import torch

    output = programs.run("-c", PROBE)
    assert output.returncode == 0, output.stderr
    said, *warnings = output.stdout.splitlines()
    if said.startswith("False"):
        assert (said, warnings) == ("False False False False", [])
        pytest.skip("fsdp2x was built without CUDA kernels")
    if torch.cuda.is_available():
        assert said.startswith("True True True") and not any("cuda:0" in warning for warning in warnings)
        return
    assert said == "True False False False"
    assert [re.match(r"fsdp2x: its kernels cannot run on (cuda:\d): .*driver", w)[1] for w in warnings] == [
        "cuda:0",
        "cuda:1",
    ]


def test_the_extension_links_no_driver_and_no_nccl():
    from fsdp2x.base import native

    extension = Path(native.build_info.__file__).parent.glob("_C.*.so")
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    output = subprocess.run([readelf, "-d", str(next(extension))], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*?)\]", output)
    assert any(name.startswith("libc10.so") for name in needed)
    assert not [name for name in needed if re.match(r"lib(cuda|cudart|nccl|torch_cuda)\b", name)]


SPILLS = """
__global__ void spills(double* values, int num) {
  double kept[160];
  for (int i = 0; i < 160; ++i) kept[i] = values[i];
  for (int round = 0; round < num; ++round)
    for (int i = 0; i < 160; ++i) kept[i] = kept[i] * kept[(i + 7) % 160] + kept[(i + round) % 160];
  for (int i = 0; i < 160; ++i) values[i] = kept[i];
}
"""


def test_a_kernel_that_spills_does_not_compile(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(SPILLS)
    common = ["-arch=sm_90", "-cubin", str(source), "-o", str(tmp_path / "spills.cubin")]
    result = nvcc(*kernel_options(werror=True), *common)
    assert result.returncode != 0
    assert (
        "local memory" in (result.stdout + result.stderr).lower() or "spill" in (result.stdout + result.stderr).lower()
    )
    assert nvcc(*kernel_options(werror=False), *common).returncode == 0


# --- what was compiled for another machine ---------------------------------------------------------------------------


@pytest.fixture
def prebuilt():
    return load(ROOT / "cmake" / "prebuilt.py")


def test_a_prebuilt_folder_is_used_where_it_fits(tmp_path, prebuilt, monkeypatch, capsys):
    """Programs are copied, and the wheel is installed with the checkout's Python files, or a sentence says why not."""
    here = {"python": "cpython-312", "torch": "2.11", "cuda": "13", "architecture": "90", "sources": "1"}
    monkeypatch.setattr(prebuilt, "machine", lambda: here)
    folder, compiled, programs_here = tmp_path / "prebuilt", tmp_path / "compiled", tmp_path / "build"
    folder.mkdir()
    compiled.mkdir()
    (compiled / "bench").write_text("program")
    (compiled / "bench").chmod(0o755)
    (compiled / "Makefile").write_text("not a program")
    commands = []
    monkeypatch.setattr(prebuilt.subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(prebuilt.sysconfig, "get_path", lambda name: str(tmp_path / "site"))

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["prebuilt.py", *map(str, arguments)])
        return prebuilt.main()

    assert run("programs", folder, programs_here) == 1  # there is none
    assert run("write", folder, compiled, "--architectures", "80-real;90-real") == 0
    (folder / "fsdp2x-0.1.0-cp312.whl").write_text("")
    assert run("programs", folder, programs_here) == run("install", folder) == 0
    assert [path.name for path in programs_here.iterdir()] == ["bench"]
    assert commands[0][-1] == str(folder / "fsdp2x-0.1.0-cp312.whl") and "--no-index" in commands[0]
    installed = tmp_path / "site" / "fsdp2x" / "base" / "native.py"
    assert installed.read_text() == (ROOT / "python" / "fsdp2x" / "base" / "native.py").read_text()
    capsys.readouterr()
    wrong = {"python": "cpython-311", "torch": "2.15", "cuda": "12", "architecture": "100", "sources": "2"}
    for name, value in wrong.items():
        monkeypatch.setattr(prebuilt, "machine", lambda name=name, value=value: {**here, name: value})
        assert run("install", folder) == 1 and name in capsys.readouterr().out
    assert len(commands) == 1


def test_sources_of_a_prebuilt_folder_are_what_is_compiled(tmp_path, prebuilt):
    for name, is_compiled in (("csrc/slots.cpp", True), ("benchmarks/gpu/a.cu", True), ("python/fsdp2x/a.py", False)):
        before = prebuilt.sources(tmp_path)
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
        assert (prebuilt.sources(tmp_path) != before) == is_compiled, name
