"""`fuseport inspect` says what a thing is and why, and runs nothing of it."""

import importlib
import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from fuseport.cli import main
from fuseport.exporter import api, models
from fuseport.exporter import inspect as inspection
from fuseport.exporter.child import Limits
from fuseport.exporter.errors import (
    CorruptInput,
    FuseportError,
    RuntimeCrash,
    UnsafeInput,
    UsageError,
)
from fuseport.exporter.inspect import SCHEMA, checkpoint, inspect, isolated
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.run import quick_starts

FIXTURES = Path(__file__).parent.parent / "fixtures"
NET = """
import torch
from torch import nn
from fuseport.ops.selective_scan import selective_scan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.A = nn.Parameter(-torch.rand(4, 2))

    def forward(self, x):
        u, delta = self.first(x).mT.chunk(2, dim=1)
        B, C = u[:, :2], u[:, 2:]
        return selective_scan(u, delta, self.A, B, C, delta_softplus=True)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model of the user's own with one scan. Read-only: copy it to change it."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "net.py").write_text(NET)
    tensors = {"first.weight": torch.randn(8, 4), "first.bias": torch.randn(8)}
    torch.save(tensors | {"A": -torch.rand(4, 2)}, folder / "net.pt")
    return api.export(
        folder / "net.pt",
        folder / "bundle",
        model=f"{folder / 'net.py'}:Net",
        inputs=parse_inputs(["x:[batch,length,4]"]),
    ).folder


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def read(path: Path) -> dict[str, Any]:
    """What the reader of an artifact's format finds, in this process: a child takes seconds."""
    form = inspection._artifact(path)
    assert form is not None
    reader = {"aot_inductor": "exported_program"}.get(form, form)
    module = importlib.import_module(f"fuseport.exporter.inspect.{reader}")
    return {"format": form, **module.found(str(path))}


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "layout", "architecture", "sign", "scans"),
    [
        ("lightning/mamba-kjv.ckpt", "lightning", "mamba", "A_log", 3),
        ("state_spaces", "state_spaces", "mamba", "A_log", 2),
        ("huggingface", "huggingface", "huggingface", "config:model_type=mamba", 2),
    ],
)
def test_a_checkpoint(path: str, layout: str, architecture: str, sign: str, scans: int) -> None:
    found = inspect(FIXTURES / path, tensors=True).found
    assert found["layout"]["name"] == layout
    assert found["layout"]["why"]
    assert found["architecture"]["name"] == architecture
    assert any(sign in why for why in found["architecture"]["why"])
    needed = {op["op"]: op for op in found["ops"]["needed"]}
    assert sum(needed["selective_scan"]["operators"].values()) == scans
    # transformers' own convolution becomes the op, too.
    assert needed.keys() - {"selective_scan"} == (
        {"causal_conv1d"} if layout == "huggingface" else set()
    )
    for op in needed.values():
        assert (op["registered"], op["onnx"], op["differentiable"]) == (True, True, True)
    sizes = found["parameters"]
    assert sizes["elements"] == sum(sizes["modules"].values())
    assert sizes["bytes"] == 4 * sizes["elements"]
    assert sizes["tensors"] == len(found["tensors"])


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_every_architecture_says_what_it_is_told_by(name: str) -> None:
    assert models.signs(name)


@pytest.mark.parametrize("state", ["here", "absent", "too old"])
def test_the_next_command_is_one_that_can_succeed(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "ask", lambda *_, **__: {"operators": {}})  # a child, seconds
    if state == "absent":
        monkeypatch.setitem(sys.modules, "transformers", None)
    elif state == "too old":
        monkeypatch.setattr(metadata, "version", lambda name: "4.57.1")
    export = f"fuseport export {FIXTURES / 'huggingface'} -o bundle/"
    install = [] if state == "here" else ["pip install 'fuseport[huggingface]'"]
    told = inspect(FIXTURES / "huggingface")
    assert told.found["next"] == [*install, export]
    printed = [line.split("  ")[-1] for line in told.lines()]
    assert printed[-len(told.found["next"]) :] == told.found["next"]
    assert inspect(FIXTURES / "state_spaces").found["next"][0].startswith("fuseport export")


def test_candidates_are_listed_where_export_wants_a_choice(tmp_path: Path) -> None:
    state = torch.nn.Linear(3, 4).state_dict()
    torch.save({"model": state, "model_ema": state, "extra": {"w": torch.ones(5)}}, tmp_path / "w")
    found = inspect(tmp_path / "w").found
    names = [candidate["name"] for candidate in found["weights"]["candidates"]]
    assert names == ["model", "model_ema", "extra"]
    assert "--weights model_ema" in found["weights"]["must_choose"]
    chosen = inspect(tmp_path / "w", weights="extra").found
    assert chosen["parameters"]["elements"] == 5
    with pytest.raises(UsageError):
        inspect(tmp_path / "w", weights="other")


def test_an_unknown_architecture_is_told_what_is_nearest(tmp_path: Path) -> None:
    torch.save({"backbone.layers.0.mixer.A_log": torch.ones(4)}, tmp_path / "w")
    found = inspect(tmp_path / "w").found
    assert found["architecture"]["name"] is None
    reason = found["architecture"]["reason"]
    assert "nearest is" in reason
    assert "backbone.layers.0.mixer.A_log" in reason
    assert all(name in reason for name in models.ARCHITECTURES)
    assert found["ops"]["needed"] == []


@pytest.mark.parametrize("form", ["safetensors", "zip"])
def test_a_large_file_is_not_read(tmp_path: Path, form: str) -> None:
    """Of safetensors the header: the file is a hole of 4 GB. Of a zip, the checksums too."""
    if form == "safetensors":
        entry = {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}
        header = json.dumps({"weight": entry}).encode()
        with (tmp_path / "w").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 4 * 10**9)
        expected = 10**9
    else:
        torch.save({"weight": torch.zeros(10**7)}, tmp_path / "w")
        expected = 10**7
    begin = time.process_time()
    found = inspect(tmp_path / "w").found
    assert found["parameters"]["elements"] == expected
    assert time.process_time() - begin < 2, "seconds of the processor, of this process"


def test_infinities_leave_the_json_valid(tmp_path: Path) -> None:
    content = {"pytorch-lightning_version": "2", "state_dict": {"w": torch.ones(1)}}
    torch.save(content | {"hyper_parameters": {"best": float("-inf")}}, tmp_path / "w")
    result = command(tmp_path / "w", "--json")
    value = json.loads(result.stdout, parse_constant=pytest.fail)
    assert value["config"] == {"best": "-inf"}


def test_hyperparameters_are_shown_where_no_file_has_them(tmp_path: Path) -> None:
    content = {"pytorch-lightning_version": "2", "state_dict": {"w": torch.ones(1)}}
    given = {"width": 24, "layer": {"kind": "gated"}, **{f"n{i}": i for i in range(12)}}
    torch.save(content | {"hyper_parameters": given}, tmp_path / "w")
    lines = command(tmp_path / "w").stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  config "))
    assert lines[first].split(maxsplit=1)[1] == "width: 24"
    assert lines[first + 1].strip() == "layer: {'kind': 'gated'}"
    assert lines[first + 12].strip() == "… and 2 more"
    of_a_folder = command(FIXTURES / "huggingface").stdout
    assert "hidden_size" not in of_a_folder


# --- bundles -------------------------------------------------------------------------------------


def test_a_bundle(bundle: Path) -> None:
    found = inspect(bundle).found
    assert found["differences"] == []
    assert found["trusted"]
    assert [i["name"] for i in found["programs"]["gradient"]["inputs"]] == ["x", "cotangent_output"]
    formats = {(a["program"], a["format"]) for a in found["artifacts"]}
    assert ("gradient", "onnx") in formats
    assert all(a["bytes"] == (bundle / a["file"]).stat().st_size for a in found["artifacts"])
    assert [op["op"] for op in found["ops"]] == ["selective_scan"]
    assert found["unknown_ops"] == []


def test_a_bundle_that_was_changed(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    with (tmp_path / "b" / "forward.onnx").open("ab") as file:
        file.write(b"x")
    (tmp_path / "b" / "more.txt").write_text("x")
    (tmp_path / "b" / "gradient.pt").unlink()
    result = command(tmp_path / "b", "--json")
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert {d["file"]: d["state"] for d in found["differences"]} == {
        "forward.onnx": "changed since the export",
        "gradient.pt": "is missing from the bundle",
        "more.txt": "is not part of the bundle",
    }


def test_an_edited_manifest(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CorruptInput, match="changed since the export"):
        inspect(tmp_path / "b")


# --- artifacts -----------------------------------------------------------------------------------

SUFFIXES = {"onnx": "onnx", "pt": "torchscript", "pt2": "exported_program"}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("program", ["forward", "gradient"])
def test_an_artifact(bundle: Path, tmp_path: Path, suffix: str, program: str) -> None:
    shutil.copy(bundle / f"{program}.{suffix}", tmp_path / "anything")  # content counts, not names
    found = read(tmp_path / "anything")
    assert found["format"] == SUFFIXES[suffix]
    names = ["x"] if program == "forward" else ["x", "cotangent_output"]
    assert [value["name"] for value in found["inputs"]] == names
    assert found["outputs"]
    scans = [c for c in found["ops"]["custom"] if "selective_scan" in c["op"]]
    assert len(scans) == (1 if program == "forward" else 2)
    assert all(c["known"] and c["count"] == 1 for c in found["ops"]["custom"])
    standard = found["ops"]["counts"]["ai.onnx" if suffix == "onnx" else "aten"]
    assert sum(standard.values()) > 5
    assert found["weights"]["dtypes"]["float32"]["elements"] == 4 * 8 + 8 + 4 * 2


def onnx_model(*, op: str = "Add", domain: str = "", location: str | None = None) -> Any:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    if location is not None:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    node = helper.make_node(op, ["x", "w"], ["y"], domain=domain)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain or "ai.onnx.ml", 1)]
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=opsets)


@pytest.mark.parametrize(
    ("op", "domain", "known", "said"),
    [
        ("Mystery", "example", False, "no function body"),
        ("NoSuchOp", "", False, "not in opset 20"),
        ("Gelu", "com.microsoft", True, "ONNX Runtime"),
    ],
)
def test_custom_operators_of_onnx(
    tmp_path: Path, op: str, domain: str, known: bool, said: str
) -> None:
    onnx.save(onnx_model(op=op, domain=domain), tmp_path / "m.onnx")
    (custom,) = read(tmp_path / "m.onnx")["ops"]["custom"]
    assert (custom["known"], said in custom["as"]) == (known, True)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("../secret", "leads out"),
        ("/etc/passwd", "leads out"),
        ("absent.bin", "missing"),
        ("short.bin", "too short"),
        ("link.bin", "a link that leads out"),
        ("there.bin", "there"),
    ],
)
def test_external_data_is_looked_at_and_not_read(tmp_path: Path, location: str, said: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(bytes(8))
    (folder / "link.bin").symlink_to(tmp_path / "outside")
    (folder / "short.bin").write_bytes(bytes(4))
    (folder / "there.bin").write_bytes(bytes(8))
    # Serialised by hand: onnx.save would want to write the data.
    (folder / "m.onnx").write_bytes(onnx_model(location=location).SerializeToString())
    (place,) = read(folder / "m.onnx")["external"]
    assert said in place["state"]
    assert place["tensors"] == 1


def test_operators_that_nobody_registered(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_torchscript(source, "ops.mystery.op(x)")
    (custom,) = read(source)["ops"]["custom"]
    assert (custom["op"], custom["known"]) == ("mystery::op", False)


def write_torchscript(path: Path, expression: str) -> None:
    """An archive of a module whose forward returns `expression`, as torch lays it out."""
    code = (
        "class Net(Module):\n  __parameters__ = []\n  __buffers__ = []\n"
        f"  def forward(self: __torch__.Net,\n    x: Tensor) -> Tensor:\n    return {expression}\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02c__torch__\nNet\nq\x00)\x81}b.")
        archive.writestr("m/code/__torch__.py", code)
        archive.writestr("m/constants.pkl", b"\x80\x02).")
        archive.writestr("m/version", "3\n")


# --- nothing runs, and what is damaged is told ---------------------------------------------------


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_nothing_that_is_inspected_runs(bundle: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = pickle.dumps(Canary(canary), protocol=2)
    for name in ("forward.pt", "forward.pt2"):
        with zipfile.ZipFile(bundle / name) as archive:
            members = {m: archive.read(m) for m in archive.namelist()}
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member, data in members.items():
                hostile = member.endswith((".pkl", "model.pt")) and "debug" not in member
                archive.writestr(member, code if hostile else data)
        inspect(tmp_path / name)
    (tmp_path / "w.ckpt").write_bytes(code)
    with pytest.raises(UnsafeInput):
        inspect(tmp_path / "w.ckpt")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["forward.onnx", "forward.pt", "forward.pt2"])
@pytest.mark.parametrize("fault", ["half", "garbled"])
def test_damaged_artifacts(bundle: Path, tmp_path: Path, name: str, fault: str) -> None:
    data, path = (bundle / name).read_bytes(), tmp_path / name
    if fault == "half":
        path.write_bytes(data[: len(data) // 2])
    elif name.endswith("onnx"):
        path.write_bytes(data[:1] + b"\xff" * 20 + data[2:])  # a varint without end
    else:
        with zipfile.ZipFile(bundle / name) as old, zipfile.ZipFile(path, "w") as new:
            for member in old.namelist():
                garbled = member.endswith((".py", "models/model.json"))
                new.writestr(member, old.read(member)[::-1] if garbled else old.read(member))
    # Without its directory, an archive may as well have been a checkpoint.
    look = inspect if fault == "half" and not name.endswith("onnx") else read
    with pytest.raises(FuseportError) as caught:
        look(path)
    assert type(caught.value) is CorruptInput
    assert str(caught.value).isprintable()
    assert name in str(caught.value)


def test_a_reader_that_does_not_end(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_LIMITS", Limits(seconds=0.1))
    stopped = pytest.raises(RuntimeCrash, match=r"forward\.onnx: reading it failed: stopped after")
    with quick_starts(wanted=False), stopped:  # a forked one is done before anybody looks
        inspect(bundle / "forward.onnx")


def test_a_member_that_leads_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("f/archive_format", "pt2")
        archive.writestr("f/data/aotinductor/model/../../../../evil.so", b"")
    with pytest.raises(UnsafeInput, match=r"evil\.so"):
        read(tmp_path / "m.pt2")


def test_machine_code_is_listed_and_not_trusted(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.aoti.pt2", "w") as archive:
        archive.writestr("f/archive_format", "pt2")
        archive.writestr("f/data/aotinductor/model/a.wrapper.so", b"\x7fELF")
        archive.writestr("f/data/aotinductor/model/a.wrapper_metadata.json", '{"AOTI": "cpu"}')
    found = inspect(tmp_path / "m.aoti.pt2").found
    assert (found["format"], found["trusted"]) == ("aot_inductor", False)
    assert found["code"] == {"data/aotinductor/model/a.wrapper.so": 4}
    assert found["metadata"] == {"AOTI": "cpu"}


# --- the command ---------------------------------------------------------------------------------


def test_the_json_has_a_version(bundle: Path) -> None:
    for path in (FIXTURES / "state_spaces", bundle, bundle / "forward.onnx"):
        value = json.loads(command(path, "--json").stdout)
        assert value["schema"] == SCHEMA
        assert value["kind"] in ("checkpoint", "bundle", "artifact")


def test_what_is_printed_is_text(bundle: Path, tmp_path: Path) -> None:
    for path in (FIXTURES / "lightning" / "mamba-kjv.ckpt", bundle, bundle / "gradient.pt"):
        result = command(path, "--tensors") if "ckpt" in path.name else command(path)
        assert result.exit_code == 0
        assert "selective_scan" in result.stdout
    torch.save({"evil\x1b[2J": torch.ones(1)}, tmp_path / "w")
    assert "\x1b" not in command(tmp_path / "w", "--tensors").stdout
    assert "\x1b" not in command(tmp_path / "w", "--tensors", "--json").stdout


def test_exit_codes(tmp_path: Path) -> None:
    assert command(tmp_path / "absent").exit_code == 2
    (tmp_path / "w").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    assert command(tmp_path / "w").exit_code == 3
    (tmp_path / "w").write_bytes(b"\x08\x01 nothing that is known")
    assert command(tmp_path / "w").exit_code == 4
    os.mkfifo(tmp_path / "fifo")
    assert command(tmp_path / "fifo").exit_code == 2
