"""A diagnosis names the weights of an artifact that are not the model's, in every format."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file

from fuseport.exporter.verify.localise.other_weights import sentence

Bundle = tuple[Path, str]
Values = dict[str, torch.Tensor]


def onnx_file(small: Path, made: Path, change: Callable[[Values], None]) -> Path:
    """The bundle's file with its weights changed, of any dtype and shape."""
    model = onnx.load(small / "forward.onnx")
    found = {t.name: t for t in model.graph.initializer}
    values = {n: torch.tensor(numpy_helper.to_array(t)) for n, t in found.items()}
    change(values)
    for name, value in values.items():
        if value.dtype == torch.bfloat16:
            raw = value.view(torch.int16).numpy().tobytes()
            found[name].CopyFrom(
                onnx.helper.make_tensor(name, TensorProto.BFLOAT16, value.shape, raw, raw=True)
            )
        else:
            found[name].CopyFrom(numpy_helper.from_array(value.numpy(), name))
    onnx.save(model, made / "changed.onnx")
    return made / "changed.onnx"


def script_file(small: Path, made: Path, change: Callable[[Values], None]) -> Path:
    script = torch.jit.load(small / "forward.pt")
    values = dict(script.state_dict())
    change(values)
    for name, parameter in script.named_parameters():
        parameter.data = values[name]
    script.save(made / "changed.pt")
    return made / "changed.pt"


FILES = {"onnxruntime": onnx_file, "torchscript": script_file}


@pytest.mark.parametrize("runtime", FILES)
def test_those_that_differ_are_named_with_the_worst_of_them(
    runtime: str, small_bundle: Bundle, tmp_path: Path
) -> None:
    small = small_bundle[0]

    def said(change: Callable[[Values], None]) -> str | None:
        file = FILES[runtime](small, tmp_path, change)
        return sentence(runtime, file, small / "weights.safetensors")

    def one(values: Values) -> None:
        values["other.bias"] = values["other.bias"].clone()
        values["other.bias"][1] += 0.25

    def two(values: Values) -> None:
        one(values)
        values["one.weight"] = values["one.weight"] * 1.5

    def none(values: Values) -> None:
        return

    def wide(values: Values) -> None:
        values["one.weight"] = values["one.weight"].double()

    def rounded(values: Values) -> None:
        values["one.weight"] = values["one.weight"].bfloat16()

    def shape(values: Values) -> None:
        two(values)
        values["one.bias"] = values["one.bias"][:2].clone()

    def lost(values: Values) -> None:
        two(values)
        values["other.weight"] = values["other.weight"] * float("nan")

    weight = load_file(small / "weights.safetensors")["one.weight"]
    assert said(none) is None
    assert said(wide) is None
    assert said(one) == "its weight other.bias is not the model's: it is off by up to 0.25"
    off = float((weight * 0.5).abs().max())
    name = "one.weight" if off > 0.25 else "other.bias"
    assert said(two) == (
        f"2 of its 4 weights are not the model's: {name} is off by up to {max(off, 0.25):.3g}"
    )
    off = float((weight.bfloat16().double() - weight.double()).abs().max())
    assert 0.0 < off < 0.01
    assert (
        said(rounded) == f"its weight one.weight is not the model's: it is off by up to {off:.3g}"
    )
    ending = "is of another shape, or not finite"
    assert said(shape) == f"3 of its 4 weights are not the model's: one.bias {ending}"
    assert said(lost) == f"3 of its 4 weights are not the model's: other.weight {ending}"


def test_weights_under_other_names_are_no_difference(small_bundle: Bundle, tmp_path: Path) -> None:
    """A tool may fold or rename what it likes: what it computes is compared, not how."""
    small = small_bundle[0]
    model = onnx.load(small / "forward.onnx")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "folded"))
    onnx.save(model, tmp_path / "more.onnx")
    assert sentence("onnxruntime", tmp_path / "more.onnx", small / "weights.safetensors") is None
