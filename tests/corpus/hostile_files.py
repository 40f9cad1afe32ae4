"""Folders, safetensors, configurations and ONNX files that are to be refused."""

import functools
import json
import os
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from onnx import TensorProto, helper

from fuseport.tests.corpus.hostile import Hostile, Make, Touch, weights

__all__ = ["HOSTILE_ARTIFACTS", "HOSTILE_FILES"]

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "mamba", "hidden_size": 8}


def _written(content: bytes, name: str = "w.ckpt") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


# Fault 4 and 5: folders.


def _folder(folder: Path, config: bytes | None = None, index: bytes | None = None) -> Path:
    made = folder / "model"
    made.mkdir()
    (made / "config.json").write_bytes(json.dumps(CONFIG).encode() if config is None else config)
    name = "model.safetensors" if index is None else "model-00001-of-00001.safetensors"
    safetensors.torch.save_file(weights(), made / name)
    if index is not None:
        (made / INDEX).write_bytes(index)
    return made


def _large_config(folder: Path) -> Path:
    made = _folder(folder)
    os.truncate(made / "config.json", 2**26 + 1)
    return made


def _shard(folder: Path, content: str) -> Path:
    made = _folder(
        folder, index=b'{"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}'
    )
    shard = made / "model-00001-of-00001.safetensors"
    if content == "code":
        torch.save({"x": Touch(folder)}, shard)
    elif content == "list":
        torch.save([torch.ones(1)], shard)
    else:
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return made


def _folders() -> Iterable[Hostile]:
    auto = json.dumps({**CONFIG, "auto_map": {"AutoModel": "evil.Model"}}).encode()
    yield Hostile("auto_map", 4, 3, functools.partial(_folder, config=auto), "auto_map")
    for name, code, says in (
        ("../x.safetensors", 3, "outside"),
        ("/etc/passwd", 3, "outside"),
        ("..", 3, "outside"),
        ("C:\\x", 3, "outside"),
        ("a\0b", 4, "not a file name"),
        ("", 4, "not a file name"),
        ("absent.safetensors", 4, "not in the folder"),
        ("x" * 5000, 4, "not in the folder"),
        (["a list"], 4, "names of files"),
    ):
        index = json.dumps({"weight_map": {"a.weight": name}}).encode()
        shown = str(name)[:20].replace("\0", "NUL") or "nothing"
        make = functools.partial(_folder, index=index)
        yield Hostile(f"a shard called {shown}", 5, code, make, says)
    yield Hostile("a shard with code", 5, 3, functools.partial(_shard, content="code"), "system")
    yield Hostile("a shard of git-lfs", 5, 4, functools.partial(_shard, content="lfs"), "git-lfs")
    listed = functools.partial(_shard, content="list")
    yield Hostile("a shard that is a list", 5, 4, listed, "no state dict")
    yield Hostile("a config of 64 MiB", 8, 4, _large_config, "no config is that large")
    for name, content, says in (
        (
            "git-lfs pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "git-lfs",
        ),
        ("web page", b"<!DOCTYPE html><html></html>", "web page"),
        ("web page after a comment", b"\xef\xbb\xbf\n<!-- x --><html>", "web page"),
        ("JSON", b'{"error": "not found"}', "JSON"),
    ):
        yield Hostile(f"a {name}", 5, 4, _written(content), says)
    for name, content, says in (
        ("no JSON", b"{", "JSON"),
        ("a list", b"[]", "not a JSON object"),
        ("two of a key", b'{"model_type": "mamba", "model_type": "x"}', "twice"),
        ("lists without end", b'{"x":' + b"[" * 200_000, "JSON"),
        ("an integer without end", b'{"x":' + b"9" * 100_000 + b"}", "JSON"),
        ("3 million values", b'{"x":[' + b"[]," * 3_000_000 + b"[]]}", "values"),
        ("wide text", b'{"x":"' + b"a" * 2**24 + '😀"}'.encode(), "ASCII"),
    ):
        make = functools.partial(_folder, config=content)
        yield Hostile(f"a config of {name}", 8, 4, make, says)


# Fault 9: safetensors.


def _header(text: str | bytes, data: int = 8, length: int | None = None) -> Make:
    raw = text.encode() if isinstance(text, str) else text
    size = struct.pack("<Q", len(raw) if length is None else length)
    return _written(size + raw + bytes(data))


def _entry(start: int, end: int, dtype: str = "F32", shape: str = "[1]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}'


def _tensors() -> Iterable[Hostile]:
    many = ",".join(["9223372036854775807"] * 200_000)
    for name, make, says in (
        ("a length of 2**64 - 1", _header("{}", length=2**64 - 1), "claims"),
        ("a length over 100 MB", _header("{}", length=100_000_001), "claims"),
        ("a length past the end", _header("{}", length=11), "claims"),
        ("an overlap", _header(f'{{"a":{_entry(0, 4)},"b":{_entry(2, 6)}}}'), "overlaps"),
        ("a hole", _header(f'{{"a":{_entry(0, 4)},"b":{_entry(5, 9)}}}', 9), "hole"),
        ("trailing bytes", _header(f'{{"a":{_entry(0, 4)}}}', 9), "describes"),
        ("a size that overflows", _header(f'{{"a":{_entry(0, 8, shape=f"[{2**64}]")}}}'), "whole"),
        ("200,000 dimensions", _header(f'{{"a":{_entry(0, 8, shape=f"[{many}]")}}}'), "dimensions"),
        ("a negative offset", _header(f'{{"a":{_entry(-4, 0)}}}'), "whole"),
        ("an unknown dtype", _header(f'{{"a":{_entry(0, 8, "Q4")}}}'), "dtype Q4"),
        ("two of a key", _header(f'{{"a":{_entry(0, 4)},"a":{_entry(4, 8)}}}'), "twice"),
        ("3 million lists", _header('{"a":[' + "[]," * 3_000_000 + "[]]}"), "values"),
        ("wide text", _header('{"' + "a" * 2**24 + '😀":1}'), "ASCII"),
        ("lists without end", _header('{"a":' + "[" * 200_000), "JSON"),
        ("no object", _header('{"__metadata__":1}', 0), ""),
        ("a list", _header("[]", 0), "not recognised"),
    ):
        yield Hostile(f"safetensors: {name}", 9, 4, make, says)


HOSTILE_FILES = (*_folders(), *_tensors())


# Faults 10 to 12, as far as they are read: artifacts, which the reader of checkpoints does not see.


def _model(nodes: list[Any] | None = None, opset: int = 20, **external: str) -> bytes:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], raw_data=bytes(16))
    if external:
        weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        nodes or [helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [weight]
    )
    imports = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())


def _linked(folder: Path, hard: bool) -> Path:
    made = folder / "in"
    made.mkdir()
    (folder / "secret").write_bytes(bytes(16))
    if hard:
        os.link(folder / "secret", made / "data")
    else:
        (made / "data").symlink_to(folder / "secret")
    (made / "w.onnx").write_bytes(_model(location="data"))
    return made / "w.onnx"


def _archived(folder: Path, name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(folder / "w.pt2", "w", method) as made:
        made.writestr("w/constants.pkl", b"\x80\x02).")
        made.writestr("w/code/__torch__.py", b"")
        made.writestr("w/archive_format", b"pt2")
        made.writestr(name, content)
    return folder / "w.pt2"


def _artifacts() -> Iterable[Hostile]:
    cycle = [helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Abs", ["y"], ["b"])]
    twice = [helper.make_node("Abs", ["x"], ["y"])] * 2
    unknown = [helper.make_node("Fused", ["x"], ["y"], domain="mine")]
    for name, fault, code, content, says in (
        ("ONNX: data at ../", 10, 3, _model(location="../secret"), "leads out"),
        ("ONNX: data at /", 10, 3, _model(location="/etc/passwd"), "leads out"),
        ("ONNX: data in memory", 10, 3, _model(location="*/_ORT_MEM_ADDR_/*", offset="1"), "leads"),
        ("ONNX: data absent", 10, 4, _model(location="absent"), "external data"),
        ("ONNX: data past the end", 10, 4, _model(location="w.onnx", offset="9999"), "too short"),
        ("ONNX: a negative offset", 10, 4, _model(location="w.onnx", offset="-1"), "offset"),
        ("ONNX: opset 999", 11, 5, _model(opset=999), "opset 999"),
        ("ONNX: an operator of nobody", 11, 5, _model(unknown), "mine::Fused"),
        ("ONNX: a cycle", 11, 4, _model(cycle), "cycle"),
        ("ONNX: a value made twice", 11, 4, _model(twice), "twice"),
        ("ONNX: cut off", 11, 4, _model()[:-5], "no ONNX model"),
    ):
        yield Hostile(name, fault, code, _written(content, "w.onnx"), says)
    for hard, says in ((True, "other names"), (False, "leads out")):
        kind = "hard link" if hard else "link"
        make = functools.partial(_linked, hard=hard)
        yield Hostile(f"ONNX: data at a {kind}", 10, 3, make, says)
    outside = functools.partial(_archived, name="w/../../x", content=b"x")
    yield Hostile(".pt2: a member outside", 12, 3, outside, "leads out")
    bomb = functools.partial(
        _archived, name="w/models/m.json", content=bytes(2**27), method=zipfile.ZIP_DEFLATED
    )
    yield Hostile(".pt2 that inflates", 8, 4, bomb, "inflates")


HOSTILE_ARTIFACTS = tuple(_artifacts())
