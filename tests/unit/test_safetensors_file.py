"""Files that lie about themselves: refused in one line before anything of their size is taken."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.loader import load_model
from shoal.backend.weights.safetensors_file import SafetensorsFile

NORM = "model.norm.weight"


def write(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(path.name)
    return str(caught.value)


def test_tensors_come_back_as_the_library_wrote_them(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(6, dtype=torch.int8).view(2, 3),
        "d": torch.tensor(5, dtype=torch.int64),
        "e": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "f.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "f.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.read(name)
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert read.float().tolist() == tensor.float().tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (entry(shape=[3]), "tensor a has 8 bytes, but its shape [3] in F32 takes 12"),
        (entry(shape=[2**40, 2**40]), "tensor a has 8 bytes, but its shape"),
        (entry(shape=[-2]), "tensor a has no proper shape"),
        (entry(shape=[True, 2]), "tensor a has no proper shape"),
        (entry(shape=[1] * 7 + [2, 1]), "tensor a has no proper shape"),
        (entry(shape="2"), "tensor a has no proper shape"),
        (entry(offsets=[8, 0]), "tensor a has no proper place"),
        (entry(offsets=[0]), "tensor a has no proper place"),
        (entry(offsets=[0, 2**60]), "tensor a has no proper place"),
        (entry(shape=[2**30], offsets=[0, 2**32]), "tensor a ends at byte"),
        (entry(offsets=[4, 12]), "tensor a overlaps another one or leaves a gap"),
        (entry("F16"), "tensor a has 8 bytes, but its shape [2] in F16 takes 4"),
        ("text", "tensor a has no proper shape"),
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, value: Any, expected: str) -> None:
    assert expected in refusal(write(tmp_path / "f.safetensors", {"a": value}, bytes(8)))


def test_bytes_of_no_tensor_and_shared_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    assert "4 bytes that belong to no tensor" in refusal(write(path, {"a": entry()}, bytes(12)))
    both = {"a": entry(), "b": entry()}
    assert "tensor b overlaps" in refusal(write(path, both, bytes(8)))


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_lying_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" * 20)
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_header_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    refusal(write(tmp_path / "f.safetensors", text))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 0.5, -1])
def test_file_cut_short_is_refused(tmp_path: Path, kept: float) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    assert "fetch it again" in refusal(path)


def test_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, 2000)
    with pytest.raises(ConfigError, match="tensor a is cut short"):
        file.read("a")


def test_a_tensor_is_converted_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.backend.weights.safetensors_file._SLICE", 7)
    path = tmp_path / "f.safetensors"
    values = torch.randn(9, 5)
    save_file({"a": values}, path)
    file = SafetensorsFile(path)
    assert torch.equal(file.read("a", torch.bfloat16), values.bfloat16())
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ConfigError, match="tensor a is cut short"):
        file.read("a", torch.bfloat16)


@pytest.mark.parametrize("indexed", [False, True])
def test_links_may_not_leave_the_folder(tmp_path: Path, indexed: bool) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    path = folder / "model.safetensors"
    if indexed:
        names = dict.fromkeys(load_file(path), path.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link that leaves its folder"):
        load_model(folder, torch.float32)


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "models--a--b" / "snapshots" / "123")
    (tmp_path / "models--a--b" / "blobs").mkdir()
    blob = tmp_path / "models--a--b" / "blobs" / "sha"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    load_model(folder, torch.float32)


MEMORY_SCRIPT = """
import re, sys
from pathlib import Path
import torch
from shoal.backend.machine import freeing_at_once
from shoal.backend.weights.loader import load_model

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
# Whatever libraries take is taken now.
load_model(Path(sys.argv[1]), torch.bfloat16, quantization=sys.argv[3])
before = peak()
with freeing_at_once():
    loaded = load_model(Path(sys.argv[2]), torch.bfloat16, quantization=sys.argv[3])
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("quantization", "ratio"), [("none", 1.0), ("int8", 0.5), ("int4", 0.28)])
def test_loading_takes_little_more_than_the_model(
    tmp_path: Path, quantization: str, ratio: float
) -> None:
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = write_tiny_checkpoint(tmp_path / "large", vocab_size=4096, **sizes)
    tensors = {
        name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 50 * 2**20
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tiny), str(folder), quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    # Quantised, the source is never there as a whole; how much of the heap lies idle between what
    # is kept and what is worked on differs from run to run.
    beside = size if ratio < 1.0 else max(tensor.nbytes for tensor in tensors.values())
    assert size * ratio * 0.9 < int(done.stdout) < size * ratio + beside
