"""Sequences and lengths one by one, of any batch, and what follows packed sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.instead._losses import LOSSES

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import math
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence, unpack_sequence,
    unpad_sequence,
)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.GRU(3, 4, bidirectional=True, batch_first=True)
        self.b = nn.GRU(8, 3, batch_first=True)

    def packed(self, x, lengths):
        return self.a(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[0]

    def forward(self, x, lengths):
"""
UNPACKED = """
        found = unpack_sequence(self.packed(x, lengths))
        again = pack_sequence([*found], enforce_sorted=False)
        y = pad_sequence(found, batch_first=True, padding_value=-1.5)
        return y, torch.cat(found).square(), self.b(again)[1], again.batch_sizes
"""
UNPADDED = """
        found = unpad_sequence(x, lengths, batch_first=True)
        assert all(each.dim() == 2 and each.shape[1] == 3 for each in found)
        y, h = self.a(pack_sequence(found, enforce_sorted=False))
        return pad_packed_sequence(y, batch_first=True)[0], h
"""
HALVES = """
        halves = [math.ceil(int(n) / 2) for n in lengths]
        y = pad_packed_sequence(self.packed(x, halves), batch_first=True)[0]
        h = torch.full((1, len(halves), 3), 0.5)
        return self.b(y, h), torch.tensor(halves, device=x.device) - max(n.item() for n in lengths)
"""
LISTED = """
        whole = pad_packed_sequence(self.packed(x, [x.shape[1]] * x.shape[0]))[0]
        some = self.packed(x, [(n + 1) // 2 for n in lengths.tolist()])
        return whole, pad_packed_sequence(some, total_length=x.shape[1])[0]
"""
SEVERAL = """
        y, n = pad_packed_sequence(self.packed(x, lengths), batch_first=True)
        y = pack_padded_sequence(y.view(*y.shape[:2], 2, -1).sum(2)[..., :3], n, True, False)
        y, n = pad_packed_sequence(self.a(y)[0], batch_first=True)
        return self.b(y)
"""
OF_LOSSES = """
        y = self.packed(x, lengths)
        classes = pack_padded_sequence(x.argmax(-1), lengths, True, enforce_sorted=False).data
        weight = x.new_tensor([0.5, 2.0, 1.0, 3.0, 0.1, 1.5, 0.7, 1.2])
        z = self.b(y)[0].data
        return (
            F.cross_entropy(y.data, classes), F.cross_entropy(z, z.detach().softmax(1)),
            F.cross_entropy(y.data, classes, weight, ignore_index=1, label_smoothing=0.1),
            F.nll_loss(y.data.log_softmax(1), classes, weight, reduction="none"),
        )
"""
NETS = {
    "unpacked": UNPACKED,
    "unpadded": UNPADDED,
    "halves": HALVES,
    "listed": LISTED,
    "several layers": SEVERAL,
    "losses": OF_LOSSES,
}
INPUTS = ["x:[batch,length,3]", "lengths:int64[batch]>=1<=length"]


@pytest.mark.parametrize("name", NETS)
def test_programs_are_verified(name: str, tmp_path: Path, saved_net: SavedNet) -> None:
    _, checkpoint, model = saved_net(HEAD + NETS[name])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=INPUTS, format=("torchscript", "onnx")
    )
    report = api.verify(bundle.folder, model=model, runtime=("torchscript", "onnxruntime"))
    assert report.exit_code(strict=True) == 0, report.failures()
    assert bundle.manifest["programs"]["forward"]["inputs"][0]["dims"] == ["batch", "length", 3]


REFUSED = {
    "means": "return torch.stack([y.mean(0) for y in unpack_sequence(self.packed(x, lengths))])",
    "returned": "return unpack_sequence(self.packed(x, lengths))",
    "rows": "return torch.stack([x[i, n - 1] for i, n in enumerate(lengths.tolist())])",
    "compared": "return x * sum(2 for n in lengths if n == 3)",
    "looked for": "return x * (2 if 3 in lengths.tolist() else 1)",
    "sorted": "n = lengths.tolist(); n.sort(); return x * max(n)",
    "one more": "n = lengths.tolist(); n.append(3); return x * max(n)",
    "other orders": "return self.packed(x, [int(n) for n in lengths][::-1]).data",
    "written": "w = [int(n) for n in lengths]; lengths.clone().fill_(1)\n"
    "        return x * sum(w[:1])",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_hangs_on_one_of_them_is_refused(
    name: str, tmp_path: Path, saved_net: SavedNet
) -> None:
    _, checkpoint, model = saved_net(f"{HEAD}        {REFUSED[name]}\n")
    with pytest.raises(ExportFailed, match=r"comes out fixed at|list of dynamic length are gone"):
        api.export(checkpoint, tmp_path / "b", model=model, inputs=INPUTS, format="torchscript")


def test_of_a_batch_that_is_a_number_each_is_a_tensor(tmp_path: Path, saved_net: SavedNet) -> None:
    _, checkpoint, model = saved_net(f"{HEAD}        {REFUSED['means']}\n")
    inputs = ["x:[3,length,3]", "lengths:int64[3]>=1<=length"]
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=inputs, format="torchscript"
    )
    report = api.verify(bundle.folder, model=model, runtime="torchscript")
    assert report.exit_code(strict=True) == 0, report.failures()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (0, 4), (4,)])
def test_losses_are_those_of_torch(
    reduction: str, smoothing: float, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    probable = torch.rand(shape, dtype=torch.float64)
    classes = torch.randint(4, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    for target in (classes, probable):
        for weight in (None, torch.rand(4, dtype=torch.float64)):
            options: dict[str, Any] = {"weight": weight, "reduction": reduction}
            if target is classes:
                options["ignore_index"] = 2
            pairs = [(F.cross_entropy, {**options, "label_smoothing": smoothing})]
            if target is classes and not smoothing:
                pairs.append((F.nll_loss, options))
            for loss, given in pairs:
                wanted, found = loss(x, target, **given), LOSSES[loss](x, target, **given)
                torch.testing.assert_close(found, wanted, equal_nan=True)
                seed = torch.randn_like(wanted)
                gradients = [torch.autograd.grad(y, x, seed)[0] for y in (found, wanted)]
                torch.testing.assert_close(*gradients, equal_nan=True)
