"""Every layout loads from real files; every bad input is refused with its class and one line."""

import argparse
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

from fuseport.exporter.checkpoint import Checkpoint, load
from fuseport.exporter.errors import (
    CorruptInput,
    FuseportError,
    StorageError,
    UnsafeInput,
    UsageError,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
LIGHTNING = FIXTURES / "lightning" / "mamba-kjv.ckpt"
STATE_SPACES = FIXTURES / "state_spaces"
HUGGING_FACE = FIXTURES / "huggingface"


def refused(path: Path, kind: type[FuseportError]) -> str:
    """The message of loading `path`: of exactly this class, on one line, with the path in it."""
    with pytest.raises(FuseportError) as caught:
        load(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable(), "a message is one line, whatever the file has for names"
    assert path.name in message
    return message


def weights() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def assert_weights(checkpoint: Checkpoint) -> None:
    assert checkpoint.tensors.keys() == weights().keys()
    assert all(torch.equal(checkpoint.tensors[k], v) for k, v in weights().items())


class TestLayouts:
    def test_lightning(self) -> None:
        checkpoint = load(LIGHTNING)
        assert checkpoint.layout == "lightning"
        assert "net.backbone.embedding.weight" in checkpoint.tensors
        assert "net.lm_head.weight" in checkpoint.tensors
        assert checkpoint.config["d_model"] == 64
        assert checkpoint.sha256 == hashlib.sha256(LIGHTNING.read_bytes()).hexdigest()
        assert any("Lightning 2." in note for note in checkpoint.notes)

    def test_state_spaces(self) -> None:
        checkpoint = load(STATE_SPACES)
        assert checkpoint.layout == "state_spaces"
        assert checkpoint.config["pad_vocab_size_multiple"] == 8
        assert checkpoint.tensors["lm_head.weight"].shape == (256, 48)

    def test_huggingface(self) -> None:
        checkpoint = load(HUGGING_FACE)
        assert checkpoint.layout == "huggingface"
        assert checkpoint.config["model_type"] == "mamba"
        assert "backbone.embeddings.weight" in checkpoint.tensors

    def test_the_hash_of_a_folder_is_that_of_what_sha256sum_prints(self) -> None:
        names = ["config.json", "model.safetensors"]
        hashes = [hashlib.sha256((HUGGING_FACE / n).read_bytes()).hexdigest() for n in names]
        lines = [f"{digest}  {name}\n" for digest, name in zip(hashes, names, strict=True)]
        assert load(HUGGING_FACE).sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()

    def test_sharded_huggingface(self, tmp_path: Path) -> None:
        whole = load(HUGGING_FACE)
        shard(tmp_path)
        checkpoint = load(tmp_path)
        assert checkpoint.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(checkpoint.tensors[k], v) for k, v in whole.tensors.items())

    def test_files_of_a_huggingface_cache_are_symlinks(self, tmp_path: Path) -> None:
        for file in HUGGING_FACE.iterdir():
            (tmp_path / file.name).symlink_to(file)
        assert load(tmp_path).sha256 == load(HUGGING_FACE).sha256

    @pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.ckpt", "w.safetensors", "w"])
    @pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
    def test_state_dict_of_any_name(self, tmp_path: Path, name: str, wrapper: str | None) -> None:
        inner = weights()
        torch.save(inner if wrapper is None else {wrapper: inner, "epoch": 3}, tmp_path / name)
        checkpoint = load(tmp_path / name)
        assert checkpoint.layout == "state_dict"
        assert_weights(checkpoint)

    def test_format_of_torch_before_1_6(self, tmp_path: Path) -> None:
        torch.save(weights(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
        assert_weights(load(tmp_path / "w.pt"))

    @pytest.mark.parametrize("name", ["w.safetensors", "w.bin", "w"])
    def test_safetensors_under_any_name(self, tmp_path: Path, name: str) -> None:
        safetensors.torch.save_file(weights(), tmp_path / name, metadata={"format": "pt"})
        checkpoint = load(tmp_path / name)
        assert checkpoint.layout == "safetensors"
        assert_weights(checkpoint)

    def test_tied_tensors_larger_together_than_their_file(self, tmp_path: Path) -> None:
        tensor = torch.randn(1000, 100)
        torch.save({"head": tensor, "embedding": tensor}, tmp_path / "w.pt")
        tensors = load(tmp_path / "w.pt").tensors
        assert tensors["head"].data_ptr() == tensors["embedding"].data_ptr()

    def test_parameters_come_without_gradient(self, tmp_path: Path) -> None:
        torch.save({"w": torch.nn.Parameter(torch.ones(3))}, tmp_path / "w.pt")
        assert not load(tmp_path / "w.pt").tensors["w"].requires_grad

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool]
    )
    def test_dtypes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        torch.save({"w": torch.ones(4).to(dtype)}, tmp_path / "w.pt")
        assert load(tmp_path / "w.pt").tensors["w"].dtype == dtype


class TestHyperparameters:
    """Lightning's hyperparameters arrive as plain data; no class in them is imported."""

    def test_common_classes_become_plain_data(self, tmp_path: Path) -> None:
        hyper = {
            "args": argparse.Namespace(lr=0.1, sizes=(1, 2)),
            "model": AttributeDict(depth=4, inner=AttributeDict(width=8)),
            "folder": Path("/data/run"),
            "best": np.float64(1.5),
            "count": np.int64(7),
            "dtype": torch.float16,
            "classes": torch.tensor([1, 2]),
            "target": {"_instantiator": "os.system", "_class_path": "x.Y"},
            3: {"b", "a"},
        }
        save_lightning(tmp_path / "w.ckpt", hyper)
        assert load(tmp_path / "w.ckpt").config == {
            "args": {"lr": 0.1, "sizes": [1, 2]},
            "model": {"depth": 4, "inner": {"width": 8}},
            "folder": "/data/run",
            "best": 1.5,
            "count": 7,
            "dtype": "torch.float16",
            "classes": [1, 2],
            "target": {"_instantiator": "os.system", "_class_path": "x.Y"},
            "3": ["a", "b"],
        }

    def test_nothing_is_imported(self, tmp_path: Path) -> None:
        save_lightning(tmp_path / "w.ckpt", {"a": AttributeDict(b=1), "c": np.float32(1)})
        script = (
            "import sys; from pathlib import Path; from fuseport.exporter.checkpoint import load\n"
            "for name in ('lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
            "before = set(sys.modules)\n"
            f"config = load(Path({str(tmp_path / 'w.ckpt')!r})).config\n"
            "assert config == {'a': {'b': 1}, 'c': 1.0}\n"
            f"assert load(Path({str(LIGHTNING)!r})).config\n"
            "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
            "assert not new & {'lightning', 'lightning_fabric', 'argparse'}, new\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120)

    def test_shared_references_that_double(self, tmp_path: Path) -> None:
        bomb: list[Any] = ["x"]
        for _ in range(60):
            bomb = [bomb, bomb]
        save_lightning(tmp_path / "w.ckpt", {"bomb": bomb})
        assert "nested" in refused(tmp_path / "w.ckpt", CorruptInput)

    def test_deep_nesting(self, tmp_path: Path) -> None:
        save_lightning(tmp_path / "w.ckpt", {"deep": "PLACE"})
        # Python's own pickler cannot write what a file may hold: 100,000 lists, one in the other.
        rewrite(tmp_path / "w.ckpt", lambda data: nest(data, b"X\x05\x00\x00\x00PLACE", 100_000))
        assert "nested" in refused(tmp_path / "w.ckpt", CorruptInput)

    @pytest.mark.parametrize("form", ["deep", "doubling"])
    def test_tuples_that_cannot_be_hashed(self, tmp_path: Path, form: str) -> None:
        """As keys: hashing them would overflow the stack, or never end."""
        save_lightning(tmp_path / "w.ckpt", {"PLACE": 1})
        tuples = b")" + b"\x85" * 100_000  # ((((…))))
        if form == "doubling":
            tuples = b")" + b"".join(b"q\xf0h\xf0\x86" for _ in range(60))  # from each t, (t, t)
        key = b"X\x05\x00\x00\x00PLACE"
        rewrite(tmp_path / "w.ckpt", lambda data: data.replace(key, tuples))
        assert "tuples" in refused(tmp_path / "w.ckpt", CorruptInput)


class Canary:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


class TestCode:
    """Nothing in a file runs, whatever the file is called and however it is wrapped."""

    @pytest.mark.parametrize("name", ["w.ckpt", "w.bin", "w.pth", "w.pkl", "w.dat", "w"])
    @pytest.mark.parametrize("form", ["zip", "legacy", "pickle2", "pickle4", "pickle0"])
    def test_a_callable_is_refused(self, tmp_path: Path, name: str, form: str) -> None:
        canary, path = tmp_path / "canary", tmp_path / name
        value = {"state_dict": weights(), "x": Canary(canary)}
        if form in ("zip", "legacy"):
            torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
        else:
            path.write_bytes(pickle.dumps({"x": Canary(canary)}, protocol=int(form[-1])))
        message = refused(path, UnsafeInput)
        assert "posix.system" in message or "nt.system" in message
        assert not canary.exists()

    def test_every_refused_name_is_listed(self, tmp_path: Path) -> None:
        value = {"a": Canary(tmp_path / "canary"), "b": sys.exit, "c": eval, "d": Path.unlink}
        torch.save(value, tmp_path / "w.pt")
        message = refused(tmp_path / "w.pt", UnsafeInput)
        assert all(name in message for name in (".system", "sys.exit", "builtins.eval", "getattr"))

    def test_names_cannot_write_on_the_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "w").write_bytes(b"\x80\x02cevil\x1b[2J\nname\n.")
        assert "\\x1b" in refused(tmp_path / "w", UnsafeInput)

    def test_a_whole_module_is_refused(self, tmp_path: Path) -> None:
        torch.save(torch.nn.Linear(2, 2), tmp_path / "w.pt")
        assert "torch.nn.modules.linear.Linear" in refused(tmp_path / "w.pt", UnsafeInput)

    def test_safe_globals_of_the_host_do_not_widen_the_list(self, tmp_path: Path) -> None:
        torch.save({"x": Canary(tmp_path / "canary")}, tmp_path / "w.pt")
        with torch.serialization.safe_globals([os.system]):
            refused(tmp_path / "w.pt", UnsafeInput)
        assert not (tmp_path / "canary").exists()

    def test_programs_are_no_checkpoints(self, tmp_path: Path) -> None:
        module = torch.nn.Linear(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(module, torch.ones(1, 2)).save(str(tmp_path / "w.pt"))
        assert "TorchScript" in refused(tmp_path / "w.pt", UnsafeInput)
        torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), tmp_path / "w.pt2")
        assert "exported program" in refused(tmp_path / "w.pt2", UnsafeInput)

    def test_auto_map(self, tmp_path: Path) -> None:
        shutil.copytree(HUGGING_FACE, tmp_path / "m")
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsafeInput, match="auto_map"):
            load(tmp_path / "m")

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/hosts", "..", "a/b", "c:x", "a\\b"])
    def test_a_shard_outside_the_folder(self, tmp_path: Path, name: str) -> None:
        shard(tmp_path, rename=name)
        with pytest.raises(UnsafeInput, match="outside"):
            load(tmp_path)


class TestDamage:
    @pytest.mark.parametrize("source", [LIGHTNING, HUGGING_FACE / "model.safetensors"])
    @pytest.mark.parametrize("keep", ["0", "4", "half", "n-1"])
    def test_truncated(self, tmp_path: Path, source: Path, keep: str) -> None:
        data = source.read_bytes()
        size = {"half": len(data) // 2, "n-1": len(data) - 1}.get(keep) or int(keep.strip("n-"))
        (tmp_path / "w").write_bytes(data[:size])
        refused(tmp_path / "w", CorruptInput)

    def test_truncated_legacy_file(self, tmp_path: Path) -> None:
        torch.save(weights(), tmp_path / "w", _use_new_zipfile_serialization=False)
        data = (tmp_path / "w").read_bytes()
        for size in range(0, len(data), 7):
            (tmp_path / "w").write_bytes(data[:size])
            refused(tmp_path / "w", CorruptInput)

    @pytest.mark.parametrize("seed", range(20))
    def test_random_bytes(self, tmp_path: Path, seed: int) -> None:
        (tmp_path / "w").write_bytes(np.random.default_rng(seed).bytes(1000))
        refused(tmp_path / "w", CorruptInput)

    def test_a_flipped_bit(self, tmp_path: Path) -> None:
        data = bytearray(LIGHTNING.read_bytes())
        with zipfile.ZipFile(LIGHTNING) as archive:
            member = next(m for m in archive.infolist() if m.filename.endswith("/data/5"))
        data[member.header_offset + 200] ^= 1  # past the header of 30 bytes, name and padding
        (tmp_path / "w.ckpt").write_bytes(data)
        assert "data/5: its checksum" in refused(tmp_path / "w.ckpt", CorruptInput)

    def test_damage_anywhere_never_gives_other_weights(self, tmp_path: Path) -> None:
        torch.save(weights(), tmp_path / "w")
        data = (tmp_path / "w").read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(300):
            changed = bytearray(data)
            changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
            (tmp_path / "w").write_bytes(changed)
            try:
                checkpoint = load(tmp_path / "w")
            except (CorruptInput, UnsafeInput):
                continue
            assert_weights(checkpoint)  # the bit was in a date or in padding

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
            (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
            (b'{"error": "Repository not found"}', "JSON"),
            (b"\x1f\x8b\x08\x00" + bytes(100), "compressed"),
            (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
            (b"PK\x05\x06" + bytes(18), "0 data.pkl"),
        ],
    )
    def test_other_things(self, tmp_path: Path, content: bytes, said: str) -> None:
        (tmp_path / "w.ckpt").write_bytes(content)
        assert said in refused(tmp_path / "w.ckpt", CorruptInput)

    def test_a_tar_archive(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "w.pth.tar", "w") as archive:
            archive.add(LIGHTNING, "pickle")
        assert "tar archive" in refused(tmp_path / "w.pth.tar", CorruptInput)

    def test_plain_pickle_without_code(self, tmp_path: Path) -> None:
        (tmp_path / "w").write_bytes(pickle.dumps({"a": [1.0]}))
        assert "plain pickle" in refused(tmp_path / "w", CorruptInput)

    def test_no_weights(self, tmp_path: Path) -> None:
        for value in ({"epoch": 1}, [torch.ones(1)], torch.ones(2)):
            torch.save(value, tmp_path / "w")
            refused(tmp_path / "w", CorruptInput)

    def test_tensors_that_are_not_dense(self, tmp_path: Path) -> None:
        for tensor in (torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
            torch.save({"w": tensor}, tmp_path / "w")
            refused(tmp_path / "w", CorruptInput)

    def test_terabytes_by_stride_zero(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(1).expand(2**40)}, tmp_path / "w")
        assert "claim" in refused(tmp_path / "w", CorruptInput)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_storage_larger_than_the_file(self, tmp_path: Path, zipped: bool) -> None:
        path = tmp_path / "w"
        torch.save({"w": torch.ones(70_000)}, path, _use_new_zipfile_serialization=zipped)
        small, large = struct.pack("<i", 70_000), struct.pack("<i", 2**31 - 1)
        if zipped:
            rewrite(path, lambda data: data.replace(small, large))
        else:
            path.write_bytes(path.read_bytes().replace(small, large))
        assert "claim" in refused(path, CorruptInput)

    def test_an_archive_that_inflates(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "w", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("w/data.pkl", bytes(50_000_000))
        assert "compressed" in refused(tmp_path / "w", CorruptInput)

    def test_a_member_twice(self, tmp_path: Path) -> None:
        torch.save(weights(), tmp_path / "w")
        with zipfile.ZipFile(tmp_path / "w", "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            archive.writestr("w/data.pkl", b"")
        assert "twice" in refused(tmp_path / "w", CorruptInput)


def _header(text: str, data: int = 8, length: int | None = None) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def _entry(start: int, end: int, dtype: str = "F32", shape: str = "[1]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_header("{}", length=2**64 - 1), "claims"),
        (_header("{}", length=100_000_001), "claims"),
        (_header(f'{{"a":{_entry(0, 4)},"a":{_entry(4, 8)}}}'), "occurs twice"),
        (_header(f'{{"a":{_entry(0, 4)},"b":{_entry(0, 4)}}}'), "overlaps"),
        (_header(f'{{"a":{_entry(0, 4)},"b":{_entry(5, 9)}}}', 9), "hole"),
        (_header(f'{{"a":{_entry(0, 4)}}}', 9), "describes 4 bytes"),
        (_header(f'{{"a":{_entry(0, 8)}}}'), "does not fill"),
        (_header(f'{{"a":{_entry(0, 8, "Q4")}}}'), "dtype Q4"),
        (_header(f'{{"a":{_entry(0, 8, shape="[-2]")}}}'), "whole number"),
        (_header(f'{{"a":{_entry(0, 8, shape=f"[{2**64}]")}}}'), "whole number"),
        (_header(f'{{"a":{_entry(0, 8, shape="[true]")}}}'), "whole number"),
        (_header('{"a":{"dtype":"F32"}}'), "without"),
        (_header('{"a":' + "[" * 100_000), "JSON"),
        (_header('{"a":'), "JSON"),
        (_header('{"__metadata__":{}}', 0), "no tensors"),
    ],
)
def test_safetensors_that_break_the_format(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "w").write_bytes(content)
    assert said in refused(tmp_path / "w", CorruptInput)


class TestPaths:
    def test_nothing_there(self, tmp_path: Path) -> None:
        refused(tmp_path / "absent.ckpt", UsageError)

    def test_a_fifo_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        refused(tmp_path / "fifo", UsageError)

    def test_a_device(self) -> None:
        refused(Path("/dev/zero"), UsageError)

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        refused(tmp_path, CorruptInput)
        (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
        refused(tmp_path, CorruptInput)
        shutil.copy(HUGGING_FACE / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text("[1]")
        with pytest.raises(CorruptInput, match=r"config\.json: not a JSON object"):
            load(tmp_path)

    def test_the_disk_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_args: Any, **_kwargs: Any) -> io.BytesIO:
            raise OSError(5, "Input/output error")

        torch.save(weights(), tmp_path / "w")
        monkeypatch.setattr(Path, "open", broken)
        refused(tmp_path / "w", StorageError)

    @pytest.mark.parametrize("fault", ["absent key", "key twice", "absent file", "no map"])
    def test_an_index_that_is_wrong(self, tmp_path: Path, fault: str) -> None:
        index = shard(tmp_path)
        value = json.loads(index.read_text())
        if fault == "absent key":
            value["weight_map"]["more"] = "model-00001.safetensors"
        elif fault == "key twice":
            shutil.copy(tmp_path / "model-00001.safetensors", tmp_path / "copy.safetensors")
            value["weight_map"]["more"] = "copy.safetensors"
        elif fault == "absent file":
            value["weight_map"]["more"] = "model-00003.safetensors"
        else:
            value = {"metadata": {}}
        index.write_text(json.dumps(value))
        with pytest.raises(CorruptInput):
            load(tmp_path)


def save_lightning(path: Path, hyper: dict[Any, Any]) -> None:
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": weights()}
    torch.save(content | {"hyper_parameters": hyper}, path)


def shard(folder: Path, rename: str | None = None) -> Path:
    """Split the Hugging Face fixture into two shards in `folder`; returns the index."""
    tensors = safetensors.torch.load_file(HUGGING_FACE / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:10], names[10:]), start=1):
        file = f"model-{i:05}.safetensors"
        safetensors.torch.save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file if rename is None or i == 1 else rename)
    shutil.copy(HUGGING_FACE / "config.json", folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write an archive again with another pickle and right checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("/data.pkl") else data)


def nest(data: bytes, place: bytes, depth: int) -> bytes:
    assert place in data
    return data.replace(place, b"]" * depth + b"a" * (depth - 1))
