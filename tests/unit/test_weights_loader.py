"""Checkpoints that load, and those that are refused in one line."""

import contextlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import TINY_CONFIG, write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.registry import config_from_hf
from shoal.backend.weights.gguf import GgufCheckpoint
from shoal.backend.weights.loader import load_model, open_checkpoint

CPU = torch.device("cpu")
QuantType = gguf.GGMLQuantizationType


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def rewrite(folder: Path, drop: str | None = None, **extra: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    save_file(tensors | extra, folder / "model.safetensors")


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(path, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(path.parent) not in str(caught.value)
    return str(caught.value)


def llama_permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """How llama.cpp's converter reorders the rows of Q and K."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    folder: Path,
    kind: Any = QuantType.F32,
    raw_kind: Any = None,
    vector_kind: Any = QuantType.F32,
) -> None:
    """The folder's checkpoint as GGUF; matrices in ``kind``, vectors in ``vector_kind``, and
    gate_proj of random bytes in ``raw_kind``."""
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if "q_proj" in name:
            values = llama_permute(values, config.num_heads)
        elif "k_proj" in name:
            values = llama_permute(values, config.num_kv_heads)
        stored = kind if values.ndim == 2 else vector_kind
        raw_name = names.get_name(name, try_suffixes=(".weight",))
        if raw_kind is not None and "gate_proj" in name:
            writer.add_tensor(raw_name, random_blocks(raw_kind, *values.shape), raw_dtype=raw_kind)
            continue
        writer.add_tensor(raw_name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded_tensors(path: Path) -> dict[str, torch.Tensor]:
    source = open_checkpoint(path)
    names = Decoder.weight_shapes(source.config)
    return {name: source.load(name, torch.float32) for name in names}


def test_folder_loads(folder: Path) -> None:
    loaded = load_model(folder, torch.bfloat16, CPU)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.config == config_from_hf(TINY_CONFIG)


def test_progress_counts_bytes_up_to_the_total(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_model(folder, torch.float32, CPU, lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert {call[0] for call in calls} == {"weights"}
    assert {call[2] for call in calls} == {total}
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)


def test_generation_config_adds_eos_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_model(folder, torch.float32).config.eos_token_ids == (2, 5)


def test_sharded_folder_loads(folder: Path) -> None:
    whole = loaded_tensors(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        part = {name: tensors[name] for name in tensors if shards[name] == shard}
        save_file(part, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    parts = loaded_tensors(folder)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)
    for name in ("../model.safetensors", "a" * 256, "a\nb.safetensors", "\ud800"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "plain file names" in refusal(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, drop="model.layers.1.mlp.up_proj.weight")
    message = refusal(folder)
    assert message == "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is missing."


def test_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)})
    assert "model.layers.0.self_attn.q_norm.weight belongs to no part" in refusal(folder)


def test_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": torch.zeros(31)})
    message = refusal(folder)
    assert "model.norm.weight has shape [31], but the config asks for [32]" in message


def test_integer_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": torch.zeros(32, dtype=torch.int32)})
    assert "model.norm.weight has type I32" in refusal(folder)


def test_repeated_head_of_a_tied_model_is_ignored(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, **{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[" * 100_000, "config.json is not valid JSON"),
        ("config.json", "[]", "config.json must hold a JSON object"),
        ("config.json", '{"architectures": ["X"]}', "config.json: architecture 'X'"),
        ("model.safetensors", "{", "model.safetensors is damaged"),
        ("model.safetensors", "", "model.safetensors is damaged"),
    ],
)
def test_damaged_file_is_named(folder: Path, name: str, text: str, expected: str) -> None:
    (folder / name).write_text(text)
    assert expected in refusal(folder)


def test_folder_without_weights_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(folder)
    (folder / "config.json").unlink()
    assert "neither config.json nor exactly one .gguf" in refusal(folder)


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.F16, QuantType.BF16])
def test_gguf_holds_the_same_tensors_as_the_folder(
    tmp_path: Path, folder: Path, kind: QuantType
) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder, kind)
    rounded = {QuantType.F32: torch.float32, QuantType.F16: torch.half}.get(kind, torch.bfloat16)
    expected = loaded_tensors(folder)
    actual = loaded_tensors(tmp_path / "tiny.gguf")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        stored = tensor.to(rounded).float() if tensor.dim() == 2 else tensor
        assert torch.equal(actual[name], stored), name


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_1])
def test_quantised_gguf_is_close(tmp_path: Path, folder: Path, kind: QuantType) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder, kind)
    expected = loaded_tensors(folder)
    step = 0.02 if kind == QuantType.Q8_0 else 0.3  # of values of which the largest is near 3
    for name, tensor in loaded_tensors(tmp_path / "tiny.gguf").items():
        assert (tensor - expected[name]).abs().max() <= step * expected[name].abs().max(), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_vectors_may_be_in_any_type(tmp_path: Path, folder: Path, kind: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder, vector_kind=QuantType[kind])
    expected = loaded_tensors(folder)
    for name, tensor in loaded_tensors(tmp_path / "tiny.gguf").items():
        assert torch.allclose(tensor, expected[name], rtol=0.02, atol=0.02), name


def random_blocks(kind: QuantType, rows: int, columns: int) -> np.ndarray:
    """Bytes of a matrix in ``kind``: whatever they are, the format gives them a meaning."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(7)
    return generator.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize(
    "kind",
    ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"],
)
def test_every_gguf_type_equals_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("shoal.backend.weights.gguf._SLICE_BYTES", 3000)  # a few of 64 rows
    folder = write_tiny_checkpoint(tmp_path / "wide", hidden_size=256)
    write_gguf(tmp_path / "tiny.gguf", folder, QuantType.F16, raw_kind=QuantType[kind])
    source = GgufCheckpoint(tmp_path / "tiny.gguf")
    raw = random_blocks(QuantType[kind], 64, 256)
    if kind in ("F32", "F16"):
        raw = raw.view(np.float32 if kind == "F32" else np.float16)
    expected = torch.from_numpy(gguf.dequantize(raw, QuantType[kind]).astype(np.float32))
    loaded = source.load("model.layers.0.mlp.gate_proj.weight", torch.float32)
    assert torch.equal(loaded.view(torch.int32), expected.view(torch.int32))


def test_gguf_with_any_byte_changed_loads_or_is_refused(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, folder, QuantType.Q8_0)
    content = bytearray(path.read_bytes())
    generator = np.random.default_rng(3)
    header = content.index(b"token_embd") + 2000
    loaded = 0
    for place in generator.integers(4, header, 300):
        before, content[place] = content[place], generator.integers(0, 256)
        path.write_bytes(content)
        content[place] = before
        with contextlib.suppress(ConfigError):
            load_model(path, torch.float32)
            loaded += 1
    assert 0 < loaded < 200


def test_gguf_config_equals_the_folders(tmp_path: Path, folder: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder)
    theirs = GgufCheckpoint(tmp_path / "tiny.gguf").config
    ours = config_from_hf(TINY_CONFIG)
    assert theirs.rms_norm_eps == pytest.approx(ours.rms_norm_eps)
    assert (theirs.num_kv_heads, theirs.head_dim, theirs.tie_word_embeddings) == (2, 8, True)


def test_gguf_may_lie_in_a_folder(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "only").mkdir()
    write_gguf(tmp_path / "only" / "tiny.gguf", folder)
    assert load_model(tmp_path / "only", torch.float32).config.vocab_size == 128


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 200, 0.5, 0.99, -1])
def test_gguf_cut_short_is_refused(tmp_path: Path, folder: Path, kept: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, folder)
    content = path.read_bytes()
    size = int(kept * len(content)) if isinstance(kept, float) else kept
    path.write_bytes(content[:size])
    assert "tiny.gguf is" in refusal(path)


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    assert refusal(path) == "model.gguf is not a GGUF file."
    assert "cannot be read" in refusal(tmp_path / "absent.gguf")


def test_lone_safetensors_file_asks_for_its_folder(folder: Path) -> None:
    assert "give the folder" in refusal(folder / "model.safetensors")
