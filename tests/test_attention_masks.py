"""Attention under masks that hide some tokens, and under those that hide all of a sample's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models.fresh import without_fast_path
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.as_files import session_of

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask):
        hidden = mask == 0
        y = self.encoder(x, src_key_padding_mask=hidden)
        return y, self.attention(x, y, y, key_padding_mask=hidden, need_weights=False)[0]
"""


def test_layers_are_compared_as_they_are_trained(saved_net: SavedNet, tmp_path: Path) -> None:
    """Without autograd torch has them go another way, where what is padded comes out as zeros."""
    _, checkpoint, code = saved_net(LAYERS)
    inputs = parse_inputs(["x:[batch,length,8]", "mask:int64[batch,length]<2"])
    options = {"model": code, "inputs": inputs, "format": "onnx", "programs": "forward"}
    before = torch.backends.mha.get_fastpath_enabled()
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {"masks of zeros", "export"} <= {row.case for row in report.results}
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_the_fast_path_is_back_afterwards() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, hidden = torch.rand(2, 3, 8), torch.tensor([[False, True, True], [False, False, True]])
    encoder = nn.TransformerEncoder(layer, 1).eval()
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=hidden)
        with without_fast_path():
            slow = encoder(x, src_key_padding_mask=hidden)
        again = encoder(x, src_key_padding_mask=hidden)
    assert torch.equal(fast, again)
    assert not fast[hidden].any()
    assert slow[hidden].all()
    torch.testing.assert_close(fast[~hidden], slow[~hidden])


class Attention(nn.Module):
    """By a mask of booleans or numbers, of a head each, and beside one that has none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        allowed = (mask > 0)[:, None, None, :]
        numbers = torch.zeros_like(x[:, None, None, :, 0]).masked_fill(~allowed, -torch.inf)
        if self.kind == "booleans":
            return F.scaled_dot_product_attention(q, q, q, allowed), q
        if self.kind == "numbers":
            return F.scaled_dot_product_attention(q, q.sin(), q, numbers, scale=0.3), q
        if self.kind == "both, and none":
            one = F.scaled_dot_product_attention(q, q, q, numbers.transpose(2, 3) + q[..., :1])
            return one, F.scaled_dot_product_attention(one, q, q), numbers.exp()
        rows = x * numbers[:, 0, 0, :, None].exp()
        return F.scaled_dot_product_attention(rows, rows, rows, numbers[:, 0]), rows


@pytest.mark.parametrize("kind", ["booleans", "numbers", "both, and none", "of rank 3"])
def test_onnx_runtime_gives_zeros_where_all_is_hidden(kind: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(541)
    x = torch.randn(3, 5, 8, generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0] * 5, [1] * 5])
    specs = [
        TensorSpec("x", "float32", ("batch", "length", 8)),
        TensorSpec("mask", "int64", ("batch", "length"), 2),
    ]
    net = Attention(kind)
    program = capture_forward(net, {"x": x, "mask": mask}, specs)
    session = session_of(program, tmp_path, "onnxruntime")
    for taken in (slice(None), slice(1, 2), slice(1, 3)):
        found = session.run({"x": x[taken], "mask": mask[taken]})
        for value, wanted in zip(found.values(), net(x[taken], mask[taken]), strict=True):
            assert wanted.isfinite().any()
            torch.testing.assert_close(torch.as_tensor(value), wanted, equal_nan=True)
