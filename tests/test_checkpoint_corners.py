"""Corners of the loader, the writer and the comparator that no file of the corpus turns."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseport.exporter import checkpoint
from fuseport.exporter.bundle import hash_file, read_manifest
from fuseport.exporter.checkpoint import load
from fuseport.exporter.checkpoint.plain import settings
from fuseport.exporter.errors import CorruptInput, StorageError
from fuseport.exporter.verify.compare import _pattern

LIGHTNING = "pytorch-lightning_version"


class Own(torch.Tensor):
    """A class that files of weights do not have."""


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"\ud800": torch.ones(1)}, "half a character"),
        ({"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "nested"),
        ({"w": quantised()}, "quantised"),
    ],
    ids=["name", "nested", "quantised"],
)
def test_weights_that_no_file_can_have(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    torch.save(entries, tmp_path / "w")
    with pytest.raises(CorruptInput, match=said):
        load(tmp_path / "w")


def test_lightning_without_tensors(tmp_path: Path) -> None:
    torch.save({LIGHTNING: "2.5.0", "state_dict": {"epoch": 1}}, tmp_path / "w.ckpt")
    with pytest.raises(CorruptInput, match="state_dict: no tensors in it"):
        load(tmp_path / "w.ckpt")


def test_callbacks_whose_states_have_no_names(tmp_path: Path) -> None:
    """Neither a key that is a number nor tensors under numbers are weights."""
    weights = {"a": torch.ones(2)}
    callbacks = {"EMA": {3: weights, "by number": {0: torch.ones(2)}, "weights": weights}}
    content = {LIGHTNING: "2.5.0", "state_dict": weights, "callbacks": callbacks}
    torch.save(content, tmp_path / "w.ckpt")
    read, _ = checkpoint.read(tmp_path / "w.ckpt")
    assert [one.name for one in read.candidates] == ["state_dict", "callbacks.EMA.weights"]


def test_vfimamba_without_what_is_left_out(tmp_path: Path) -> None:
    torch.save({"module.feature_bone.w": torch.ones(2)}, tmp_path / "w.pkl")
    read, _ = checkpoint.read(tmp_path / "w.pkl")
    assert read.notes == ()


def test_settings_without_a_value(tmp_path: Path) -> None:
    assert settings(tmp_path, "args", None) == {}


@pytest.mark.parametrize("moment", ["hashed", "read by torch", "looked for", "an archive"])
def test_a_disk_that_fails_in_between(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "w"
    torch.save({"w": torch.ones(2)}, path)
    if moment == "hashed":
        monkeypatch.setattr(checkpoint, "_file_hash", broken)
    elif moment == "read by torch":
        monkeypatch.setattr(torch, "load", broken)
    elif moment == "an archive":
        monkeypatch.setattr("fuseport.exporter.checkpoint.zip_file._check_end", broken)
    else:
        (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
        index = '{"weight_map": {"w": "model-1.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
        path = tmp_path
        found = Path.is_file
        monkeypatch.setattr(
            Path, "is_file", lambda p: broken() if p.name.startswith("model-") else found(p)
        )
    with pytest.raises(StorageError, match="cannot be read"):
        load(path)


def test_a_folder_of_another_kind_of_mamba(tmp_path: Path) -> None:
    """state-spaces' names of files, without the keys of its configuration."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(CorruptInput):
        load(tmp_path)


class TestManifest:
    def test_it_is_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").mkdir()
        with pytest.raises(StorageError, match="cannot be read"):
            read_manifest(tmp_path)

    def test_it_is_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "there").write_text("{}")
        (tmp_path / "manifest.json").symlink_to(tmp_path / "there")
        with pytest.raises(CorruptInput, match="a symbolic link"):
            read_manifest(tmp_path)

    def test_a_file_that_is_not_there_has_no_hash(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="cannot be read"):
            hash_file(tmp_path / "absent")


def test_what_is_off_by_more_than_float64_holds_is_said() -> None:
    value = torch.tensor([1.0])
    assert _pattern(value, value) == "off by more than float64 holds"
