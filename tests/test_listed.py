"""Masks of padding by lengths, whose largest is a size, and lists of lengths."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, lengths):
        FORMULA
        places = torch.arange(longest)
        kept = places.expand(count, longest) < ends.unsqueeze(1)
        return self.inner(x).cumsum(1).masked_fill(~kept.unsqueeze(2), 0.0)
"""
LISTED = "many = lengths.long().tolist(); count = int(len(many)); "
# What is made of lengths: how many there are, the longest, and they as a tensor.
FORMULAS = {
    "item": "count, longest, ends = len(lengths), lengths.max().item(), lengths",
    "int": "count, longest, ends = len(lengths), int(torch.max(lengths)), lengths",
    "new": LISTED + "longest, ends = int(max(many)), x.long().new(many)",
    "tensor": LISTED + "longest, ends = x.shape[1], torch.tensor(many, dtype=torch.int32)",
    "like": LISTED + "longest, ends = x.shape[1], lengths.new_tensor(many[:])",
    "one by one": LISTED + "longest, ends = x.shape[1], torch.tensor([2 * n - 1 for n in many])",
    "an item": LISTED + "longest, ends = many[0], torch.as_tensor(data=many)",
    "least and sum": LISTED + "longest = x.shape[1]; ends = lengths + 0 * (min(many) + sum(many))",
    "an instance": LISTED + "assert isinstance(many, list); longest, ends = x.size(1), lengths",
}
INPUTS = ("x:[batch,length,4]", "lengths:int64[batch]>=1<=length")


@pytest.mark.parametrize("formula", FORMULAS)
def test_programs_are_of_any_number_of_them(
    formula: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(
        CODE.replace("FORMULA", FORMULAS[formula]), inner=nn.Linear(4, 4)
    )
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=INPUTS, format=("onnx", "torchscript")
    )
    report = api.verify(bundle.folder, model=model, runtime=("onnxruntime", "torchscript"))
    assert report.exit_code(strict=True) == 0, report.failures()
    sizes = bundle.manifest["programs"]["forward"]["inputs"][1]["dims"]
    assert sizes == ["batch"]


@pytest.mark.parametrize("loop", ["sorted(many)", "[n + x.shape[1] for n in many]", "list(many)"])
def test_what_goes_over_them_is_refused(
    loop: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = LISTED + f"longest, ends = x.shape[1], torch.tensor({loop})"
    checkpoint, model = saved_with(CODE.replace("FORMULA", code), inner=nn.Linear(4, 4))
    with pytest.raises(ExportFailed, match="items of a list of dynamic length are gone over"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs=INPUTS, format="torchscript")
