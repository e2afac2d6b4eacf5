"""How the build finds torch, and what a build for another torch says at import."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIND_TORCH = ROOT / "cmake" / "find_torch.py"
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


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.15.0+cu132", "2.15.0a0+git1234"])
def test_supported_versions(tmp_path, version):
    torch = find_torch.find_torch(str(fake_torch(tmp_path / "torch", version)))
    assert torch.version == version
    assert torch.release == (2, int(version[2:4]))
    assert torch.path == tmp_path / "torch"


def test_annotated_version(tmp_path):
    path = fake_torch(tmp_path / "torch", "2.12.0")
    (path / "version.py").write_text('__version__: str = "2.12.0"\n')
    assert find_torch.find_torch(str(path)).version == "2.12.0"


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
    with pytest.raises(find_torch.TorchNotUsable, match="FSDP2X_TORCH_DIR is .*nowhere.*not a torch package"):
        find_torch.find_torch(str(tmp_path / "nowhere"), [other])


def test_first_candidate_that_holds_a_torch(tmp_path):
    leftover = tmp_path / "leftover"
    leftover.mkdir()
    candidates = [
        tmp_path / "missing",
        leftover,
        fake_torch(tmp_path / "a", "2.12.0"),
        fake_torch(tmp_path / "b", "2.13.0"),
    ]
    assert find_torch.find_torch(None, candidates).version == "2.12.0"


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


@pytest.mark.parametrize("with_base", [False, True])
def test_environment_includes_the_base_only_where_it_is_visible(tmp_path, with_base):
    prefix, base = tmp_path / "venv", tmp_path / "base"
    prefix.mkdir()
    (prefix / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = {str(with_base).lower()}\n")
    directories = find_torch.environment_torch_dirs(str(prefix), str(base))
    assert any(directory.is_relative_to(prefix) for directory in directories)
    assert any(directory.is_relative_to(base) for directory in directories) == with_base
    assert {directory.name for directory in directories} == {"torch"}


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


def test_command_line_fails_with_the_sentence_alone(tmp_path):
    result = subprocess.run(
        [sys.executable, str(FIND_TORCH), "--dir", str(fake_torch(tmp_path / "torch", "2.9.1"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("fsdp2x supports torch 2.11 to 2.15; found torch 2.9.1 in ")
    assert result.stderr.count("\n") == 1


def test_import_with_the_torch_it_was_built_for():
    import torch

    from fsdp2x.runtime import native

    assert native.build_info.TORCH_VERSION == torch.__version__
    native.check_torch("2.15.0+cu132", "2.15.1+cpu")


@pytest.mark.parametrize("installed", ["2.14.1", "2.11.0+cu130", "3.15.0", "2.1"])
def test_import_with_another_torch_says_what_to_do(installed):
    from fsdp2x.runtime.native import check_torch

    with pytest.raises(ImportError) as error:
        check_torch("2.15.0+cu132", installed)
    sentence = str(error.value)
    assert f"built for torch 2.15.0+cu132, but torch {installed} is installed" in sentence
    assert "--no-build-isolation" in sentence
    assert sentence.endswith("or install torch 2.15.")


def test_the_check_comes_before_the_extension(tmp_path):
    # A copy of the package's torch-facing module beside a build record for another torch and an unloadable extension.
    package = tmp_path / "fsdp2x"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").write_text("from fsdp2x.runtime import native\n")
    (package / "runtime" / "__init__.py").write_text("")
    source = ROOT / "python" / "fsdp2x" / "runtime" / "native.py"
    (package / "runtime" / "native.py").write_text(source.read_text())
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
