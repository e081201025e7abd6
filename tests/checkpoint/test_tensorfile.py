from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from deltafin.checkpoint.tensorfile import read_header, read_index
from deltafin.errors import TensorFileError


def container(header: Any, payload: bytes = b"", *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(TensorFileError) as caught:
        read_header(path, max_header_bytes=1 << 20)
    assert str(path) in caught.value.message
    assert caught.value.remedy
    return caught.value.message


def test_agrees_with_the_safetensors_library(tiny: Path) -> None:
    for path in sorted(tiny.glob("*.safetensors")):
        data = path.read_bytes()
        library = dict(deserialize(data))
        ours = read_header(path)
        assert ours.keys() == library.keys()
        for name, info in ours.items():
            assert (info.dtype, list(info.shape)) == (library[name]["dtype"], library[name]["shape"])
            assert data[info.offset : info.offset + info.nbytes] == bytes(library[name]["data"])


GOOD = {"a": entry("U8", [4], 0, 4), "b": entry("F32", [1], 4, 8)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated or not a tensor file"),
        (b"\x01\0\0", "truncated or not a tensor file"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "truncated or not a tensor file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>not found</body></html>", "web page"),
        (container({}, raw=b" " * ((1 << 20) + 8)), "exceeds"),
        (container({}, raw=b"{"), "not valid JSON"),
        (container({}, raw=b"\xff\xfe{}"), "not valid JSON"),
        (container({}, raw=b"[" * 100_000), "not valid JSON"),
        (container({}, raw=b'{"a": NaN}'), "not valid JSON"),
        (container({}, raw=b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
        (container({}, raw=b'{"a":1,"a":1}'), "occurs twice"),
        (container([]), "not a JSON object"),
        (container({"a": 3}), "malformed entry"),
        (container({"a": {"dtype": "U8", "shape": [1]}}, b"x"), "malformed entry"),
        (container({"a": GOOD["a"] | {"more": 1}}, b"1234"), "malformed entry"),
        (container({"a": entry("I64", [1], 0, 8)}, b"12345678"), "dtype"),
        (container({"a": entry(["U8"], [1], 0, 1)}, b"1"), "dtype"),  # type: ignore[arg-type]
        (container({"a": entry("U8", [-1], 0, 1)}, b"1"), "shape"),
        (container({"a": entry("U8", [True], 0, 1)}, b"1"), "shape"),
        (container({"a": entry("U8", [1.0], 0, 1)}, b"1"), "shape"),
        (container({"a": entry("U8", [1] * 9, 0, 1)}, b"1"), "shape"),
        (container({"a": entry("U8", [1 << 60], 0, 1)}, b"1"), "shape"),
        (container({"a": entry("U8", [1 << 50, 1 << 50], 0, 1)}, b"1"), "needs"),
        (container({"a": entry("U8", [4], 4, 0)}, b"1234"), "data_offsets"),
        (container({"a": entry("U8", [4], "0", 4)}, b"1234"), "data_offsets"),
        (container({"a": entry("U8", [4], 0, 5)}, b"12345"), "needs 4 bytes and is given 5"),
        (container({"a" * 600: entry("U8", [1], 0, 1)}, b"1"), "too long"),
        (container(GOOD | {"c": entry("U8", [2], 3, 5)}, b"12345678"), "overlaps"),
        (container({"a": entry("U8", [1], 1, 2)}, b"12"), "unused bytes"),
        (container(GOOD, b"1234567"), "truncated: it has"),
        (container(GOOD, b"123456789"), "1 bytes after its last tensor"),
    ],
)
def test_hostile_headers_are_refused_with_one_clear_message(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refused(tmp_path, data)


def test_messages_never_carry_raw_untrusted_text(tmp_path: Path) -> None:
    name = "\x1b[31m\n" + "x" * 400
    message = refused(tmp_path, container({name: 3}))
    assert message.isprintable()
    assert len(message) < 400


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")  # opening it for reading would hang
    with pytest.raises(TensorFileError, match="not a regular file"):
        read_header(tmp_path / "fifo.safetensors")
    with pytest.raises(TensorFileError, match="not a regular file"):
        read_header(tmp_path)
    (tmp_path / "link.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(TensorFileError, match=r"does not exist, a link to \.\./blobs/gone"):
        read_header(tmp_path / "link.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_headers_raise_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    mutant = bytearray(container({"__metadata__": {"format": "pt"}, **GOOD}, b"12345678"))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(mutant) - 1))
        action = data.draw(st.sampled_from(["set", "delete", "insert"]))
        if action == "set":
            mutant[at] = data.draw(st.integers(0, 255))
        elif action == "delete" and len(mutant) > 1:
            del mutant[at]
        else:
            mutant[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    path = tmp_path / "mutant.safetensors"
    path.write_bytes(mutant)
    try:
        tensors = read_header(path)
    except TensorFileError:
        return
    for info in tensors.values():
        assert 0 <= info.offset <= info.offset + info.nbytes <= len(mutant)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
@example({"weight_map": {"a": "b.safetensors"}})
def test_any_json_as_index_is_accepted_or_refused_cleanly(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(value))
    try:
        index = read_index(path)
    except TensorFileError:
        return
    assert all("/" not in file and ".." not in file for file in index.values())


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "..",
        ".hidden.safetensors",
        "a\0.safetensors",
        "model.bin",
        "x" * 300 + ".safetensors",
        "",
        None,
        7,
        ["a.safetensors"],
    ],
)
def test_index_may_only_name_plain_files(tmp_path: Path, file: Any) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(TensorFileError, match="not a plain shard name"):
        read_index(path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1, "a": 2}}']
)
def test_malformed_indices_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "index.json"
    path.write_text(text)
    with pytest.raises(TensorFileError):
        read_index(path)


def test_oversized_index_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(TensorFileError, match="more than 8"):
        read_index(path, max_bytes=8)
