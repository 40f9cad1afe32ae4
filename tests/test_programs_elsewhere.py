"""Programs from elsewhere: what is in them is looked at before they are loaded, trusted or not.

Fault 12; that they are not loaded without the user's word is in test_admission.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.bundle import MANIFEST, hash_file, libraries, machine, trust
from fuseport.exporter.errors import CorruptInput, UnsafeInput
from fuseport.exporter.inspect import packages

Members = dict[str, bytes]


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


class Scale(torch.nn.Module):
    """With a weight to replace."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, content: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def saved(value: object, folder: Path) -> bytes:
    """What `torch.save` makes of it."""
    torch.save(value, folder / "value.pt")
    return (folder / "value.pt").read_bytes()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As torch writes it, example inputs included: tensors alone."""
    file = tmp_path_factory.mktemp("exported") / "model.pt2"
    torch.export.save(torch.export.export(Scale(), (torch.ones(3),)), file)
    return file


def unpickled_weight(content: Members, bad: bytes) -> None:
    """A weight whose entry says that it is a pickle."""
    (name,) = [name for name in content if name.endswith("_weights_config.json")]
    lists = json.loads(content[name])
    lists["config"]["w"]["use_pickle"] = True
    content[name] = json.dumps(lists).encode()
    content[f"{name.rpartition('/')[0]}/{lists['config']['w']['path_name']}"] = bad


def unpickled_inputs(content: Members, bad: bytes) -> None:
    (name,) = [name for name in content if "/sample_inputs/" in name]
    content[name] = bad


def unpickled_constant(content: Members, bad: bytes) -> None:
    (name,) = [name for name in content if name.endswith("_constants_config.json")]
    lists = json.loads(content[name])
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
    lists["config"]["c"] = {**entry, "tensor_meta": None}
    content[name] = json.dumps(lists).encode()


def stray_object(content: Members, bad: bytes) -> None:
    root = next(iter(content)).partition("/")[0]
    content[f"{root}/data/constants/custom_obj_0"] = bad


def older_weights(content: Members, bad: bytes) -> None:
    root = next(iter(content)).partition("/")[0]
    content[f"{root}/data/weights/model.pt"] = bad


class TestPickles:
    """Fault 12."""

    @pytest.mark.parametrize(
        "plant",
        [unpickled_weight, unpickled_inputs, unpickled_constant, stray_object, older_weights],
    )
    def test_a_pickle_in_an_exported_program_is_refused(
        self, exported: Path, tmp_path: Path, plant: Callable[[Members, bytes], None]
    ) -> None:
        content, canary = members(exported), tmp_path / "canary"
        plant(content, saved((Touch(canary), {}), tmp_path))
        bad = written(tmp_path / "forward.pt2", content)
        with pytest.raises(UnsafeInput, match=r"forward\.pt2: .*: .*loading it could run anything"):
            packages.check(bad)
        assert not canary.exists()

    def test_without_that_it_would_have_run(self, exported: Path, tmp_path: Path) -> None:
        content, canary = members(exported), tmp_path / "canary"
        unpickled_weight(content, saved((Touch(canary), {}), tmp_path))
        bad = written(tmp_path / "forward.pt2", content)
        with pytest.raises(Exception):  # noqa: B017, PT011  # of several types, by version
            torch.export.load(bad)
        assert canary.exists()

    def test_trust_is_no_leave_to_unpickle(
        self, exported: Path, small_bundle: tuple[Path, str], tmp_path: Path
    ) -> None:
        content, canary = members(exported), tmp_path / "canary"
        unpickled_weight(content, saved((Touch(canary), {}), tmp_path))
        bad = written(tmp_path / "forward.pt2", content)
        bundle, _ = small_bundle
        with pytest.raises(UnsafeInput, match="it has a pickle for w"):
            api.verify(bundle, artifact=bad, trust_native=[hash_file(bad)])
        assert not canary.exists()

    def test_tensors_alone_are_taken(self, exported: Path) -> None:
        packages.check(exported)

    def test_example_inputs_of_tensors_are_taken(self, exported: Path, tmp_path: Path) -> None:
        content = members(exported)
        unpickled_inputs(content, saved(((torch.ones(3),), {}), tmp_path))
        packages.check(written(tmp_path / "forward.pt2", content))


class TestArchives:
    """Fault 12."""

    @pytest.mark.parametrize(
        "name",
        ["../x.so", "data/../../x.so", "/x.so", "..\\x.so", "model/data/aotinductor/../../x.so"],
    )
    def test_a_member_that_leads_out_is_refused(
        self, exported: Path, tmp_path: Path, name: str
    ) -> None:
        bad = written(tmp_path / "forward.aoti.pt2", {**members(exported), name: b"x"})
        with pytest.raises(UnsafeInput, match="a member that leads out of the archive"):
            packages.check(bad)

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_a_member_twice_is_corrupt(self, exported: Path, tmp_path: Path) -> None:
        bad = Path(shutil.copy(exported, tmp_path / "forward.pt2"))
        with zipfile.ZipFile(bad, "a") as archive:
            archive.writestr(archive.namelist()[0], b"other")
        with pytest.raises(CorruptInput, match="a member occurs twice"):
            packages.check(bad)

    @pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
    def test_a_part_of_one_is_corrupt(self, exported: Path, tmp_path: Path, part: float) -> None:
        content = exported.read_bytes()
        bad = tmp_path / "forward.pt2"
        bad.write_bytes(content[: int(part * len(content))])
        with pytest.raises(CorruptInput, match=r"forward\.pt2: .*damaged"):
            packages.check(bad)


def test_a_library_of_ops_from_elsewhere_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 12: this machine's own takes its place."""
    bundle = tmp_path / "bundle"
    (bundle / "ops").mkdir(parents=True)
    library = bundle / "ops/swiglu.so"
    library.write_bytes(b"from elsewhere")
    manifest = {
        "artifacts": [{"file": "forward.pt"}],
        "libraries": [{"op": "swiglu", "file": "ops/swiglu.so", **machine.here()}],
        "ops": ["fuseport::swiglu"],
    }
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(trust, "is_trusted", lambda sha256: False)
    (found,) = libraries.find(bundle / "forward.pt")
    assert found != library
    assert hash_file(found) != hash_file(library)
    sha256 = hash_file(bundle / MANIFEST)
    monkeypatch.setattr(trust, "is_trusted", lambda given: given == sha256)
    assert libraries.find(bundle / "forward.pt") == [library]
