"""Corners of the loader, the writer and the comparator that no file of the corpus turns."""

import errno
import fcntl
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseport.exporter import checkpoint
from fuseport.exporter.bundle import Bundle, hash_file, read_manifest, staging, trust
from fuseport.exporter.checkpoint import load
from fuseport.exporter.checkpoint.content import only_tensors
from fuseport.exporter.checkpoint.plain import plain, settings
from fuseport.exporter.checkpoint.sniff import require_regular
from fuseport.exporter.errors import CorruptInput, StorageError, UsageError
from fuseport.exporter.verify.compare import _pattern
from fuseport.tests.corpus.benign import NESTED
from fuseport.tests.corpus.pickled import archive, entries, tensor

LIGHTNING = "pytorch-lightning_version"


class Own(torch.Tensor):
    """A class that files of weights do not have."""


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"\ud800": torch.ones(1)}, "half a character"),
        pytest.param(
            {"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
            "nested",
            marks=pytest.mark.skipif(
                not NESTED, reason="torch reads no nested tensors from 2.15 on"
            ),
        ),
        ({"w": quantised()}, "quantised"),
    ],
    ids=["name", "nested", "quantised"],
)
def test_weights_that_no_file_can_have(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    torch.save(entries, tmp_path / "w")
    with pytest.raises(CorruptInput, match=said):
        load(tmp_path / "w")


def test_a_class_of_tensors_that_files_do_not_have(tmp_path: Path) -> None:
    with pytest.raises(CorruptInput, match="it is a Own"):
        only_tensors(tmp_path, "w", {"w": torch.ones(1).as_subclass(Own)})


def test_members_of_an_archive_that_overlap(tmp_path: Path) -> None:
    """Many names of the same bytes: they would be read again and again."""
    path = archive(tmp_path / "w", entries({"w": tensor([4], [1])}), {"0": bytes(1000)})
    with zipfile.ZipFile(path, "a") as made:
        there = made.getinfo("w/data/0")
        for i in range(1, 9):
            other = zipfile.ZipInfo(f"w/data/{i}")
            for what in ("header_offset", "CRC", "file_size", "compress_size"):
                setattr(other, what, getattr(there, what))
            made.filelist.append(other)
        made._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CorruptInput, match="members overlap"):
        load(path)


def test_a_member_beyond_any_file(tmp_path: Path) -> None:
    path = archive(tmp_path / "w", entries({"w": tensor([4], [1])}))
    with zipfile.ZipFile(path, "a") as made:
        made.getinfo("w/data/0").header_offset = 2**63 - 1
        made._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CorruptInput, match="damaged or truncated archive"):
        load(path)


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


def test_values_that_are_no_settings() -> None:
    assert plain(object()) == "<object>"
    assert plain(torch.eye(2).to_sparse()) == "tensor (2, 2) of torch.float32"


def test_a_file_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "w").touch()
    for absent in (tmp_path / "absent", tmp_path / "w" / "w"):
        with pytest.raises(UsageError, match="there is no such file"):
            require_regular(absent)


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
    def test_what_its_programs_give(self, tmp_path: Path) -> None:
        programs = {
            "forward": {"outputs": [{"name": "y"}], "none": []},
            "gradient": {"outputs": [{"name": "y"}, {"name": "grad/a"}], "none": ["grad/b"]},
        }
        bundle = Bundle(tmp_path, {"programs": programs}, "")
        assert bundle.tensors == {"y", "grad/a", "grad/b"}

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


class TestWriting:
    def test_a_device_is_written_to(self) -> None:
        staging.write_whole(Path("/dev/null"), b"x")
        assert Path("/dev/null").is_char_device()

    def test_a_folder_and_a_link_to_itself_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "link")
        for path in (tmp_path, tmp_path / "link"):
            with pytest.raises(StorageError, match="cannot be written"):
                staging.write_whole(path, b"x")

    def test_a_temporary_folder_that_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
        with pytest.raises(StorageError, match="cannot be written"), staging.work_folder():
            pytest.fail("there is none")

    def test_work_in_a_thread(self) -> None:
        """Signals arrive in the main thread alone: in another there is nothing to wait for."""
        found: list[bool] = []

        def work() -> None:
            with staging.work_folder() as folder:
                found.append(folder.is_dir())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]

    @pytest.mark.parametrize("folder", [True, False])
    def test_a_lock_that_cannot_be_had(
        self, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_args: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", broken)
        with pytest.raises(StorageError, match="No locks available"):
            staging._begun(tmp_path / "target", folder=folder)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_new_may_be_taken_for_abandoned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By another writer, before it is locked: it is made again."""
        lock, removed = fcntl.flock, []

        def late(descriptor: int, operation: int) -> None:
            lock(descriptor, operation)
            if not removed:
                removed.extend(tmp_path.iterdir())
                removed[0].unlink()

        monkeypatch.setattr(fcntl, "flock", late)
        staging.write_whole(tmp_path / "file", b"x")
        assert (tmp_path / "file").read_bytes() == b"x"
        assert len(removed) == 1

    def test_a_new_folder_may_be_gone_before_it_is_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened, removed = os.open, []

        def late(path: Any, *how: Any, **more: Any) -> int:
            if not removed:
                removed.append(path)
                path.rmdir()
            return opened(path, *how, **more)

        monkeypatch.setattr(os, "open", late)
        folder, descriptor = staging._begun(tmp_path / "target", folder=True)
        os.close(descriptor)
        assert removed == [path for path in removed if path != folder]
        assert folder.is_dir()

    @pytest.mark.parametrize("platform", ["linux", "darwin"])
    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES, None])
    def test_folders_that_cannot_be_exchanged(
        self, code: int | None, platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Library:
            """A C library whose call fails, or that has none of the name."""

            def __getattr__(self, name: str) -> Any:
                if code is None:
                    raise AttributeError(name)
                return lambda *_args: staging.ctypes.set_errno(code) or -1

        monkeypatch.setattr("sys.platform", platform)
        monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_args, **_more: Library())
        said = "Permission denied" if code == errno.EACCES else "cannot replace a folder"
        with pytest.raises((StorageError, OSError), match=said):
            staging._exchange(tmp_path / "one", tmp_path / "other")


class TestTrust:
    @pytest.fixture(autouse=True)
    def _own_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))

    def test_what_is_trusted_is_written_once(self, tmp_path: Path) -> None:
        for _ in range(2):
            trust.add("0" * 64)
        assert (tmp_path / "cache" / "trusted").read_text() == f"{'0' * 64}\n"

    def test_a_record_that_is_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "cache" / "trusted").mkdir(parents=True)
        assert not trust.is_trusted("0" * 64)
        with pytest.raises(StorageError, match="cannot be written"):
            trust.add("0" * 64)
