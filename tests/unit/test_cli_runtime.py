import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.client.cli import runtime
from shoal.client.cli.fetch import python_version, runtime_dir
from shoal.client.cli.runtime import TritonPorts, locate_runtime


def make_embedded(cache: Path, version: str, stub: bytes = b"libpython3.11.so") -> Path:
    root = runtime_dir(cache) / "pytriton" / "tritonserver"
    for name, data in {
        "bin/tritonserver": b"",
        "backends/python/libtriton_python.so": b"",
        "backends/python/triton_python_backend_utils.py": b"import numpy as np\n",
        f"python_backend_stubs/{version}/triton_python_backend_stub": stub,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture(autouse=True)
def no_system_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "SYSTEM_ROOT", tmp_path / "none")
    monkeypatch.delenv(runtime.OVERRIDE, raising=False)


def test_nothing_is_found_before_the_fetch(tmp_path: Path) -> None:
    assert locate_runtime(tmp_path) is None


def test_embedded_runtime_takes_the_stub_of_this_python(tmp_path: Path) -> None:
    make_embedded(tmp_path, python_version())
    make_embedded(tmp_path, "3.8")
    found = locate_runtime(tmp_path)
    assert found is not None
    assert found.source == "embedded"
    assert found.stub.parent.name == python_version()


def test_missing_stub_names_the_pythons_there_are(tmp_path: Path) -> None:
    make_embedded(tmp_path, "3.8")
    with pytest.raises(ConfigError, match=r"it has: 3\.8"):
        locate_runtime(tmp_path)


def test_override_names_executable_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_embedded(tmp_path, "3.8")
    (root / "backends/python/triton_python_backend_stub").write_bytes(b"libpython3.8.so")
    for value in (root, root / "bin/tritonserver"):
        monkeypatch.setenv(runtime.OVERRIDE, str(value))
        found = locate_runtime(tmp_path / "empty")
        assert found is not None
        assert found.server == root / "bin/tritonserver"
    with pytest.raises(ConfigError, match=r"runs Python 3\.8"):
        runtime.check_python_fits(found)


def test_bad_override_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.OVERRIDE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="SHOAL_TRITONSERVER must name"):
        locate_runtime(tmp_path)


@pytest.mark.parametrize(
    ("stub", "old"), [(b"..numpy.core.multiarray..", True), (b"..numpy._core..", False)]
)
def test_only_an_old_stub_gets_its_own_numpy(tmp_path: Path, stub: bytes, old: bool) -> None:
    make_embedded(tmp_path, python_version(), stub)
    found = locate_runtime(tmp_path)
    assert found is not None
    target = runtime.build_backend_directory(found, tmp_path / "backends", tmp_path)
    model = (target / "shoal" / "model.py").read_text()
    assert ("import numpy" in model) is old
    assert model.endswith("from shoal.backend.model import TritonPythonModel\n")


def test_backend_directory_is_replaced_and_holds_copies(tmp_path: Path) -> None:
    make_embedded(tmp_path, python_version())
    found = locate_runtime(tmp_path)
    assert found is not None
    target = tmp_path / "backends"
    (target / "shoal").mkdir(parents=True)
    (target / "shoal" / "stale.py").touch()
    runtime.build_backend_directory(found, target, tmp_path)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == [
        "python/libtriton_python.so",
        "python/triton_python_backend_stub",
        "python/triton_python_backend_utils.py",
        "shoal/model.py",
    ]
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_own_model_takes_the_current_folder_off_the_module_path(tmp_path: Path) -> None:
    make_embedded(tmp_path, python_version(), b"numpy._core")
    found = locate_runtime(tmp_path)
    assert found is not None
    source = tmp_path / "my_model.py"
    source.write_text("print([path for path in sys.path if not path])\n")
    target = runtime.build_backend_directory(found, tmp_path / "backends", tmp_path, source)
    code = (target / "shoal/model.py").read_text()
    for text, printed in ((f"import sys\n{source.read_text()}", "['']"), (code, "[]")):
        done = subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            check=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
        )
        assert done.stdout.strip() == printed


def test_server_gets_libraries_and_the_venv_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_embedded(tmp_path, python_version())
    found = locate_runtime(tmp_path)
    assert found is not None
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    environment = runtime.server_environment(found, tmp_path)
    libraries = environment["LD_LIBRARY_PATH"].split(":")
    assert libraries[0] == str(runtime_dir(tmp_path) / "nvidia_pytriton.libs")
    assert libraries[-1] == "/mine"
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_command_line_names_ports_and_models(tmp_path: Path) -> None:
    make_embedded(tmp_path, python_version())
    found = locate_runtime(tmp_path)
    assert found is not None
    command = runtime.server_command(
        found,
        model_repository=tmp_path,
        backend_directory=tmp_path,
        ports=TritonPorts("0.0.0.0", 1, 2, 3),
        load_models=["a", "b"],
    )
    expected = {"--http-port=1", "--grpc-port=2", "--metrics-port=3", "--grpc-address=0.0.0.0"}
    assert expected | {"--load-model=a", "--load-model=b"} <= set(command)
    assert "--model-control-mode=explicit" in command


def test_packaged_repository_has_the_default_model() -> None:
    assert (runtime.packaged_model_repository() / "smollm2-135m-instruct/config.pbtxt").is_file()
