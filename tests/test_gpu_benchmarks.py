"""Benchmarks that need a GPU, as far as they go without one: inputs, peers, what is written."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fuseport.ops.build import BuildError

FOLDER = Path(__file__).parent / "benchmarks"
NAMES = ("gpu_peers", "gpu_memory", "gpu_ops", "gpu")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """As they import each other: by their bare names."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


def test_operations_are_given_what_their_operators_take(scripts: dict[str, Any]) -> None:
    """Hardly any of it is computed: it would be gigabytes."""
    for operation in scripts["gpu_ops"].OPERATIONS:
        shape, computed = operation.make.__self__, FakeTensorMode
        if operation.op in ("nf4_linear", "matmul_nbits"):  # what is quantised is looked at
            shape, computed = replace(shape, in_features=128, out_features=2), nullcontext
        with computed():
            inputs = shape.make(torch.bfloat16, 0)
        assert tuple(inputs) == operation.operator.inputs, operation
        assert operation.operator.backward is not None
    assert any(operation.gated for operation in scripts["gpu_ops"].OPERATIONS)


def test_benches_are_given_what_their_operators_take(scripts: dict[str, Any]) -> None:
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for bench in scripts["gpu_memory"].BENCHES:
        inputs = bench.make(draw)
        operator = bench.spec.operator(bench.operator)
        assert tuple(inputs) == operator.inputs, bench
        operator.fake(*inputs.values())


def test_a_peer_is_one_that_is_there_and_no_stand_in(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = scripts["gpu_peers"].peer_module
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "there_fuseport.py").touch()
    assert isinstance(module("there_fuseport"), ModuleType)
    assert module("not_there") is None
    assert module("not_there.at.all") is None
    assert module("fuseport.exporter.shims.selective_scan_cuda") is None
    (tmp_path / "broken.py").write_text("import what_it_needs")
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        module("broken")


def test_a_peer_that_raises_in_its_backward_is_measured_forward(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = scripts["gpu_ops"]
    calls: list[str] = []

    def refuse() -> None:
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 gives wrong results\nwhere it runs here")

    def peer(inputs: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any]:
        return {"forward": lambda: calls.append("forward"), "backward": refuse}

    def timer(run: Callable[[int], Any], rounds: int) -> float:
        for i in range(rounds):
            run(i)
        return 7.0

    def row(op: str, direction: str) -> dict[str, Any]:
        found: dict[str, Any] = scripts["gpu_peers"].peer_time(
            ops._theirs, op, direction, [{}, {}], [{}, {}], timer, 3
        )
        return found

    monkeypatch.setattr(ops, "_PEERS", {"swiglu": lambda: peer, "rms_norm": lambda: None})
    assert row("swiglu", "forward") == {"peer_us": 7.0}
    assert len(calls) == 5
    refused = row("swiglu", "backward")
    said = "RuntimeError: Triton >= 3.4.0 and < 3.7.1 gives wrong results"
    assert refused == {"peer_us": None, "peer": said}
    assert row("rms_norm", "forward") == row("cross_scan", "forward") == {"peer_us": None}
    line = scripts["gpu"].line({**ROW, **refused})
    assert f": 100.0 µs, peer raises {said}, 80% of the floor by bytes" in line


ROW = {
    "op": "swiglu", "shape": "2,3", "dtype": "float32", "direction": "backward",
    "ours_us": 100.0, "peer_us": None, "floor_us": 80.0, "floor_is": "bytes",
}  # fmt: skip


@pytest.fixture
def on_a_gpu(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, as where there is a GPU that measures nothing."""
    gpu = scripts["gpu"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu.registration, "ensure", lambda spec: None)
    monkeypatch.setattr(gpu.cuda, "load", lambda spec: None)
    monkeypatch.setattr(gpu, "environment", lambda: {"versions": {"torch": "2.13"}})
    for name in ("bytes_per_second", "exponentials_per_second"):
        monkeypatch.setattr(gpu, name, lambda: 1.0)
    return gpu


@pytest.mark.parametrize("cut_off_by", [KeyboardInterrupt, RuntimeError, BuildError])
def test_what_was_measured_before_a_run_is_cut_off_is_written(
    on_a_gpu: Any,
    cut_off_by: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "cuda.json"

    def measured(*arguments: object) -> Iterator[Iterator[dict[str, Any]]]:
        yield iter([{**ROW, "direction": "forward"}, ROW])
        assert len(json.loads(file.read_text(encoding="utf-8"))["results"]) == 2
        yield iter([{**ROW, "shape": "4,5"}])
        raise cut_off_by

    monkeypatch.setattr(on_a_gpu, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(file)])
    with pytest.raises(cut_off_by):
        on_a_gpu.main()
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [row["shape"] for row in content["results"]] == ["2,3", "2,3", "4,5"]
    assert on_a_gpu.markdown(content).count("swiglu | ") == 2  # a row for both passes
    assert len(capsys.readouterr().out.splitlines()) == 3
