"""Models with kernels of their own in Triton, exported and verified; their own backward, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from fuseport.cli import main
from fuseport.exporter import api, shims
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import imported
from fuseport.exporter.verify.report import OWN_BACKWARD, Report

# Written as libraries of kernels are: an autograd function around one kernel for the forward pass,
# and one for the backward; kernels for rows, for elements, and for blocks of a transposed tensor.
CODE = """
import torch
import triton
import triton.language as tl
from torch import nn

EPS = tl.constexpr(1e-5)


@triton.jit
def norm_forward(x, w, y, scales, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + row * stride + at, mask=mask, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=0) / n + EPS)
    tl.store(scales + row, scale)
    tl.store(y + row * stride + at, v * scale * tl.load(w + at, mask=mask), mask=mask)


@triton.jit
def norm_backward(dy, x, w, scales, dx, dw, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + row * stride + at, mask=mask, other=0)
    g = tl.load(dy + row * stride + at, mask=mask, other=0)
    scale = tl.load(scales + row)
    gw = g * tl.load(w + at, mask=mask, other=0)
    inner = tl.sum(gw * v, axis=0) * scale * scale / n
    tl.store(dx + row * stride + at, scale * (gw - v * inner), mask=mask)
    tl.atomic_add(dw + at, g * v * scale, mask=mask)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.empty_like(rows)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(rows.shape[1])
        norm_forward[(rows.shape[0],)](rows, w, y, scales, rows.stride(0), rows.shape[1], block)
        ctx.save_for_backward(rows, w, scales)
        ctx.block = block
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        rows, w, scales = ctx.saved_tensors
        dy_rows = dy.reshape(rows.shape).contiguous()
        dx, dw = torch.empty_like(rows), torch.zeros_like(w)
        norm_backward[(rows.shape[0],)](
            dy_rows, rows, w, scales, dx, dw, rows.stride(0), rows.shape[1], BLOCK=ctx.block
        )
        return dx.view(dy.shape), dw


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gate_forward(a, b, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(y + at, silu(tl.load(a + at, mask=mask)) * tl.load(b + at, mask=mask), mask=mask)


@triton.jit
def gate_backward(dy, a, b, da, db, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g, x, z = (tl.load(dy + at, mask=mask), tl.load(a + at, mask=mask), tl.load(b + at, mask=mask))
    s = tl.sigmoid(x)
    tl.store(da + at, g * z * (s + x * s * (1 - s)), mask=mask)
    tl.store(db + at, g * x * s, mask=mask)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        y = torch.empty_like(a)
        grid = lambda meta: (triton.cdiv(a.numel(), meta["BLOCK"]),)
        gate_forward[grid](a, b, y, a.numel(), BLOCK=32)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        grid = (triton.cdiv(a.numel(), 32),)
        gate_backward[grid](dy.contiguous(), a, b, da, db, a.numel(), BLOCK=32)
        return da, db


@triton.jit
def scaled(x, s, y, length, width, x0, x1, x2, y0, y1, y2, L: tl.constexpr, W: tl.constexpr):
    batch = tl.program_id(0)
    i = tl.program_id(1) * L + tl.arange(0, L)
    j = tl.program_id(2) * W + tl.arange(0, W)
    mask = (i[:, None] < length) & (j[None, :] < width)
    v = tl.load(x + batch * x0 + i[:, None] * x1 + j[None, :] * x2, mask=mask, other=0.0)
    s = tl.load(s + j, mask=j < width)
    tl.store(y + batch * y0 + i[:, None] * y1 + j[None, :] * y2, v * s[None, :], mask=mask)


def scale_channels(x, s):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, length, width = x.shape
    grid = (batch, triton.cdiv(length, 4), triton.cdiv(width, 8))
    scaled[grid](x, s, y, length, width, *x.stride(), *y.stride(), L=4, W=8)
    return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12, bias=False)
        self.both = nn.Linear(12, 20)
        self.conv = nn.Conv1d(10, 12, 3, padding=1)

    def forward(self, x):
        a, b = self.both(Norm.apply(x, self.norm.weight)).chunk(2, -1)
        y = self.conv(Gate.apply(a, b).mT).mT
        return x + scale_channels(y, self.norm.weight)
"""
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.LayerNorm(12, bias=False),
    "both": lambda: nn.Linear(12, 20),
    "conv": lambda: nn.Conv1d(10, 12, 3, padding=1),
}
Saved = tuple[Path, str]
ALL = ("exported_program", "onnx", "onnx_native", "torchscript")


def saved(folder: Path, code: str) -> Saved:
    """A checkpoint of random weights, and what --model is."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: layer() for name, layer in LAYERS.items()})
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4)
    torch.save(net.state_dict(), folder / "net.pt")
    (folder / "net.py").write_text(code)
    return folder / "net.pt", f"{folder / 'net.py'}:Net"


def exported(folder: Path, code: str, formats: tuple[str, ...], inputs: str) -> tuple[Any, str]:
    checkpoint, model = saved(folder, code)
    bundle = api.export(
        checkpoint,
        folder / "bundle",
        model=model,
        shim="triton",
        inputs=parse_inputs([inputs]),
        format=formats,
    )
    return bundle, model


@pytest.fixture(scope="module")
def in_all(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The bundle of all formats, of any batch and length, and what --model is."""
    return exported(tmp_path_factory.mktemp("all"), CODE, ALL, "x:[batch,length,12]")


def test_kernels_are_in_every_format_with_gradients(in_all: tuple[Any, str]) -> None:
    """At any batch and length, and no row but passes."""
    bundle, model = in_all
    config = bundle.manifest["architecture"]["config"]
    assert config["shims"] == ["triton"]
    assert config["functions"] == ["Norm", "Gate"]
    conditions = bundle.manifest["programs"]["forward"].get("conditions", [])
    assert conditions == []
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
    ways = {(row.runtime, row.program, row.way) for row in report.results}
    assert ("eager", "gradient", OWN_BACKWARD) in ways
    for runtime in ("eager", "exported_program", "torchscript", "onnxruntime"):
        assert {(runtime, "forward"), (runtime, "gradient")} <= {way[:2] for way in ways}


def test_elements_are_views_of_memory_in_a_program(in_all: tuple[Any, str]) -> None:
    """Nothing is gathered or scattered where offsets are linear."""
    (file,) = list(in_all[0].folder.rglob("*forward*.pt2"))
    targets = {str(node.target) for node in torch.export.load(file).graph.nodes}
    assert any("mm" in t or "linear" in t for t in targets)
    assert not [t for t in targets if "index" in t or "scatter" in t or "gather" in t]


WRONG = {
    "Norm": ("g * v * scale", "g * v"),
    "Gate": ("1 - s", "1 + s"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_kernel_is_found(tmp_path: Path, name: str) -> None:
    assert CODE.count(WRONG[name][0]) == 1
    bundle, model = exported(tmp_path, CODE.replace(*WRONG[name]), ("torchscript",), "x:[2,3,12]")
    assert bundle.manifest["architecture"]["config"]["wrong"] == [name]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    failed = [row for row in report.results if row.verdict == "fail"]
    assert {row.way for row in failed} == {OWN_BACKWARD}
    assert all(name in str(row.reason) for row in failed)
    assert {row.runtime for row in report.results if row.way == "autograd"} == {"torchscript"}


def test_the_command_says_that_a_stand_in_took_the_place_of_triton(tmp_path: Path) -> None:
    checkpoint, model = saved(tmp_path, CODE)
    command = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--model", model]
    command += ["--shim", "triton", "--input-shapes", "x:[2,length,12]", "--format", "onnx"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "stand-ins took the place of triton" in done.output
    out = tmp_path / "report.json"
    command = ["verify", str(tmp_path / "bundle"), "--model", model, "--json", str(out)]
    command += ["--runtime", "eager", "--runtime", "onnxruntime"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert Report.from_json(out.read_text()).exit_code() == 0


LOOP = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def sums(x, y, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        here = tl.load(x + row * n + start + at, mask=start + at < n, other=0.0)
        total += here * here
    if ODD:
        if row % 2 == 1:
            total = -total
    tl.store(y + row, tl.sum(total, axis=0))


ODD = tl.constexpr(False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(5, 5)

    def forward(self, x):
        x = self.both(x).transpose(1, 2).contiguous()
        y = torch.empty(x.shape[:2], dtype=x.dtype, device=x.device)
        sums[(x.shape[0] * x.shape[1],)](x, y, x.shape[2], BLOCK=4)
        return y
"""
WIDE = LOOP.replace("BLOCK=4)", "BLOCK=triton.next_power_of_2(x.shape[2]))")
COUNTED = LOOP.replace("range(0, n, BLOCK)", "range(tl.cdiv(n, BLOCK))").replace(
    "start + at", "start * BLOCK + at"
)
FIXED = "export that dimension with a fixed size"


@pytest.mark.parametrize("code", [LOOP, WIDE, COUNTED], ids=["steps", "wide", "counted"])
def test_loops_over_a_dynamic_dimension_have_one_block_for_all_of_it(
    code: str, tmp_path: Path, saved_with: Callable[..., Saved]
) -> None:
    checkpoint, model = saved_with(code, both=nn.Linear(5, 5))
    given = parse_inputs(["x:[batch,length,5]"])
    options: Any = {"model": model, "shim": "triton", "inputs": given, "format": "onnx"}
    done = api.export(checkpoint, tmp_path / "bundle", **options)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert not any("only where" in note for note in done.manifest["notes"])


def test_loops_in_steps_of_no_block_are_refused_where_they_are_dynamic(
    tmp_path: Path, saved_with: Callable[..., Saved]
) -> None:
    code = LOOP.replace("range(0, n, BLOCK)", "range(0, n, 4)")
    checkpoint, model = saved_with(code, both=nn.Linear(5, 5))

    def bundle(inputs: str, folder: str) -> Any:
        given = parse_inputs([inputs])
        return api.export(
            checkpoint, tmp_path / folder, model=model, shim="triton", inputs=given, format="onnx"
        )

    # One of 4 places at a time is what the other block is not, which a wider one would change.
    with pytest.raises(FuseportError, match=f"repeats something as often as .*{FIXED}"):
        bundle("x:[batch,length,5]", "dynamic")
    done = bundle("x:[batch,7,5]", "fixed")
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()


def test_programs_of_a_dynamic_grid_may_go_their_own_ways(
    tmp_path: Path, saved_with: Callable[..., Saved]
) -> None:
    code = LOOP.replace("ODD = tl.constexpr(False)", "ODD = tl.constexpr(True)")
    checkpoint, model = saved_with(code, both=nn.Linear(5, 5))
    given = parse_inputs(["x:[batch,7,5]"])
    options: Any = {"model": model, "shim": "triton", "format": "onnx"}
    done = api.export(checkpoint, tmp_path / "dynamic", inputs=given, **options)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()


def test_a_model_computes_in_float64_as_truth_is(tmp_path: Path) -> None:
    """Though its kernels name float32."""
    _, model = saved(tmp_path, CODE)
    with shims.installed("triton"):
        net = imported("test", model.rpartition(":")[0]).Net()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    net.double()
    with torch.no_grad():
        got = net(x)
        scales = x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        a, b = net.both(x * scales * net.norm.weight).chunk(2, -1)
        y = net.conv((nn.functional.silu(a) * b).mT).mT
    torch.testing.assert_close(got, x + y * net.norm.weight, rtol=1e-6, atol=1e-6)


PARTS = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def sums(x, y, length, x0, x1, x2, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    part, batch, at = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for row in range(part * ROWS, tl.minimum((part + 1) * ROWS, length)):
        total += tl.load(x + batch * x0 + row * x1 + at * x2)
    tl.store(y + (batch * tl.num_programs(0) + part) * WIDTH + at, total)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(4, 4)

    def forward(self, x):
        batch, length, width = x.shape
        parts = triton.cdiv(length, 4)
        y = torch.zeros(batch, parts, width, dtype=x.dtype, device=x.device)
        sums[(parts, batch)](x, y, length, *x.stride(), WIDTH=width, ROWS=4)
        return self.both(y)
"""


def test_what_each_program_has_a_place_for_is_not_stored_by_one_for_all(
    tmp_path: Path, saved_with: Callable[..., Saved]
) -> None:
    """So a dynamic length is refused. At one length a program reads an input of other strides."""
    both = nn.Linear(4, 4)
    checkpoint, model = saved_with(PARTS, both=both)
    options: Any = {"model": model, "shim": "triton", "format": "exported_program"}
    given = parse_inputs(["x:[batch,length,4]"])
    with pytest.raises(FuseportError, match=FIXED):
        api.export(checkpoint, tmp_path / "dynamic", inputs=given, **options)
    given = parse_inputs(["x:[batch,10,4]"])
    done = api.export(checkpoint, tmp_path / "fixed", inputs=given, **options)
    program = torch.export.load(done.folder / "forward.pt2").module()
    for x in (torch.randn(3, 10, 4), torch.randn(4, 10, 3).mT.mT.transpose(0, 2)):
        parts = [part.sum(1) for part in x.split(4, 1)]
        torch.testing.assert_close(program(x), both(torch.stack(parts, 1)))


ATTENTION = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def attention(q, k, v, y, scale, step, n, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    first = tl.program_id(1) * step
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    queries = tl.load(q + first + row[:, None] * D + at, mask=row[:, None] < n, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for start in range(0, min((tl.program_id(0) + 1) * ROWS, n), KEYS):
        key = start + tl.arange(0, KEYS)
        here = first + key[:, None] * D + at
        scores = tl.dot(queries, tl.load(k + here, mask=key[:, None] < n, other=0.0).T) * scale
        scores = tl.where((key < n) & (key <= row[:, None]), scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights, left = tl.exp(scores - larger[:, None]), tl.exp(most - larger)
        total = total * left + tl.sum(weights, 1)
        values = tl.load(v + here, mask=key[:, None] < n, other=0.0)
        out, most = out * left[:, None] + tl.dot(weights, values), larger
    tl.store(y + first + row[:, None] * D + at, out / total[:, None], mask=row[:, None] < n)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        b, n, d = q.shape
        y = torch.empty_like(q)
        attention[lambda meta: (triton.cdiv(n, meta["ROWS"]), b)](
            q, k, v, y, d**-0.5, q.stride(0), n, D=d, ROWS=16, KEYS=16
        )
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(5, 16)

    def forward(self, x):
        return Attention.apply(*(f(x).contiguous() for f in (self.q, self.k, self.v)))
"""


def test_attention_block_by_block_is_exported_at_any_length(
    tmp_path: Path, saved_with: Callable[..., Saved]
) -> None:
    """The size of a head is that of a block, too, and stays what it is. There is no backward."""
    layers = {name: nn.Linear(5, 16) for name in ("q", "k", "v")}
    checkpoint, model = saved_with(ATTENTION, **layers)
    given = parse_inputs(["x:[batch,length,5]"])
    options: Any = {"model": model, "shim": "triton", "inputs": given, "format": "onnx"}
    options["format"] = ["onnx", "exported_program"]
    done = api.export(checkpoint, tmp_path / "bundle", **options)
    program = torch.export.load(done.folder / "forward.pt2").module()
    for length in (1, 7, 40):
        x = torch.randn(2, length, 5, generator=torch.Generator().manual_seed(0))
        expected = F.scaled_dot_product_attention(
            *(layers[name](x) for name in ("q", "k", "v")), is_causal=True
        )
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)
    report = api.verify(done.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    others = {(r.runtime, r.verdict) for r in report.results if r.verdict != "pass"}
    assert others == {("eager", "unsupported")}
