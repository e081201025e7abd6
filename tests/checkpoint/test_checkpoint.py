from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from deltafin.bench.synthetic import released_config
from deltafin.checkpoint import Checkpoint, K3Config, expert_inventory, spine_inventory
from deltafin.checkpoint.inventory import text_tensor_count
from deltafin.checkpoint.tensorfile import INDEX_NAME
from deltafin.errors import ConfigError, TensorFileError


def repack(path: Path, change: Callable[[dict[str, dict[str, Any]]], None]) -> None:
    """Rewrites a shard after ``change`` edited its tensors: name → dtype, shape, data."""
    tensors = {name: dict(value) for name, value in deserialize(path.read_bytes())}
    change(tensors)
    header, payload = {}, b""
    for name, t in tensors.items():
        data = bytes(t["data"])
        header[name] = {
            "dtype": t["dtype"],
            "shape": t["shape"],
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number - 1]


NORM = "language_model.model.norm.weight"
GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"


def test_the_miniature_opens(mini_target: Path) -> None:
    checkpoint = Checkpoint.open(mini_target)
    assert len(checkpoint.tensors) == 6378 == text_tensor_count(checkpoint.config)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == 37413312
    assert all(len(checkpoint.expert_runs(layer, e)) == 1 for layer in (1, 8) for e in (0, 9, 10, 127))
    assert checkpoint.files == {p.name: p.stat().st_size for p in mini_target.glob("*.safetensors")}


def test_inventory_of_the_release() -> None:
    config = K3Config.parse(released_config())
    units = spine_inventory(config)
    # Published totals of the released checkpoint (168 of its 497,220 tensors are the vision tower's).
    assert text_tensor_count(config) == 497_220 - 168
    assert sum(spec.nbytes for unit in units.values() for spec in unit.values()) == 113_509_540_864
    assert sum(spec.nbytes for spec in expert_inventory(config).values()) == 17_547_264
    sizes = {key: sum(spec.nbytes for spec in unit.values()) for key, unit in units.items()}
    assert sizes["layer.0"] == 2_341_213_184
    assert sizes["layer.1"] == 1_267_744_256  # KDA
    assert sizes["layer.3"] == sizes["layer.92"] == 844_335_616  # MLA
    assert sizes["embed"] == 2_348_810_240
    assert [len(units[key]) for key in ("embed", "layer.0", "layer.1", "layer.3", "head")] == [1, 23, 28, 22, 4]


def test_identity_tells_models_apart(tiny: Path) -> None:
    identity = Checkpoint.open(tiny).identity
    assert len(identity) == 64
    assert Checkpoint.open(tiny).identity == identity

    def fine_tune(tensors: dict[str, dict[str, Any]]) -> None:
        tensors[NORM]["data"] = bytes(len(tensors[NORM]["data"]))

    repack(shard(tiny, 4), fine_tune)
    assert Checkpoint.open(tiny).identity != identity


def test_read_returns_the_payload(tiny: Path) -> None:
    library = dict(deserialize(shard(tiny, 4).read_bytes()))
    assert Checkpoint.open(tiny).read(NORM) == bytes(library[NORM]["data"])


def test_symlinked_shards_are_followed(tiny: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    identity = Checkpoint.open(tiny).identity
    for number, path in enumerate(sorted(tiny.glob("*.safetensors"))):
        shutil.move(path, blobs / f"{number:064x}")
        path.symlink_to(f"../blobs/{number:064x}")
    assert Checkpoint.open(tiny).identity == identity


def test_single_file(tiny: Path) -> None:
    tensors: dict[str, dict[str, Any]] = {}
    for path in sorted(tiny.glob("*.safetensors")):
        tensors |= {name: dict(value) for name, value in deserialize(path.read_bytes())}
        last = path
    repack(last, lambda t: t.update(tensors))
    last.rename(tiny / "model.safetensors")
    (tiny / INDEX_NAME).unlink()
    assert Checkpoint.open(tiny).files.keys() == {"model.safetensors"}
    (tiny / "model.safetensors").unlink()
    with pytest.raises(TensorFileError, match="has neither"):
        Checkpoint.open(tiny)


def test_vision_shards_need_not_be_there(tiny: Path) -> None:
    edit_index(tiny, lambda m: m.update({"vision_tower.x.weight": "model-00009-of-000009.safetensors"}))
    assert not any(name.startswith("vision") for name in Checkpoint.open(tiny).tensors)


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(TensorFileError) as caught:
        Checkpoint.open(folder)
    for part in parts:
        assert part in caught.value.message
    assert caught.value.remedy


def test_missing_shard(tiny: Path) -> None:
    path = shard(tiny, 2)
    path.unlink()
    refused(tiny, path.name, "does not exist")


def test_truncated_shard(tiny: Path) -> None:
    path = shard(tiny, 2)
    path.write_bytes(path.read_bytes()[:-1])
    refused(tiny, path.name, "is truncated")


def test_tensor_that_the_index_does_not_know(tiny: Path) -> None:
    edit_index(tiny, lambda m: m.pop(GATE) and None)
    refused(tiny, shard(tiny, 2).name, GATE, "does not know it")


def test_tensor_that_the_shard_lacks(tiny: Path) -> None:
    repack(shard(tiny, 2), lambda t: t.pop(GATE) and None)
    refused(tiny, shard(tiny, 2).name, GATE, "lacks it")


def test_tensor_in_the_wrong_shard(tiny: Path) -> None:
    edit_index(tiny, lambda m: m.update({GATE: shard(tiny, 1).name}))
    refused(tiny, GATE, shard(tiny, 1).name)


def test_tensor_in_two_shards(tiny: Path) -> None:
    gate = dict(deserialize(shard(tiny, 2).read_bytes()))[GATE]
    repack(shard(tiny, 3), lambda t: t.update({GATE: gate}))
    refused(tiny, shard(tiny, 3).name, GATE, f"places it in {shard(tiny, 2).name}")


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda mapping: mapping.update({new: mapping.pop(old)})


def test_missing_tensor(tiny: Path) -> None:
    edit_index(tiny, lambda m: m.pop(GATE) and None)
    repack(shard(tiny, 2), lambda t: t.pop(GATE) and None)
    refused(tiny, f"lacks tensor {GATE}")


def test_missing_expert_tensor(tiny: Path) -> None:
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight_scale"
    edit_index(tiny, lambda m: m.pop(name) and None)
    repack(shard(tiny, 3), lambda t: t.pop(name) and None)
    refused(tiny, f"lacks tensor {name}")


def test_unknown_tensor(tiny: Path) -> None:
    extra = "language_model.model.layers.1.self_attn.rotary.weight"
    gate = dict(deserialize(shard(tiny, 2).read_bytes()))[GATE]
    edit_index(tiny, lambda m: m.update({extra: shard(tiny, 2).name}))
    repack(shard(tiny, 2), lambda t: t.update({extra: gate}))
    refused(tiny, extra, "does not have")


def test_wrong_shape_and_dtype(tiny: Path) -> None:
    def transpose(tensors: dict[str, dict[str, Any]]) -> None:
        tensors[GATE]["shape"] = tensors[GATE]["shape"][::-1]

    original = shard(tiny, 2).read_bytes()
    repack(shard(tiny, 2), transpose)
    refused(tiny, GATE, "BF16 [64, 6]", "BF16 [6, 64]")
    shard(tiny, 2).write_bytes(original)

    def retype(tensors: dict[str, dict[str, Any]]) -> None:
        tensors[GATE] |= {"dtype": "F32", "data": bytes(2) + bytes(tensors[GATE]["data"]) * 2}
        tensors[GATE]["data"] = tensors[GATE]["data"][2:]

    repack(shard(tiny, 2), retype)
    refused(tiny, GATE, "F32")


def test_configuration_of_another_model(tiny: Path, mini_target: Path) -> None:
    shutil.copy(mini_target / "config.json", tiny / "config.json")
    refused(tiny, "config.json")
    (tiny / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        Checkpoint.open(tiny)


def test_header_size_is_bounded_by_what_the_model_can_need(tiny: Path) -> None:
    path = shard(tiny, 2)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padded = data[8 : 8 + length] + b" " * (8 << 20)
    path.write_bytes(len(padded).to_bytes(8, "little") + padded + data[8 + length :])
    refused(tiny, path.name, "exceeds")
