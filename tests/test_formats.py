"""Ordinary modules in every format: the same outputs and gradients as eager, at held-out sizes."""

import hashlib
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from fuseport import ops
from fuseport.exporter import api, formats
from fuseport.exporter.errors import ExportFailed, UsageError
from fuseport.exporter.formats import torchscript
from fuseport.exporter.models.model import example
from fuseport.exporter.program import Program, TensorSpec, named_outputs
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.ops.selective_scan import selective_scan

SIZES = {"batch": 2, "length": 16, "height": 12, "width": 18}
SEQUENCE = (TensorSpec("x", "float32", ("batch", "length", 8)),)
CHANNELS = (TensorSpec("x", "float32", ("batch", 6, "length")),)
IMAGE = (TensorSpec("x", "float32", ("batch", 4, "height", "width")),)
TOKENS = (TensorSpec("ids", "int64", ("batch", "length"), 11),)
MASKED = (*SEQUENCE, TensorSpec("mask", "bool", ("batch", "length")))
SQUARES = (TensorSpec("x", "float32", ("batch", 3, 3)),)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    ops.register()


class Image(nn.Module):
    """What image networks are made of: strides, dilation, padding, groups, pooling, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 2), (2, 1), groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.norm.running_mean.normal_()
        self.up = nn.ConvTranspose2d(6, 4, (3, 4), (2, 3), (1, 0), (1, 2), groups=2)
        self.group = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.mish(self.norm(self.conv(F.pad(x, (1, 2, 0, 1), value=0.5))))
        h = F.avg_pool2d(self.group(self.up(h)), 3, 2, 1, count_include_pad=False)
        h = F.interpolate(h, scale_factor=2, mode="bilinear") + F.adaptive_avg_pool2d(h, 1)
        return F.max_pool2d(h, 2)


class Waves(nn.Module):
    """What networks over one long dimension are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 12, 4, groups=6))
        self.same = nn.Conv1d(12, 6, 3, padding=1, padding_mode="replicate")
        self.up = nn.ConvTranspose1d(6, 6, 4, 2, 1, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.same(F.silu(self.causal(F.pad(x, (3, 0)))))
        return F.avg_pool1d(F.max_pool1d(self.up(h), 3, 1, 1), 3, 2, 1)


class Attention(nn.Module):
    """A transformer's layers over an embedding with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.layer(self.embedding(ids))
        heads = h.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        h = self.norm(h.transpose(1, 2).flatten(2))
        return {"probabilities": h.softmax(-1), "best": h.argmax(-1)}


class Scan(nn.Module):
    """The fused op among others, with attention of rank 3 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.conv = nn.Conv1d(8, 8, 4, groups=8)
        self.delta, self.coefficients, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.A = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        u = F.silu(self.conv(F.pad(h.mT, (3, 0))))
        B, C = self.coefficients(h).chunk(2, -1)
        y = selective_scan(
            u, self.delta(h).mT, -self.A.exp(), B.mT, C.mT, z=h.mT, delta_softplus=True
        )
        return self.out(y.mT + F.scaled_dot_product_attention(h, h, h)) + x


class Mixed(nn.Module):
    """Regions without gradients, splits, reductions, gathers, tensors made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gate = nn.GRUCell(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x).masked_fill(mask.unsqueeze(-1), 0.25)
        h = h + torch.arange(x.shape[1]).unsqueeze(-1) * torch.tensor([0.1, 0.2] * 4)
        with torch.no_grad():
            scale = h.abs().amax(-1, keepdim=True) + 1
        with torch.autocast("cpu", enabled=False):
            h = F.glu(torch.cat([h / scale, h.cumsum(1)], -1))
        first, second = h.split([3, 5], -1)
        third = torch.stack(second.unbind(-1)[1:4], -1) * first.detach()
        picked = h.gather(-1, (x > 0).long()).clamp(-0.5, 0.5)
        windows = F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)
        best = h.topk(2, -1).values.std(-1)
        state = self.gate(h.mean(1), F.normalize(windows[:, 0], dim=-1))
        return torch.cat([third, picked, windows.flip(1)], -1), best.sum(-1) + state.sum(-1)


ZOO: dict[type[nn.Module], tuple[Sequence[TensorSpec], list[dict[str, int]]]] = {
    Image: (
        IMAGE,
        [{"batch": 1, "height": 7, "width": 9}, {"batch": 3, "height": 16, "width": 13}],
    ),
    Waves: (CHANNELS, [{"batch": 1, "length": 4}, {"batch": 17, "length": 65}]),
    Attention: (TOKENS, [{"batch": 1, "length": 1}, {"batch": 3, "length": 7}]),
    Scan: (SEQUENCE, [{"batch": 1, "length": 1}, {"batch": 3, "length": 65}]),
    Mixed: (MASKED, [{"batch": 1, "length": 1}, {"batch": 3, "length": 7}]),
}


def inputs_of(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: example(spec, sizes, generator) for spec in specs}


def programs_of(module: nn.Module, specs: Sequence[TensorSpec]) -> tuple[Program, Program]:
    forward = capture_forward(module.eval(), inputs_of(specs, SIZES), specs)
    return forward, capture_gradient(forward)


def expected_of(
    module: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Cotangents, outputs and gradients, by eager."""
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    outputs = named_outputs(module(*{**inputs, **leaves}.values()))
    leaves |= dict(module.named_parameters())
    generator = torch.Generator().manual_seed(1)
    floating = {n: o for n, o in outputs.items() if o.is_floating_point()}
    seeds = {n: torch.randn(o.shape, generator=generator).to(o.dtype) for n, o in floating.items()}
    gradients = torch.autograd.grad(
        list(floating.values()), list(leaves.values()), list(seeds.values())
    )
    return (
        {f"cotangent_{n}": seed for n, seed in seeds.items()},
        {n: o.detach() for n, o in outputs.items()},
        {f"grad/{n}": g for n, g in zip(leaves, gradients, strict=True)},
    )


Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def loaded(file: Path, program: Program) -> Call:
    """An artifact as its runtime runs it."""
    names = [spec.name for spec in program.outputs]
    if file.suffix == ".onnx":
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        assert [o.name for o in session.get_outputs()] == names
        assert [i.name for i in session.get_inputs()] == [spec.name for spec in program.inputs]
        return lambda inputs: dict(
            zip(
                names,
                map(torch.from_numpy, session.run(None, {n: t.numpy() for n, t in inputs.items()})),
                strict=True,
            )
        )
    module: Any = torch.jit.load(file) if file.suffix == ".pt" else torch.export.load(file).module()
    return lambda inputs: named_outputs(module(*inputs.values()), names)


def assert_same(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        scale = value.abs().max().item() if value.is_floating_point() and value.numel() else 1
        torch.testing.assert_close(
            got[name].detach(), value, rtol=tolerance, atol=tolerance * max(scale, 0.1), msg=name
        )


@pytest.mark.parametrize("kind", ZOO)
def test_every_format_computes_what_eager_does(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    specs, held_out = ZOO[kind]
    programs = programs_of(module, specs)
    artifacts = {}
    for program in programs:
        for name in formats.default():
            writer = formats.get(name)
            file = tmp_path / f"{program.kind}{writer.SUFFIX}"
            writer.write(program, file, formats.Options(tmp_path / "weights.safetensors"))
            artifacts[program.kind, name] = loaded(file, program)
    for sizes in (SIZES, *held_out):
        inputs = inputs_of(specs, sizes)
        cotangents, outputs, gradients = expected_of(module, inputs)
        for name in formats.default():
            assert_same(artifacts["forward", name](inputs), outputs, 1e-4)
            got = artifacts["gradient", name]({**inputs, **cotangents})
            assert_same(got, outputs | gradients, 1e-4)
    for program in programs:
        given = inputs if program.kind == "forward" else {**inputs, **cotangents}
        expected = outputs if program.kind == "forward" else outputs | gradients
        assert_moves(tmp_path, program, given, expected)


def assert_moves(
    folder: Path, program: Program, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """On another device all is there: the meta device refuses what is not, as a GPU would."""
    names = [spec.name for spec in program.outputs]
    script = torch.jit.load(folder / f"{program.kind}.pt", map_location="meta")
    exported = torch.export.load(folder / f"{program.kind}.pt2")
    for module in (script, move_to_device_pass(exported, "meta").module()):
        got = named_outputs(module(*(t.to("meta") for t in inputs.values())), names)
        assert {n: (t.device.type, t.dtype, t.shape) for n, t in got.items()} == {
            n: ("meta", t.dtype, t.shape) for n, t in expected.items()
        }


@pytest.fixture(scope="module")
def scan() -> tuple[nn.Module, tuple[Program, Program]]:
    torch.manual_seed(0)
    module = Scan().eval()
    return module, programs_of(module, SEQUENCE)


def test_torchscript_is_differentiable(
    scan: tuple[nn.Module, tuple[Program, Program]], tmp_path: Path
) -> None:
    module, (forward, _) = scan
    torchscript.write(forward, tmp_path / "f.pt", formats.Options(tmp_path / "w"))
    inputs = inputs_of(SEQUENCE, {"batch": 3, "length": 7})
    cotangents, outputs, gradients = expected_of(module, inputs)
    script = torch.jit.load(tmp_path / "f.pt")
    x = inputs["x"].requires_grad_()
    out = script(x)
    parameters = dict(script.named_parameters())
    out.backward(cotangents["cotangent_output"])
    got = {"grad/x": x.grad} | {f"grad/{n}": p.grad for n, p in parameters.items()}
    assert got.keys() == gradients.keys()
    assert_same({n: got[n] for n in gradients}, gradients, 1e-4)
    assert_same({"output": out}, outputs, 1e-4)


def test_onnx_keeps_names_and_lists_the_op_once(
    scan: tuple[nn.Module, tuple[Program, Program]], tmp_path: Path
) -> None:
    module, programs = scan
    counts = []
    for program in programs:
        file = tmp_path / f"{program.kind}.onnx"
        formats.get("onnx").write(program, file, formats.Options(tmp_path / "w"))
        model = onnx.load(file)
        assert {i.name for i in model.graph.initializer} >= dict(module.named_parameters()).keys()
        dims = [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim]
        assert dims == ["batch", "length", ""]
        counts.append([n.op_type for n in model.graph.node if n.domain == "fuseport.ops"])
        assert sorted(f.name for f in model.functions) == sorted(counts[-1])
    scans = ["selective_scan_gated", "selective_scan_gated_backward"]
    assert counts == [scans[:1], scans]


def test_large_weights_are_external(
    scan: tuple[nn.Module, tuple[Program, Program]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both files point into weights.safetensors, and ONNX Runtime reads them from there."""
    module, programs = scan
    writer: Any = formats.get("onnx")
    monkeypatch.setattr(writer, "EMBED_LIMIT", 0)
    weights = tmp_path / "weights.safetensors"
    save_file(module.state_dict(), weights)
    inputs = inputs_of(SEQUENCE, {"batch": 3, "length": 7})
    cotangents, outputs, gradients = expected_of(module, inputs)
    for program in programs:
        file = tmp_path / f"{program.kind}.onnx"
        writer.write(program, file, formats.Options(weights))
        model = onnx.load(file, load_external_data=False)
        external = [i for i in model.graph.initializer if i.external_data]
        assert {i.name for i in external} == dict(module.named_parameters()).keys()
        assert {e.value for i in external for e in i.external_data if e.key == "location"} == {
            weights.name
        }
        given = inputs if program.kind == "forward" else inputs | cotangents
        expected = outputs if program.kind == "forward" else outputs | gradients
        assert_same(loaded(file, program)(given), expected, 1e-4)


def digests(folder: Path) -> dict[str, str]:
    """Write a small model in every format, and hash the files."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3))
    found = {}
    for program in programs_of(module, SEQUENCE):
        for name in formats.default():
            writer = formats.get(name)
            file = folder / f"{program.kind}{writer.SUFFIX}"
            writer.write(program, file, formats.Options(folder / "weights.safetensors"))
            found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def test_the_same_export_gives_the_same_bytes(tmp_path: Path) -> None:
    """Twice in one process, and once in another, whatever its hash seed."""
    first = digests(tmp_path)
    assert digests(tmp_path) == first
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r})\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        f"print(t.digests(pathlib.Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(first)


def test_artifacts_name_nothing_of_the_machine(tmp_path: Path) -> None:
    digests(tmp_path)
    here = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(tmp_path))
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        for text in (*here, "site-packages", "stack_trace", "from_node"):
            assert text.encode() not in content, (file.name, text)


class Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x)


@pytest.mark.parametrize(
    ("kind", "specs", "name", "reason"),
    [
        (Eigenvalues, SQUARES, "onnx", "the gradient program: .*aten._linalg_eigh"),
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(
    kind: type[nn.Module], specs: Sequence[TensorSpec], name: str, reason: str, tmp_path: Path
) -> None:
    _, gradient = programs_of(kind(), specs)
    options = formats.Options(tmp_path / "w")
    with pytest.raises(ExportFailed, match=reason) as raised:
        formats.get(name).write(gradient, tmp_path / "a", options)
    assert "\n" not in str(raised.value)


def test_a_complex_number_has_a_conjugate_in_torchscript(tmp_path: Path) -> None:
    class Spiral(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1j * x.cos()).abs()

    _, gradient = programs_of(Spiral(), SEQUENCE)
    torchscript.write(gradient, tmp_path / "g.pt", formats.Options(tmp_path / "w"))
    x, dy = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    (expected,) = torch.autograd.grad(Spiral()(x), x, dy)
    found = torch.jit.load(tmp_path / "g.pt")(x.detach(), dy)
    torch.testing.assert_close(found["grad/x"], expected)


def test_torchscript_has_conditions_on_sizes_that_are_of_several(tmp_path: Path) -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x[x > 0]
            n, m = x.shape[0], kept.shape[0]
            torch._check((m >= 0) & (m <= n))
            return kept

    x = torch.tensor([1.0, -2.0, 3.0])
    program = capture_forward(Kept(), {"x": x}, [TensorSpec("x", "float32", ("n",))])
    called = {node.target for node in program.exported.graph.nodes}
    assert operator.and_ in called
    torchscript.write(program, tmp_path / "f.pt", formats.Options(tmp_path / "w"))
    assert torch.equal(torch.jit.load(tmp_path / "f.pt")(-x), torch.tensor([2.0]))


def test_torchscript_has_no_form_of_what_is_no_operator(tmp_path: Path) -> None:
    forward = capture_forward(nn.Tanh(), inputs_of(SEQUENCE, SIZES), SEQUENCE)
    (node,) = (node for node in forward.exported.graph.nodes if node.op == "call_function")
    node.target = torch.tanh
    with pytest.raises(ExportFailed, match=r"TorchScript has no form of .*tanh"):
        torchscript.write(forward, tmp_path / "f.pt", formats.Options(tmp_path / "w"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("y = x.reshape([1.5])", r"Expected a value of type 'List\[int\]' .* 'List\[float\]'"),
        ("y = (3 @ 3)", "Expected a value of type 'Tensor' .* found type 'int'"),
        ("y = x.no_such(3)", "'Tensor' object has no attribute or method 'no_such'"),
    ],
)
def test_what_torchscript_refuses_is_named_with_its_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = capture_forward(nn.Linear(8, 8), inputs_of(SEQUENCE, SIZES), SEQUENCE)
    code = f"def forward(self, x: Tensor):\n    {line}\n    return y\n"
    monkeypatch.setattr(torchscript, "source", lambda _: code)
    expected = f"TorchScript refuses the forward program: {said}, at: {re.escape(line)}$"
    with pytest.raises(ExportFailed, match=expected):
        torchscript.write(forward, tmp_path / "f.pt", formats.Options(tmp_path / "w"))


def test_a_refusal_names_the_other_formats(tmp_path: Path) -> None:
    code = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        "
    (tmp_path / "net.py").write_text(code + "return torch.linalg.svd(super().forward(x))[1]\n")
    torch.save(nn.Linear(8, 8).state_dict(), tmp_path / "w.pth")
    given = {"model": f"{tmp_path}/net.py:svd", "inputs": SEQUENCE, "programs": ["forward"]}
    (tmp_path / "net.py").open("a").write("def svd():\n    return Net(8, 8)\n")
    others = "without it: --format exported_program,torchscript$"
    with pytest.raises(ExportFailed, match=f"no form of aten._linalg_svd; {others}"):
        api.export(tmp_path / "w.pth", tmp_path / "b", **given)
    with pytest.raises(ExportFailed, match=r"no form of aten._linalg_svd$"):
        api.export(tmp_path / "w.pth", tmp_path / "b", **given, format=["onnx"])


def test_a_name_of_no_format_is_usage() -> None:
    with pytest.raises(
        UsageError,
        match="there are: aot_inductor, exported_program, onnx, onnx_native, torchscript",
    ):
        formats.get("tensorflow")


@pytest.mark.parametrize("opset", [formats.OPSETS[0], formats.OPSETS[-1]])
def test_first_and_last_opset(
    scan: tuple[nn.Module, tuple[Program, Program]], opset: int, tmp_path: Path
) -> None:
    module, (_, gradient) = scan
    file = tmp_path / "gradient.onnx"
    formats.get("onnx").write(gradient, file, formats.Options(tmp_path / "w", opset))
    imports = {o.domain: o.version for o in onnx.load(file).opset_import}
    assert imports == {"": opset, "fuseport.ops": 1}
    inputs = inputs_of(SEQUENCE, {"batch": 1, "length": 5})
    cotangents, outputs, gradients = expected_of(module, inputs)
    assert_same(loaded(file, gradient)({**inputs, **cotangents}), outputs | gradients, 1e-4)


class Half(nn.Module):
    """Casts around the op, as models in half precision have them; an embedding beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, dtype=torch.float16)
        self.A = nn.Parameter(torch.randn(8, 4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids).mT
        B, C = h[:, :4], h[:, 4:]
        return selective_scan(h, h, -self.A.exp(), B, C, z=h, delta_softplus=True)


def test_half_precision_runs_in_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Half().eval()
    _, gradient = programs_of(module, TOKENS)
    file = tmp_path / "gradient.onnx"
    formats.get("onnx").write(gradient, file, formats.Options(tmp_path / "w"))
    inputs = inputs_of(TOKENS, {"batch": 3, "length": 7})
    cotangents, outputs, gradients = expected_of(module, inputs)
    assert_same(loaded(file, gradient)({**inputs, **cotangents}), outputs | gradients, 1e-2)
