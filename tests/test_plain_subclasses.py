"""Model code that makes a subclass of `torch.Tensor` of its tensors, as VSSD's `tTensor`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import plain_subclasses

Saved = Callable[..., tuple[Path, str]]

NET = """
import torch
from fuseport.ops import selective_scan

class tTensor(torch.Tensor):
    @property
    def shape(self):
        return tuple(int(s) for s in super().shape)

class Doubled(tTensor):
    def double(self):
        return self * 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        u = KIND(self.a(x).mT)
        A = -tTensor(self.a.weight).exp()
        B = tTensor(x.mT.reshape(u.shape[0], 1, 4, -1))
        y = selective_scan(u, torch.sigmoid(u), A, B, B)
        return tTensor(y) * y.shape[1]
"""


def saved(saved_with: Saved, kind: str) -> tuple[Path, str]:
    torch.manual_seed(0)
    return saved_with(NET.replace("KIND", kind), a=torch.nn.Linear(4, 4))


def test_a_subclass_that_only_reads_sizes_is_exported_and_verified(
    tmp_path: Path, saved_with: Saved
) -> None:
    checkpoint, model = saved(saved_with, "tTensor")
    inputs = parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "onnxruntime", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert len({row.case for row in report.results if row.runtime == "onnxruntime"}) > 3
    # One that is compared is the model itself, whose tensors are of the subclass.
    assert {row.verdict for row in report.results if row.runtime == "eager"} == {"pass"}


def test_a_subclass_that_computes_otherwise_is_named(tmp_path: Path, saved_with: Saved) -> None:
    checkpoint, model = saved(saved_with, "Doubled")
    inputs = parse_inputs(["x:[batch,length,4]"])
    with pytest.raises(ExportFailed) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    line = NET[: NET.index("u = KIND")].count("\n") + 1
    (said,) = raised.value.details
    assert f"net.py:{line}: " in said
    assert "subclass Doubled" in said
    assert "use the tensor itself" in said
    assert "mend that first" not in said


class Seen(torch.Tensor):
    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(super().shape)


def test_without_a_mode_a_subclass_is_as_ever() -> None:
    plain_subclasses.allow()
    plain_subclasses.allow()
    x = torch.randn(2, 3, requires_grad=True)
    y = Seen(x)
    assert type(y) is Seen
    assert type(y.shape) is tuple
    assert type(Seen(2, 3)) is Seen

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode():
        y = Seen(x)
        assert type(y) is torch.Tensor
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.ones(2, 3))
