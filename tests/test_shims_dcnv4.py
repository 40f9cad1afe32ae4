"""DCNv4's stand-in: what it computes, whom it gives way to, and models of its layers."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified
from fuseport.tests.test_shims_deform import dcnv3_slowly
from fuseport.tests.test_shims_values import close, rand

with shims.installed("DCNv4"):
    import DCNv4
    from DCNv4 import ext

LAUNCH = (8, 0)


def in_order(offset: Tensor, mask: Tensor, groups: int, behind: int) -> Tensor:
    """What one linear layer gives: offsets and mask of each group, and numbers behind all."""
    parts = torch.cat([offset.unflatten(-1, (groups, -1)), mask.unflatten(-1, (groups, -1))], -1)
    return torch.cat([parts.flatten(-2), rand(*parts.shape[:3], behind)], -1)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    ("stride", "scale", "remove_center"), [(1, 1.0, 0), (2, 0.5, 1), (1, 2.0, 1)]
)
def test_its_convolution(stride: int, scale: float, remove_center: int, softmax: bool) -> None:
    rows, columns, taps = (6 - 1) // stride + 1, (8 - 1) // stride + 1, 2 * (9 - remove_center)
    x, offset, mask = (
        rand(2, 6, 8, 6),
        rand(2, rows, columns, 2 * taps),
        rand(2, rows, columns, taps),
    )
    both = in_order(offset, mask, 2, 3).requires_grad_()
    x.requires_grad_()
    parts = both[..., : 3 * taps].unflatten(-1, (2, -1))
    moves, weights = parts[..., :taps], parts[..., taps:]
    weights = weights.softmax(-1) if softmax else weights
    right = dcnv3_slowly(x, moves.flatten(3), weights.flatten(3), stride, scale, remove_center)
    dout = rand(*right.shape)
    gradients = torch.autograd.grad(right, (x, both), dout)
    sizes = (3, 3, stride, stride, 2, 2, 2, 2, 2, 3, scale, 256)
    with torch.no_grad():
        close(ext.dcnv4_forward(x, both, *sizes, remove_center, *LAUNCH, softmax), right)
        found = ext.dcnv4_backward(x, both, *sizes, dout, remove_center, *LAUNCH, softmax)
    for gradient, expected in zip(found, gradients, strict=True):
        close(gradient, expected)


def test_offsets_of_other_sizes_than_the_outputs_are_refused() -> None:
    sizes = (3, 3, 2, 2, 1, 1, 1, 1, 1, 16, 1.0, 256, 0)
    with pytest.raises(ValueError, match="of 6 × 8 outputs where there are 3 × 4"):
        ext.dcnv4_forward(rand(1, 6, 8, 16), rand(1, 6, 8, 32), *sizes, *LAUNCH, False)


def attended_slowly(value: Tensor, shapes: list[list[int]], given: Tensor) -> Tensor:
    """By `grid_sample`, level by level: two heads, three points in each of two maps."""
    places, logits = given.split([2 * 6, 6], -1)
    weights = logits.softmax(-1).unflatten(-1, (2, 3))
    places = places.unflatten(-1, (2, 3, 2)) * 2 - 1
    out, start = [], 0
    for level, (height, width) in enumerate(shapes):
        part = value[:, start : start + height * width].permute(0, 2, 3, 1)  # (b, G, c, pixels)
        start += height * width
        maps = part.flatten(0, 1).unflatten(-1, (height, width))
        grid = places[:, :, :, level].transpose(1, 2).flatten(0, 1)  # (b·G, q, K, 2)
        sampled = F.grid_sample(maps, grid, align_corners=False)  # (b·G, c, q, K)
        scale = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)
        out.append((sampled * scale[:, None]).sum(-1).unflatten(0, (value.shape[0], -1)))
    return sum(out).permute(0, 3, 1, 2).flatten(2)


def test_its_attention() -> None:
    shapes = [[4, 5], [2, 3]]
    value = rand(2, 26, 2, 4).requires_grad_()
    given = rand(2, 7, 2, 18)
    given[..., :12] = given[..., :12].sigmoid() * 1.2 - 0.1
    given.requires_grad_()
    right = attended_slowly(value, shapes, given)
    dout = rand(*right.shape)
    gradients = torch.autograd.grad(right, (value, given), dout)
    levels = torch.tensor(shapes), torch.tensor([0, 20])
    with torch.no_grad():
        close(ext.flash_deform_attn_forward(value, *levels, given, 64, 3, *LAUNCH), right)
        found = ext.flash_deform_attn_backward(value, *levels, given, dout, 64, 3, *LAUNCH)
    for gradient, expected in zip(found, gradients, strict=True):
        close(gradient, expected)


def test_layers_have_the_parameters_of_checkpoints() -> None:
    layer = DCNv4.DCNv4(32, group=2, dw_kernel_size=3, center_feature_scale=True, output_bias=False)
    names = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert names == {
        "offset_mask_dw.weight": (32, 1, 3, 3),
        "offset_mask_dw.bias": (32,),
        "offset_mask.weight": (56, 32),
        "offset_mask.bias": (56,),
        "value_proj.weight": (32, 32),
        "value_proj.bias": (32,),
        "output_proj.weight": (32, 32),
        "center_feature_scale_proj_weight": (2, 32),
        "center_feature_scale_proj_bias": (2,),
    }
    assert set(DCNv4.DCNv4(16, group=1, without_pointwise=True).state_dict()) == {
        "offset_mask.weight",
        "offset_mask.bias",
    }
    attention = DCNv4.FlashDeformAttn(32, 2, 4, 3)
    assert attention.sampling_offsets.bias.view(4, 2, 3, 2)[1, 0].tolist() == [
        pytest.approx([0, n], abs=1e-6) for n in (1, 2, 3)
    ]
    assert {name.rpartition(".")[0] for name in attention.state_dict()} == {
        "sampling_offsets",
        "attention_weights",
        "value_proj",
        "output_proj",
    }


def test_a_fresh_layer_is_a_mean_of_nothing_but_its_bias() -> None:
    """Its masks are zero at first, and no softmax is taken of them."""
    layer = DCNv4.DCNv4(16, group=1)
    out = layer(torch.randn(1, 12, 16), (3, 4))
    torch.testing.assert_close(out, torch.zeros(1, 12, 16))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A repository's copy of the package's Python code, as theirs is: without what is compiled."""
    folder = tmp_path / "DCNv4"
    folder.mkdir()
    (folder / "__init__.py").write_text("from DCNv4 import ext\nTHEIRS = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "DCNv4"]:
        del sys.modules[name]


def test_a_copy_without_its_extension_is_not_there(copied: Path) -> None:
    with shims.installed("auto") as used:
        assert not hasattr(importlib.import_module("DCNv4"), "THEIRS")
    assert used == ["DCNv4"]


def test_a_copy_with_its_extension_is_there(copied: Path) -> None:
    (copied / "ext.py").write_text("")
    with shims.installed("auto") as used:
        assert importlib.import_module("DCNv4").THEIRS
    assert used == []


MODEL = """
import torch
from torch import nn
from DCNv4 import DCNv4, FlashDeformAttn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.dcn = DCNv4(32, group=2, dw_kernel_size=3, center_feature_scale=True)
        self.attention = FlashDeformAttn(32, n_levels=1, n_heads=2, n_points=2)

    def forward(self, x):
        y = self.stem(x)
        b, c, h, w = y.shape
        rows = y.flatten(2).mT
        rows = rows + self.dcn(rows, (h, w))
        shapes = torch.tensor([[h, w]])
        places = rows[:, :5, None, :2].sigmoid()
        return self.attention(rows[:, :5], places, rows, shapes, torch.zeros(1, dtype=torch.long))
"""


def test_a_model_of_both_is_exported(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    torch.manual_seed(0)
    with shims.installed("DCNv4"):
        namespace: dict[str, type[nn.Module]] = {}
        exec(MODEL, namespace)  # our own text
    weights = {name: torch.randn_like(p) / 6 for name, p in namespace["Net"]().state_dict().items()}
    torch.save(weights, tmp_path / "w.pth")
    saved = (tmp_path / "w.pth", f"{tmp_path / 'net.py'}:Net")
    verified(tmp_path / "b", saved, ["x:[batch,3,h,w]"], ["DCNv4"])
