"""Models that import natten are exported, and verified."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs

with shims.installed(shims.SHIMS):
    import natten

IMAGES = """
import torch
from torch import nn
from natten import NeighborhoodAttention2D
from natten.functional import natten2dav, natten2dqkrpb


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = NeighborhoodAttention2D(4, num_heads=2, kernel_size=3, dilation=2)
        self.qkv = nn.Linear(4, 12)
        self.rpb = nn.Parameter(torch.zeros(2, 5, 5))

    def forward(self, x):
        x = x + self.attn(x)
        q, k, v = self.qkv(x).reshape(*x.shape[:3], 3, 2, 2).permute(3, 0, 4, 1, 2, 5)
        weights = natten2dqkrpb(q, k, self.rpb, 3, 1).softmax(-1)
        return natten2dav(weights, v, 3, 1).permute(0, 2, 3, 1, 4).reshape(x.shape)
"""
SEQUENCES = """
from torch import nn
from natten.functional import na1d


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x, context):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).unbind(2)
        _, keys, values = self.qkv(context).unflatten(-1, (3, 2, 2)).unbind(2)
        y = na1d(q, k, v, kernel_size=4, stride=2, dilation=2, is_causal=True)
        beside = {"additional_keys": keys, "additional_values": values}
        z, sums = na1d(q, k, v, kernel_size=5, **beside, return_lse=True)
        return y.flatten(2), z.flatten(2), sums
"""
PARTS = """
from torch import nn
from natten.functional import natten1dav, natten1dqkrpb


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        weights = natten1dqkrpb(q, k, None, 5, 2).softmax(-1)
        y = natten1dav(weights, v, 5, 2).permute(0, 2, 1, 3).contiguous()
        return y.view(*x.shape)
"""


@pytest.mark.parametrize("of", ["images", "sequences", "parts"])
def test_a_model_that_imports_natten_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]], of: str
) -> None:
    """At any height and width, or length, from that on which windows fit into."""
    torch.manual_seed(0)
    if of == "images":
        attn = natten.NeighborhoodAttention2D(4, 2, 3, dilation=2, bias=True)
        checkpoint, model = saved_with(IMAGES, attn=attn, qkv=nn.Linear(4, 12))
        state = torch.load(checkpoint)
        torch.save(state | {"rpb": torch.randn(2, 5, 5)}, checkpoint)
        inputs, least = ["x:[2,height,width,4]"], {"height": 6, "width": 6}
    elif of == "parts":
        checkpoint, model = saved_with(PARTS, qkv=nn.Linear(4, 12))
        inputs, least = ["x:[2,length,4]"], {"length": 10}
    else:
        checkpoint, model = saved_with(SEQUENCES, qkv=nn.Linear(4, 12))
        inputs, least = ["x:[2,length,4]", "context:[2,more,4]"], {"length": 8}
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs=parse_inputs(inputs),
        format=["torchscript", "onnx"],
    )
    assert bundle.manifest["architecture"]["config"]["shims"] == ["natten"]
    conditions = bundle.manifest["programs"]["forward"]["conditions"]
    assert sorted(conditions) == [f"{name} >= {size}" for name, size in least.items()]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    ways = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    for runtime in ("eager", "torchscript", "onnxruntime"):
        assert {(runtime, "forward"), (runtime, "gradient")} <= ways
