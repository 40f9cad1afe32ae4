"""A bundle is whole or not there, and what changed in it since is seen."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuseport.exporter.bundle import MANIFEST, SCHEMA, check_target, open_bundle, staged, staging
from fuseport.exporter.errors import CorruptInput, Missing, StorageError, UsageError


def write(target: Path, content: str = "one", *, force: bool = False) -> None:
    with staged(target, force=force) as (folder, manifest):
        manifest["name"] = content
        (folder / "weights.safetensors").write_text(content)
        (folder / "samples").mkdir()
        (folder / "samples" / "case0.safetensors").write_text(content * 1000)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    target = tmp_path / "b"
    write(target)
    return target


def test_what_was_written_opens(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.manifest["name"] == "one"
    assert opened.manifest["schema"] == SCHEMA
    assert "schema" not in repr(opened)
    assert set(opened.manifest["files"]) == {"weights.safetensors", "samples/case0.safetensors"}
    assert opened.weights.read_text() == "one"
    assert [p.name for p in bundle.parent.iterdir()] == ["b"]


def test_files_have_the_mode_of_new_files(tmp_path: Path) -> None:
    with staged(tmp_path / "b", force=False) as (folder, _):
        (folder / "private").write_text("x")
        (folder / "private").chmod(0o600)
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "b" / "private").stat().st_mode == (tmp_path / "plain").stat().st_mode


SAMPLE = "samples/case0.safetensors"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda b: (b / SAMPLE).write_text("two"), SAMPLE),
    "one byte": (lambda b: (b / SAMPLE).write_text("one" * 999 + "onf"), SAMPLE),
    "missing": (lambda b: (b / SAMPLE).unlink(), SAMPLE),
    "added": (lambda b: (b / "more.onnx").write_text("x"), "more.onnx"),
    "added below": (lambda b: (b / "samples" / "more").write_text("x"), "samples/more"),
    "a link to itself": (
        lambda b: ((b / SAMPLE).rename(b.parent / "x"), (b / SAMPLE).symlink_to(b.parent / "x")),
        SAMPLE,
    ),
    "a link to a folder": (lambda b: (b / "other").symlink_to(b.parent), "other"),
    "a pipe": (lambda b: ((b / SAMPLE).unlink(), os.mkfifo(b / SAMPLE)), SAMPLE),
    "a folder": (lambda b: ((b / SAMPLE).unlink(), (b / SAMPLE).mkdir()), SAMPLE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_corrupt_and_names_the_file(change: str, bundle: Path) -> None:
    """Fault 23."""
    make, name = CHANGES[change]
    make(bundle)
    with pytest.raises(CorruptInput, match=re.escape(str(bundle / name))):
        open_bundle(bundle)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema": 1}', "\xff", "[" * 100_000]
)
def test_a_manifest_that_is_none_is_corrupt(text: str, bundle: Path) -> None:
    (bundle / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CorruptInput, match="manifest"):
        open_bundle(bundle)


def test_an_edited_manifest_is_corrupt(bundle: Path) -> None:
    """Fault 23."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["name"] = "two"
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptInput, match="manifest"):
        open_bundle(bundle)


def test_a_manifest_laid_out_otherwise_is_the_same(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    assert open_bundle(bundle).manifest["name"] == "one"


def test_another_schema_is_missing_a_version(bundle: Path) -> None:
    """Fault 23."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**manifest, "schema": "fuseport.bundle/9"}))
    with pytest.raises(Missing, match=r"fuseport\.bundle/9"):
        open_bundle(bundle)


def test_no_folder_is_usage_and_no_manifest_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_bundle(tmp_path / "absent")
    with pytest.raises(CorruptInput, match="no bundle"):
        open_bundle(tmp_path)


class TestTarget:
    def test_a_file_a_link_and_another_folder_are_refused(self, tmp_path: Path) -> None:
        """Fault 19. Fault 20."""
        (tmp_path / "file").write_text("x")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "mine").write_text("x")
        (tmp_path / "link").symlink_to(tmp_path / "folder")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        for name in ("file", "folder", "link", "dangling"):
            with pytest.raises(UsageError, match=name):
                write(tmp_path / name, force=True)
        assert (tmp_path / "folder" / "mine").read_text() == "x"
        assert not (tmp_path / "nowhere").exists()

    def test_an_empty_folder_is_filled(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        write(tmp_path / "b")
        assert open_bundle(tmp_path / "b").manifest["name"] == "one"

    def test_a_bundle_is_replaced_by_force_alone(self, bundle: Path) -> None:
        with pytest.raises(UsageError, match="--force"):
            write(bundle, "two")
        assert open_bundle(bundle).manifest["name"] == "one"
        write(bundle, "two", force=True)
        assert open_bundle(bundle).manifest["name"] == "two"
        assert [p.name for p in bundle.parent.iterdir()] == ["b"]

    def test_parents_are_made(self, tmp_path: Path) -> None:
        write(tmp_path / "x" / "y" / "b[1]")
        assert open_bundle(tmp_path / "x" / "y" / "b[1]").manifest["name"] == "one"

    def test_a_parent_that_is_a_file_is_a_storage_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError):
            write(tmp_path / "file" / "b")

    def test_a_new_target_is_fine(self, tmp_path: Path) -> None:
        check_target(tmp_path / "b", force=False)


def test_an_error_in_the_body_leaves_the_old_bundle(bundle: Path) -> None:
    def export() -> None:
        with staged(bundle, force=True) as (folder, _):
            (folder / "x").write_text("x")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        export()
    assert open_bundle(bundle).manifest["name"] == "one"
    assert [p.name for p in bundle.parent.iterdir()] == ["b"]


def test_a_bundle_that_came_in_between_is_not_replaced_without_force(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--force"), staged(tmp_path / "b", force=False):
        write(tmp_path / "b", "quicker")
    assert open_bundle(tmp_path / "b").manifest["name"] == "quicker"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


# Replaces a bundle again and again, and can be killed at any moment.
WRITER = """
import sys
from pathlib import Path
from fuseport.exporter.bundle import staged
target, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for i in range(int(sys.argv[3])):
    with staged(target, force=True) as (folder, manifest):
        manifest["name"] = name
        for part in range(5):
            (folder / f"part{part}").write_text(f"{name}{i}" * 2000)
"""


@contextmanager
def writer(target: Path, name: str, times: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", WRITER, str(target), name, str(times)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03, 0.07, 0.15])
def test_kill_at_any_moment_leaves_a_whole_bundle(delay: float, bundle: Path) -> None:
    """Fault 19, by the clock; test_faults_of_writing.py has it by the system call."""
    with writer(bundle, "two", 100_000) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert open_bundle(bundle).manifest["name"] in ("one", "two")
    write(bundle, "three", force=True)
    assert open_bundle(bundle).manifest["name"] == "three"
    assert [p.name for p in bundle.parent.iterdir()] == ["b"]


def test_what_another_process_is_writing_is_left_alone(bundle: Path) -> None:
    with staged(bundle, force=True) as (folder, manifest):
        (folder / "x").write_text("mine")
        command = [sys.executable, "-c", WRITER, str(bundle), "other", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert open_bundle(bundle).manifest["name"] == "other"
        assert (folder / "x").read_text() == "mine"
        manifest["name"] = "mine"
    assert open_bundle(bundle).manifest["name"] == "mine"


def test_a_new_folder_outlives_exports_that_clear_up(tmp_path: Path) -> None:
    """Between its making and its lock, another export may take a folder for an abandoned one."""
    done = threading.Event()

    def clear_up() -> None:
        while not done.is_set():
            staging._remove_abandoned(tmp_path, "b.staging-")

    threads = [threading.Thread(target=clear_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            folder, lock = staging._new(tmp_path, "b.staging-", folder=True)
            assert folder.is_dir()
            os.rmdir(folder)
            os.close(lock)
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("writes", ["text", "safetensors"])
def test_a_full_disk_is_a_storage_error_and_leaves_nothing(writes: str, small_disk: Path) -> None:
    """Fault 20."""
    import torch
    from safetensors.torch import save_file

    write(small_disk / "b")
    before = sorted(p.relative_to(small_disk) for p in small_disk.rglob("*"))

    def export() -> None:
        with staged(small_disk / "b", force=True) as (folder, _):
            if writes == "text":
                (folder / "x").write_bytes(bytes(10**6))
            else:
                save_file({"x": torch.zeros(10**6)}, folder / "x")

    with pytest.raises(StorageError, match="cannot be written"):
        export()
    assert sorted(p.relative_to(small_disk) for p in small_disk.rglob("*")) == before
    assert open_bundle(small_disk / "b").manifest["name"] == "one"


def test_a_mount_point_and_a_disk_to_read_only_are_storage_errors(small_disk: Path) -> None:
    """Fault 20: neither can be replaced by a rename, and nothing is left where it was tried."""
    with pytest.raises(StorageError, match="cannot be written"):
        write(small_disk)
    assert sorted(path.name for path in small_disk.parent.iterdir()) == ["small"]
    write(small_disk / "b")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system"):
        write(small_disk / "b", "two", force=True)
    assert [path.name for path in small_disk.iterdir()] == ["b"]
    assert open_bundle(small_disk / "b").manifest["name"] == "one"
