"""Stand-ins for extensions of deformable convolution: what they compute, and to whom they are."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.shims._psroi import psroi_pooling
from fuseport.exporter.user_code import hint
from fuseport.exporter.user_code.known_calls import advice
from fuseport.ops.correlation import correlation
from fuseport.tests.test_shims_values import close, rand

with shims.installed(("DCNv3", *shims.EXTENSIONS)):
    import DCNv3
    import deform_conv_cuda
    import deform_conv_ext
    import deform_pool_cuda
    import deform_pool_ext

    dcn_v2: Any = importlib.import_module("_ext")  # this file calls its dcn_v2_ functions

STRIDE, PADDING, DILATION = (2, 1), (1, 2), (1, 2)
OPTIONS = (*STRIDE, *PADDING, *DILATION)
ROWS_LAST = tuple(number for pair in (STRIDE, PADDING, DILATION) for number in reversed(pair))


def tensors(groups: int, offset_groups: int) -> dict[str, Tensor]:
    """Of a filter of 3×2 on 4 channels of 7×6 pixels; outputs are 4×8."""
    taps = 6 * offset_groups
    return {
        "input": rand(2, 4, 7, 6),
        "offset": rand(2, 2 * taps, 4, 8),
        "mask": rand(2, taps, 4, 8).sigmoid(),
        "weight": rand(6, 4 // groups, 3, 2),
        "bias": rand(6),
    }


def directly(
    input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """By `grid_sample`, tap by tap."""
    taps = weight.shape[2] * weight.shape[3]
    parts = input.chunk(offset.shape[1] // (2 * taps), 1)
    columns = []
    for group, part in enumerate(parts):
        for tap in range(taps):
            place = group * taps + tap
            i, j = divmod(tap, weight.shape[3])
            y = torch.arange(4)[:, None] * STRIDE[0] - PADDING[0] + i * DILATION[0]
            x = torch.arange(8) * STRIDE[1] - PADDING[1] + j * DILATION[1]
            y, x = y + offset[:, 2 * place], x + offset[:, 2 * place + 1]
            grid = torch.stack([x * 2 / 5 - 1, y * 2 / 6 - 1], -1)
            sample = F.grid_sample(part, grid, align_corners=True)
            columns.append(sample if mask is None else sample * mask[:, place, None])
    samples = torch.cat(
        [torch.stack(columns[g * taps : (g + 1) * taps], 2) for g in range(len(parts))], 1
    )
    groups = input.shape[1] // weight.shape[1]
    by_group = samples.unflatten(1, (groups, -1))
    filters = weight.flatten(2).unflatten(0, (groups, -1))
    out = torch.einsum("bgctyx,goct->bgoyx", by_group, filters).flatten(1, 2)
    return out if bias is None else out + bias[:, None, None]


def expected(given: dict[str, Tensor], dout: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs, and the gradients by name."""
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    none: dict[str, None] = {"mask": None, "bias": None}
    out = directly(**{**none, **leaves})  # type: ignore[arg-type]
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return out.detach(), dict(zip(leaves, gradients, strict=True))


MODULES = {"deform_conv_ext": deform_conv_ext, "deform_conv_cuda": deform_conv_cuda}
PLAIN = {
    "deform_conv_ext": "deform_conv_forward deform_conv_backward_input "
    "deform_conv_backward_parameters",
    "deform_conv_cuda": "deform_conv_forward_cuda deform_conv_backward_input_cuda "
    "deform_conv_backward_parameters_cuda",
}
MODULATED = {
    "deform_conv_ext": "modulated_deform_conv_forward modulated_deform_conv_backward",
    "deform_conv_cuda": "modulated_deform_conv_cuda_forward modulated_deform_conv_cuda_backward",
}


@pytest.mark.parametrize("name", MODULES)
def test_without_a_mask_results_are_written_where_the_extension_writes(name: str) -> None:
    forward, to_input, to_weight = (getattr(MODULES[name], f) for f in PLAIN[name].split())
    given = tensors(2, 2)
    x, offset, weight = given["input"], given["offset"], given["weight"]
    dout = rand(2, 6, 4, 8)
    out, gradients = expected({"input": x, "offset": offset, "weight": weight}, dout)
    written, empty = torch.full_like(out, torch.nan), x.new_empty(0)
    sizes = (2, 3, *ROWS_LAST, 2, 2)
    forward(x, weight, offset, written, empty, empty, *sizes, 2)
    close(written, out)
    dx, doffset = torch.zeros_like(x), torch.full_like(offset, torch.nan)
    to_input(x, offset, dout, dx, doffset, weight, empty, *sizes, 2)
    close(dx, gradients["input"])
    close(doffset, gradients["offset"])
    dweight = torch.ones_like(weight)  # to which the extension adds
    to_weight(x, offset, dout, dweight, empty, empty, *sizes, 0.5, 2)
    close(dweight, 1 + gradients["weight"] / 2)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_with_a_mask_too(name: str, with_bias: bool) -> None:
    forward, backward = (getattr(MODULES[name], f) for f in MODULATED[name].split())
    given = tensors(1, 2)
    if not with_bias:
        del given["bias"]
    dout = rand(2, 6, 4, 8)
    out, gradients = expected(given, dout)
    x, offset, mask, weight = (given[n] for n in ("input", "offset", "mask", "weight"))
    bias, empty = given.get("bias", x.new_empty(1)), x.new_empty(0)
    written = torch.full_like(out, torch.nan)
    sizes = (3, 2, *OPTIONS, 1, 2, with_bias)
    forward(x, weight, bias, empty, offset, mask, written, empty, *sizes)
    close(written, out)
    sums = [torch.zeros_like(t) for t in (x, weight, bias)]
    others = [torch.full_like(t, torch.nan) for t in (offset, mask)]
    backward(x, weight, bias, empty, offset, mask, empty, *sums, *others, dout, *sizes)
    found = dict(zip(("input", "weight", "bias", "offset", "mask"), [*sums, *others], strict=True))
    for kind, gradient in gradients.items():
        close(found[kind], gradient)
    assert with_bias or not found["bias"].any()


def test_that_of_dcnv2_gives_outputs_and_gradients() -> None:
    given, dout = tensors(1, 2), rand(2, 6, 4, 8)
    out, gradients = expected(given, dout)
    arguments = [given[name] for name in ("input", "weight", "bias", "offset", "mask")]
    close(dcn_v2.dcn_v2_forward(*arguments, 3, 2, *OPTIONS, 2), out)
    found = dcn_v2.dcn_v2_backward(*arguments, dout, 3, 2, *OPTIONS, 2)
    for gradient, kind in zip(found, ("input", "offset", "mask", "weight", "bias"), strict=True):
        close(gradient, gradients[kind])


def test_groups_that_are_not_those_of_the_shapes_are_refused() -> None:
    given = tensors(1, 2)
    arguments = [given[name] for name in ("input", "weight", "bias", "offset", "mask")]
    with pytest.raises(ValueError, match=r"1 offset groups .* want 12 channels of offset, not 24"):
        dcn_v2.dcn_v2_forward(*arguments, 3, 2, *OPTIONS, 1)
    x, weight, _, offset, _ = arguments
    empty = x.new_empty(0)
    with pytest.raises(ValueError, match=r"2 groups of 4 channels, .* not the 4 channels of input"):
        deform_conv_ext.deform_conv_forward(
            x, weight, offset, empty, empty, empty, 2, 3, *ROWS_LAST, 2, 2, 1
        )


REGIONS = torch.tensor(
    [[0, 2.5, 1, 9, 12], [1, 3, 3, 3, 3], [1, -4, 6, 30, 40]], dtype=torch.float64
)
SCALE, PER_SIDE, GROUP, PART, SAMPLES, STD = 0.5, 3, 2, 2, 2, 0.3


def pooled_slowly(x: Tensor, trans: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
    """Bin by bin and sample by sample."""
    height, width = x.shape[2:]
    out = x.new_zeros(len(REGIONS), channels, PER_SIDE, PER_SIDE)
    count = torch.zeros_like(out)
    for n, k, i, j in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        b, *corners = REGIONS[n].tolist()
        left, top, right, bottom = (int(c + 0.5) if c >= 0 else -int(0.5 - c) for c in corners)
        x0, y0 = left * SCALE - 0.5, top * SCALE - 0.5
        w = max((right + 1) * SCALE - 0.5 - x0, 0.1)
        h = max((bottom + 1) * SCALE - 0.5 - y0, 0.1)
        dx = dy = 0.0
        if trans is not None:
            kind = k * (trans.shape[1] // 2) // channels
            at = i * PART // PER_SIDE, j * PART // PER_SIDE
            dx, dy = (float(trans[(n, 2 * kind + d, *at)]) * STD for d in (0, 1))
        plane = x[int(b), (k * GROUP + i * GROUP // PER_SIDE) * GROUP + j * GROUP // PER_SIDE]
        total = 0.0
        for row in range(SAMPLES):
            for column in range(SAMPLES):
                px = x0 + (j + column / SAMPLES) * w / PER_SIDE + dx * w
                py = y0 + (i + row / SAMPLES) * h / PER_SIDE + dy * h
                if not (-0.5 <= px <= width - 0.5 and -0.5 <= py <= height - 0.5):
                    continue
                px, py = min(max(px, 0), width - 1), min(max(py, 0), height - 1)
                place = [px * 2 / (width - 1) - 1, py * 2 / (height - 1) - 1]
                at_place = x.new_tensor([[[place]]])
                sample = F.grid_sample(plane[None, None], at_place, align_corners=True)
                total += float(sample)
                count[n, k, i, j] += 1
        out[n, k, i, j] = total / max(float(count[n, k, i, j]), 1)
    return out, count


@pytest.mark.parametrize("moved", [True, False])
def test_pooling_of_regions(moved: bool) -> None:
    x, trans = rand(2, 16, 9, 11), rand(3, 4, PART, PART)
    options = (int(not moved), SCALE, 4, GROUP, PER_SIDE, PART, SAMPLES, STD)
    out, count = dcn_v2.dcn_v2_psroi_pooling_forward(x, REGIONS, trans, *options)
    slow = pooled_slowly(x, trans if moved else None, 4)
    close(out, slow[0])
    close(count, slow[1])
    assert count.unique().numel() > 2  # some samples are outside
    written = torch.full_like(out, torch.nan), torch.full_like(out, torch.nan)
    deform_pool_cuda.deform_psroi_pooling_cuda_forward(x, REGIONS, trans, *written, *options)
    assert torch.equal(written[0], out)
    assert torch.equal(written[1], count)


def test_gradients_of_pooling() -> None:
    x, trans = rand(2, 16, 9, 11), rand(3, 4, PART, PART)
    options = (SCALE, 4, GROUP, PER_SIDE, PART, SAMPLES, STD)

    def pooled(x: Tensor, trans: Tensor) -> Tensor:
        return psroi_pooling(x, REGIONS, trans, False, *options)[0]

    leaves = x.requires_grad_(), trans.requires_grad_()
    assert torch.autograd.gradcheck(pooled, leaves, fast_mode=True)
    out = pooled(*leaves)
    dout = torch.randn_like(out)
    dx, dtrans = torch.autograd.grad(out, leaves, dout)
    x, trans = x.detach(), trans.detach()
    given = (dout, x, REGIONS, trans, out.detach())
    found = dcn_v2.dcn_v2_psroi_pooling_backward(*given, 0, *options)
    close(found[0], dx)
    close(found[1], dtrans)
    sums = torch.zeros_like(x), torch.ones_like(trans)
    deform_pool_ext.deform_psroi_pooling_backward(*given, *sums, 0, *options)
    close(sums[0], dx)
    close(sums[1], 1 + dtrans)


Written = Callable[[dict[str, str]], None]


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writes files, by path, into a folder on the import path; what they are is forgotten."""
    before = set(sys.modules)

    def written(files: dict[str, str]) -> None:
        for name, code in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)

    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield written
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in ("their_ops", "their_dcn", "their_points", "mmcv"):
            del sys.modules[name]


def test_extensions_have_their_stand_ins_inside_any_package(theirs: Written) -> None:
    theirs(
        {
            "their_ops/__init__.py": "",
            "their_ops/dcn/__init__.py": "from . import deform_conv_ext, deform_pool_ext\n",
            "their_ops/dcn/v2.py": "from ._ext import dcn_v2_forward\n",
            "their_dcn.py": "import _ext as _backend\nforward = lambda: _backend.dcn_v2_forward\n",
        }
    )
    with shims.installed() as used:
        dcn: Any = importlib.import_module("their_ops.dcn")
        v2: Any = importlib.import_module("their_ops.dcn.v2")
        assert importlib.import_module("their_dcn")._backend is dcn_v2
    assert used == ["deform_conv_ext", "deform_pool_ext", "_ext"]
    assert dcn.deform_conv_ext is deform_conv_ext
    assert v2.dcn_v2_forward is dcn_v2.dcn_v2_forward
    assert "their_ops.dcn" in sys.modules
    assert not [name for name in sys.modules if name in ("_ext", "their_ops.dcn._ext")]


def test_an_ext_of_others_is_not_dcnv2s(theirs: Written) -> None:
    theirs(
        {
            "their_points/__init__.py": "from . import _ext\n",
            "their_ops/__init__.py": "",
            "their_ops/dcn.py": "from ._ext import dcn_v2_forward\n",
            "their_ops/_ext.py": "dcn_v2_forward = 'theirs'\n",
            "their_dcn.py": "import _ext\n",
        }
    )
    with shims.installed("auto,_ext") as used:
        with pytest.raises(ImportError, match="_ext"):
            importlib.import_module("their_points")
        with pytest.raises(ModuleNotFoundError, match="_ext"):
            importlib.import_module("their_dcn")
    assert used == []
    with shims.installed() as used:  # one that is there stays
        assert importlib.import_module("their_ops.dcn").dcn_v2_forward == "theirs"
    assert used == []


MMCV = """
import importlib
ext = importlib.import_module("mmcv._ext")
assert hasattr(ext, "nms") and hasattr(ext, "of_another_version")
"""


def test_mmcv_finds_all_that_it_asks_for_and_is_told_what_has_no_form(theirs: Written) -> None:
    theirs({"mmcv/__init__.py": "", "mmcv/ops.py": MMCV})
    with shims.installed() as used:
        ops: Any = importlib.import_module("mmcv.ops")
    assert used == ["mmcv._ext"]
    with pytest.raises(NotImplementedError, match=r"mmcv\._ext\.nms was called"):
        ops.ext.nms(torch.ones(1, 4), iou_threshold=0.5)
    with pytest.raises(AttributeError, match="__path__"):
        _ = ops.ext.__path__
    value, at = rand(1, 12, 2, 3), rand(1, 5, 2, 1, 4, 2).sigmoid()
    maps, start = torch.tensor([[3, 4]]), torch.tensor([0])
    given = [value, maps, start, at, rand(1, 5, 2, 1, 4)]
    for index in (0, 3, 4):
        given[index].requires_grad_()
    out = ops.ext.ms_deform_attn_forward(*given, im2col_step=64)
    dout, leaves = rand(1, 5, 6), [given[index] for index in (0, 3, 4)]
    gradients = torch.autograd.grad(out, leaves, dout)
    found = [torch.zeros_like(leaf) for leaf in leaves]
    with torch.no_grad():
        ops.ext.ms_deform_attn_backward(*given, dout, *found, im2col_step=64)
    for gradient, right in zip(found, gradients, strict=True):
        close(gradient, right)


ASKS = """
try:
    from . import deform_conv_ext
except ImportError:
    pass

def checked(x):
    if not x.is_cuda:
        raise NotImplementedError
    return x
"""


def test_code_beside_a_stand_in_goes_on_on_the_cpu(theirs: Written) -> None:
    theirs({"their_ops/__init__.py": "", "their_ops/dcn.py": ASKS})
    with shims.installed():
        checked: Any = importlib.import_module("their_ops.dcn").checked
        x = torch.ones(2, requires_grad=True)
        assert checked(x) is x
        assert not eval("x.is_cuda", {"x": x})  # to code that has none beside it
        x.register_hook(checked)
        x.sum().backward()  # torch's own call, in which modes of torch's are off
    with pytest.raises(NotImplementedError) as raised:
        checked(x)
    assert "is_cuda" not in vars(torch.Tensor)
    assert "dcn.py:3: deform_conv_ext is not installed; fuseport.ops.deform_conv2d" in hint(
        raised.value
    )


def test_what_is_missing_is_named_with_its_stand_in(theirs: Written) -> None:
    theirs({"their_ops/__init__.py": "from . import deform_conv_cuda\n"})
    with pytest.raises(ImportError) as raised:
        importlib.import_module("their_ops")
    assert hint(raised.value) == "; fuseport has a stand-in for deform_conv_cuda: --shim auto"
    assert "--shim auto" in advice("ModulatedDeformConvFunction")


def dcnv3_slowly(
    x: Tensor, offset: Tensor, mask: Tensor, stride: int, scale: float, remove_center: int
) -> Tensor:
    """By `grid_sample`, tap by tap: 3×3, of dilation 2 and padding 2, two groups."""
    height, width, (rows, columns) = x.shape[1], x.shape[2], offset.shape[1:3]
    taps = [(i, j) for i in (-2, 0, 2) for j in (-2, 0, 2) if (i, j) != (0, 0) or not remove_center]
    moves = offset.unflatten(-1, (2, len(taps), 2))
    out = []
    for group, part in enumerate(x.movedim(-1, 1).chunk(2, 1)):
        total = torch.zeros((), dtype=x.dtype)
        for tap, (i, j) in enumerate(taps):
            dx, dy = (moves[:, :, :, group, tap] * scale).unbind(-1)
            px = torch.arange(columns) * stride + i * scale + dx
            py = torch.arange(rows)[:, None] * stride + j * scale + dy
            grid = torch.stack([(px * 2 + 1) / width - 1, (py * 2 + 1) / height - 1], -1)
            weight = mask[..., group * len(taps) + tap]
            total = total + F.grid_sample(part, grid, align_corners=False) * weight[:, None]
        out.append(total)
    return torch.cat(out, 1).movedim(1, -1)


@pytest.mark.parametrize(
    ("stride", "scale", "remove_center"), [(1, 1.0, 0), (2, 0.5, 1), (1, 2.0, 1)]
)
def test_that_of_internimage(stride: int, scale: float, remove_center: int) -> None:
    rows, columns, taps = (6 - 1) // stride + 1, (8 - 1) // stride + 1, 2 * (9 - remove_center)
    given = rand(2, 6, 8, 6), rand(2, rows, columns, 2 * taps), rand(2, rows, columns, taps)
    leaves = [t.requires_grad_() for t in given]
    right = dcnv3_slowly(*given, stride, scale, remove_center)
    dout = rand(*right.shape)
    gradients = torch.autograd.grad(right, leaves, dout)
    sizes = (3, 3, stride, stride, 2, 2, 2, 2, 2, 3, scale)
    removed = [remove_center] if remove_center else []  # version 1.0 takes none
    with torch.no_grad():
        close(DCNv3.dcnv3_forward(*given, *sizes, 256, *removed), right)
        found = DCNv3.dcnv3_backward(*given, *sizes, dout, 256, *removed)
    for gradient, expected_gradient in zip(found, gradients, strict=True):
        close(gradient, expected_gradient)


def test_mmcv_correlates_by_its_own_names(theirs: Written) -> None:
    theirs({"mmcv/__init__.py": "", "mmcv/ops.py": MMCV})
    with shims.installed():
        ext = importlib.import_module("mmcv.ops").ext
    images = [rand(2, 3, 6, 7).requires_grad_() for _ in range(2)]
    names = (
        "kH kW patchH patchW padH padW dilationH dilationW dilation_patchH dilation_patchW dH dW"
    )
    options = dict(zip(names.split(), (3, 1, 5, 3, 1, 0, 1, 1, 2, 1, 1, 2), strict=True))
    expected = correlation(*images, (3, 1), (5, 3), (1, 2), (1, 0), 1, (2, 1))
    output = torch.empty_like(expected)
    ext.correlation_forward(*images, output, **options)
    torch.testing.assert_close(output, expected)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, images, dout)
    found = [torch.ones_like(image) for image in images]  # they are added to
    with torch.no_grad():
        ext.correlation_backward(dout, *images, *found, **options)
    torch.testing.assert_close(found, [gradient + 1 for gradient in gradients])
