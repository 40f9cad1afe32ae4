"""Artifacts from elsewhere: what they may name, and what is loaded only on the user's word.

Faults 10 to 13.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fuseport.exporter import api
from fuseport.exporter.bundle import hash_file, open_bundle, trust
from fuseport.exporter.errors import CorruptInput, Missing, UnsafeInput, UsageError
from fuseport.exporter.inspect.admissible import found
from fuseport.exporter.inspect.isolated import ask

SECRET = b"secret" * 4


def model(
    nodes: list[onnx.NodeProto] | None = None,
    initializers: list[onnx.TensorProto] | None = None,
    opset: int = 20,
    domain: str = "",
) -> onnx.ModelProto:
    """x + w, unless told otherwise."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    graph = helper.make_graph(
        nodes or [helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], initializers or []
    )
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def weight(**entries: str) -> onnx.TensorProto:
    """Four floats that lie in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def admissible(folder: Path, made: onnx.ModelProto) -> None:
    file = folder / "x.onnx"
    file.write_bytes(made.SerializeToString())
    found(str(file))  # what the child of `ask` calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One for the file, with a secret outside it and data inside."""
    (tmp_path / "secret").write_bytes(SECRET)
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "data").write_bytes(bytes(64))
    (inside / "short").write_bytes(bytes(15))
    (inside / "link").symlink_to(tmp_path / "secret")
    os.link(tmp_path / "secret", inside / "hard")
    os.mkfifo(inside / "fifo")
    (inside / "zero").symlink_to("/dev/zero")
    return inside


def scanned(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The node, inside a subgraph."""
    inner = helper.make_graph(
        [node], "inner", [], [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n"])]
    )
    condition = helper.make_node("Constant", [], ["c"], value_int=1)
    cast = helper.make_node("Cast", ["c"], ["b"], to=TensorProto.BOOL)
    chosen = helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=inner)
    return [condition, cast, chosen]


class TestExternalData:
    """Fault 10."""

    @pytest.mark.parametrize(
        "entries",
        [
            {"location": "../secret"},
            {"location": "a/../../secret"},
            {"location": "/etc/passwd"},
            {"location": "C:\\secret"},
            {"location": "..\\secret"},
            {"location": "link"},
            {"location": "hard"},
            {"location": "fifo"},
            {"location": "zero"},
            {"location": "*/_ORT_MEM_ADDR_/*", "offset": "94000000000000", "length": "16"},
        ],
        ids=lambda entries: entries["location"],
    )
    def test_another_place_is_refused_as_unsafe(
        self, folder: Path, entries: dict[str, str]
    ) -> None:
        with pytest.raises(UnsafeInput, match=r"x\.onnx: w: "):
            admissible(folder, model(initializers=[weight(**entries)]))

    @pytest.mark.parametrize(
        "entries",
        [
            {},
            {"location": "absent"},
            {"location": "data\0"},
            {"location": "short"},
            {"location": "data", "length": "65"},
            {"location": "data", "offset": "60"},
            {"location": "data", "offset": "-1"},
            {"location": "data", "offset": "1e1"},
            {"location": "data", "offset": str(2**64)},
            {"location": "data", "key": "value"},
        ],
        ids=str,
    )
    def test_what_is_not_there_is_corrupt(self, folder: Path, entries: dict[str, str]) -> None:
        with pytest.raises(CorruptInput, match=r"x\.onnx: w: "):
            admissible(folder, model(initializers=[weight(**entries)]))

    @pytest.mark.parametrize("where", ["attribute", "subgraph", "function"])
    def test_tensors_anywhere_are_looked_at(self, folder: Path, where: str) -> None:
        tensor = weight(location="../secret")
        node = helper.make_node("Constant", [], ["a"], value=tensor)
        if where == "attribute":
            made = model([node, helper.make_node("Add", ["x", "a"], ["y"])])
        elif where == "subgraph":
            made = model(scanned(node))
        else:
            made = model([helper.make_node("F", [], ["y"], domain="own")], domain="own")
            opsets = [helper.make_opsetid("", 20)]
            made.functions.append(helper.make_function("own", "F", [], ["a"], [node], opsets))
        with pytest.raises(UnsafeInput, match="secret"):
            admissible(folder, made)

    def test_data_beside_the_file_is_taken(self, folder: Path) -> None:
        admissible(folder, model(initializers=[weight(location="data", offset="16", length="16")]))

    def test_links_of_a_huggingface_cache_are_followed(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/123"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "cafe").write_bytes(bytes(16))
        (snapshot / "data").symlink_to("../../blobs/cafe")
        admissible(snapshot, model(initializers=[weight(location="data")]))


class TestGraph:
    """Fault 11."""

    def test_an_opset_of_the_future(self, tmp_path: Path) -> None:
        with pytest.raises(Missing, match=r"opset 999.*pip install"):
            admissible(tmp_path, model(opset=999))

    @pytest.mark.parametrize(("domain", "op"), [("mine", "Fused"), ("", "Nothing")])
    @pytest.mark.parametrize("inside", [False, True])
    def test_an_operator_that_nobody_has_is_named(
        self, tmp_path: Path, domain: str, op: str, inside: bool
    ) -> None:
        node = helper.make_node(op, ["x"], ["a" if inside else "y"], domain=domain)
        nodes = scanned(node) if inside else [node]
        with pytest.raises(Missing, match=f"{domain or 'ai.onnx'}::{op}"):
            admissible(tmp_path, model(nodes, domain=domain))

    def test_a_cycle(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Abs", ["a"], ["b"])]
        nodes.append(helper.make_node("Abs", ["a"], ["y"]))
        with pytest.raises(CorruptInput, match="a cycle of nodes: A"):
            admissible(tmp_path, model(nodes))

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_value_made_twice(self, tmp_path: Path, inside: bool) -> None:
        again = helper.make_node("Abs", ["x"], ["a"])
        nodes = [
            again,
            *(scanned(again) if inside else [again]),
            helper.make_node("Abs", ["a"], []),
        ]
        with pytest.raises(CorruptInput, match="the value a is made twice"):
            admissible(tmp_path, model(nodes))

    def test_a_value_made_nowhere(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptInput, match="the value w is made nowhere"):
            admissible(tmp_path, model())

    @pytest.mark.parametrize("content", [b"", b"\x08", b"\x00garbage", os.urandom(500)])
    def test_other_bytes(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.onnx").write_bytes(content)
        with pytest.raises(CorruptInput, match=r"x\.onnx: no ONNX model"):
            found(str(tmp_path / "x.onnx"))

    def test_own_artifacts_are_admissible(self, lightning_bundle: Path) -> None:
        for name in ("forward.onnx", "gradient.onnx"):
            found(str(lightning_bundle / name))

    def test_the_reader_is_a_child(self, folder: Path) -> None:
        made = model(initializers=[weight(location="../secret")])
        (folder / "x.onnx").write_bytes(made.SerializeToString())
        with pytest.raises(UnsafeInput, match="secret"):
            ask("admissible", path=str(folder / "x.onnx"))


def test_terabytes_in_a_graph_cost_one_row(lightning_bundle: Path, tmp_path: Path) -> None:
    """The file is valid: what it asks for is not to be had."""
    made = onnx.load(lightning_bundle / "forward.onnx")
    output = made.graph.output[0].name
    for node in made.graph.node:
        node.output[:] = ["inner" if name == output else name for name in node.output]
    size = helper.make_tensor("size", TensorProto.INT64, [1], [2**42])
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
    made.graph.node.extend(
        [
            helper.make_node("Constant", [], ["size"], value=size),
            helper.make_node("ConstantOfShape", ["size"], ["huge"], value=zero),
            helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
            helper.make_node("Add", ["inner", "sum"], [output]),
        ]
    )
    onnx.save(made, tmp_path / "x.onnx")
    report = api.verify(lightning_bundle, runtime=["onnxruntime"], artifact=tmp_path / "x.onnx")
    assert report.exit_code() == 6
    assert {row.verdict for row in report.results if row.runtime == "onnxruntime"} == {"error"}


class TestPrograms:
    """Faults 12 and 13."""

    @pytest.fixture
    def foreign(self, lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A bundle that another user exported, whole as it is."""
        monkeypatch.setattr(trust, "is_trusted", lambda sha256: False)
        return lightning_bundle

    @pytest.mark.parametrize("runtime", ["torchscript", "exported_program", "libtorch"])
    @pytest.mark.parametrize("command", [api.verify, api.self_test])
    def test_a_named_runtime_refuses_what_another_user_exported(
        self, foreign: Path, runtime: str, command: Callable[..., object]
    ) -> None:
        sha256, told = open_bundle(foreign).sha256, list[str]()
        with pytest.raises(UnsafeInput, match=rf"is a program.*--trust-native {sha256}"):
            command(foreign, runtime=[runtime], progress=told.append)
        assert told == []  # before any truth is computed

    @pytest.mark.parametrize("command", [api.verify, api.self_test])
    def test_a_named_runtime_wants_a_file_of_its_format(
        self, lightning_bundle: Path, command: Callable[..., object]
    ) -> None:
        told = list[str]()
        with pytest.raises(UsageError, match=r"nothing in it is for .* runs onnx_native"):
            command(lightning_bundle, runtime=["onnxruntime+native"], progress=told.append)
        assert told == []

    @pytest.mark.parametrize("name", ["forward.pt", "forward.pt2"])
    def test_a_program_made_elsewhere_is_refused(
        self, foreign: Path, name: str, tmp_path: Path
    ) -> None:
        shutil.copy(foreign / name, tmp_path / name)
        with pytest.raises(UnsafeInput, match=hash_file(tmp_path / name)):
            api.verify(foreign, artifact=tmp_path / name)

    def test_a_copy_of_an_own_program_is_as_good(
        self, lightning_bundle: Path, tmp_path: Path
    ) -> None:
        for file in (lightning_bundle / "forward.pt2", tmp_path / "copy.pt2"):
            if not file.exists():
                shutil.copy(lightning_bundle / "forward.pt2", file)
            report = api.verify(lightning_bundle, runtime=["exported_program"], artifact=file)
            assert report.exit_code() == 0, report.failures()

    def test_a_program_that_writes_does_not(self, lightning_bundle: Path, tmp_path: Path) -> None:
        """Trusted in error: it may still write nothing outside its folder."""
        victim = tmp_path / "victim"
        victim.write_bytes(SECRET)

        class Writes(torch.nn.Module):
            def __init__(self, file: str) -> None:
                super().__init__()
                self.file = file

            def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
                written = torch.from_file(self.file, shared=True, size=4).fill_(1.0)
                return input_ids + written.sum()

        file = tmp_path / "forward.pt"
        torch.jit.script(Writes(str(victim))).save(str(file))
        report = api.verify(
            lightning_bundle,
            runtime=["torchscript", "libtorch"],
            artifact=file,
            trust_native=[hash_file(file)],
        )
        assert victim.read_bytes() == SECRET
        reasons = [str(row.reason) for row in report.results if row.verdict == "error"]
        assert report.exit_code() == 6
        assert reasons
        assert all("Permission denied" in reason for reason in reasons)
