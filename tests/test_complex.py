"""Complex numbers inside models: in ONNX by their parts, and as gradients of complex parameters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import formats
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get
from fuseport.exporter.verify.localise.other_weights import sentence
from fuseport.exporter.verify.report import Report

MODELS = Path(__file__).parent.parent / "fixtures" / "spectral" / "spectral.py"
SPEC = TensorSpec("input", "float32", ("batch", 6, "length"))
SIZES = ((2, 6, 8), (1, 6, 7), (3, 6, 20), (2, 6, 1))


class Called(nn.Module):
    """Calls functions of a complex tensor, of the halves of its input, and of a real one."""

    def __init__(self, *functions: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        re, im = x.chunk(2, 1)
        return tuple(function(torch.complex(re, im), re) for function in self.functions)


def parts(z: Tensor) -> Tensor:
    return torch.view_as_real(z)


def written(z: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    out[:, 0] = z[:, 1]
    out[:, 1:] = y[:, 1:] + 1j
    return parts(out)


INDEX = torch.tensor([1, 1, 0])
OPERATORS: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {
    "arithmetic": [
        lambda z, y: parts((z + y) * (y - z) * (2 - z) + (1 + 2j) * z - z * 3),
        lambda z, y: parts(y * 1j + (y - 2j) / (1 + 1j) + y**2),
        lambda z, y: parts(z / (z.abs() + 1) + y / (z + 3) + 1 / (z + 4j)),
        lambda z, y: z.real * y + z.conj().imag,
        lambda z, y: (z.abs() + y) * parts(z.sgn()).sum(-1),
    ],
    "functions": [
        lambda z, y: parts(torch.exp(z) + torch.polar(y.exp(), y)),
        lambda z, y: parts(z * torch.complex(y, y[:, :1].exp())),
        lambda z, y: parts(z**3 + (z + 4) ** -2 + z**0 + 2.0**z + z.square()),
        lambda z, y: parts(torch.sqrt(z) + (z + 4).reciprocal()),
    ],
    "functions of the angle": [
        lambda z, y: parts(torch.log(z + 9)) * z.angle()[..., None],
        lambda z, y: parts((z + 3) ** (y.abs() + 0.5)),
    ],
    "products": [
        lambda z, y: parts(z.mT @ z.conj() + y.mT.to(z.dtype) @ z),
        lambda z, y: parts(torch.einsum("bcl,bdl->bcd", z, z * 1j).sum((0, 1))),
    ],
    "places": [
        lambda z, y: parts(
            torch.cat([z.flip(-1), z.roll(1, 1), torch.stack([z, -z]).sum(0)], 1).transpose(1, 2)
        ),
        lambda z, y: parts(z.sum(-1) + z.mean(1, keepdim=True)[..., 0] + z[..., 0]),
        lambda z, y: parts(torch.where(y > 0, z, z.conj() * y).masked_fill(y > 1, 1j)),
        written,
        lambda z, y: parts(z[:, torch.tensor([2, 0, 0])] + z.index_select(1, INDEX)),
        lambda z, y: y * (z == z.conj()) + (z != z * 1).to(y.dtype) + z.imag,
        lambda z, y: parts(torch.view_as_complex(parts(z).flip(-1)) * z),
        lambda z, y: parts(nn.functional.pad(z, (1, 2)) * 2),
        lambda z, y: parts(z.to(y.device) * 2),  # as Llama 4's rotary embedding
    ],
    "transforms": [
        lambda z, y: parts(torch.fft.fft(z) * torch.fft.ifft(z, norm="ortho")),
        lambda z, y: parts(torch.fft.rfft(y, norm="forward") * 2),
        lambda z, y: torch.fft.irfft(torch.fft.rfft(y) * 1j, n=y.shape[-1]),
        lambda z, y: torch.cat(
            [torch.fft.irfft(z, n=2 * z.shape[-1]), torch.fft.irfft(z, n=z.shape[-1])], -1
        ),
        lambda z, y: torch.fft.irfft2(
            torch.fft.rfft2(y, norm="ortho") * z[:, :, :1], s=(y.shape[1], y.shape[2])
        ),
        lambda z, y: torch.fft.irfft(
            torch.fft.rfft(y, n=2 * y.shape[-1]) * torch.fft.rfft(z.imag, n=2 * y.shape[-1])
        )[..., : y.shape[-1]],
    ],
}


def programs(module: nn.Module, dtype: torch.dtype) -> list[Program]:
    spec = replace(SPEC, dtype=str(dtype).removeprefix("torch."))
    example = torch.randn(2, 6, 8, dtype=dtype)
    forward = capture_forward(module, {"input": example}, [spec])
    return [forward, capture_gradient(forward)]


# Functions of the angle have no float64: ONNX Runtime has no Atan of that.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPERATORS),
        *((name, torch.float64) for name in ("arithmetic", "functions", "transforms")),
    ],
)
def test_operators_and_their_gradients_in_onnx(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Called(*OPERATORS[name])
    sessions = []
    for program in programs(module, dtype):
        file = tmp_path / f"{program.kind}.onnx"
        formats.get("onnx").write(program, file, formats.Options(tmp_path / "w"))
        sessions += [get(name).load(file, {}) for name in ("onnxruntime", "onnx_reference")]
    allowed = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    for sizes in SIZES:
        x = torch.randn(sizes, dtype=dtype, requires_grad=True)
        outputs = module(x)
        cotangents = [torch.randn_like(y) for y in outputs]
        (dx,) = torch.autograd.grad(outputs, x, cotangents)
        given = {"input": x.detach()}
        more = {f"cotangent_output_{i}": dy for i, dy in enumerate(cotangents)}
        for i, session in enumerate(sessions):
            found = session.run(given if i < 2 else {**given, **more})
            for n, y in enumerate(outputs):
                torch.testing.assert_close(found[f"output_{n}"], y.detach(), **allowed)
            if i >= 2:
                torch.testing.assert_close(found["grad/input"], dx, **allowed)


def test_0_has_powers_and_a_sign(tmp_path: Path) -> None:
    module = Called(lambda z, y: parts(z ** (y + 1) + z.sgn()) + z.abs()[..., None])
    forward, _ = programs(module, torch.float32)
    formats.get("onnx").write(forward, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))
    x = torch.zeros(1, 6, 2)
    x[0, 0] = torch.tensor([2.0, 0.0])  # as z is
    found = get("onnxruntime").load(tmp_path / "f.onnx", {}).run({"input": x})["output"]
    torch.testing.assert_close(found, module(x)[0])


@pytest.mark.parametrize("sizes", [(2, 6, 8), (3, 4, 7), (1, 2, 30), (2, 6, 1)])
def test_what_is_its_own_opposite_has_no_imaginary_part(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """An angle there is 0 or π, as torch's; what rounding leaves would make it -π as often."""
    torch.manual_seed(0)
    transforms = (torch.fft.rfft, torch.fft.fft, torch.fft.rfft2)
    module = Called(*(lambda z, y, of=of: of(y).imag for of in transforms))
    examples = {"input": torch.randn(2, 6, 9)}
    program = capture_forward(module, examples, [replace(SPEC, dims=("batch", "rows", "length"))])
    file = tmp_path / "forward.onnx"
    formats.get("onnx").write(program, file, formats.Options(tmp_path / "w"))
    x = torch.randn(sizes)
    found = get("onnxruntime").load(file, {}).run({"input": x})
    for name, wanted in zip(found, module(x), strict=True):
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)
        assert not found[name][wanted == 0].count_nonzero(), name
    assert (wanted == 0).any()


def test_an_operator_without_a_form_is_named(tmp_path: Path) -> None:
    forward, _ = programs(Called(lambda z, y: parts(torch.asinh(z))), torch.float32)
    with pytest.raises(ExportFailed, match=r"no form of aten.asinh.default of complex numbers$"):
        formats.get("onnx").write(forward, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))


def test_nothing_but_transforms_is_computed_of_parts_side_by_side(tmp_path: Path) -> None:
    """A product of complex numbers is of four products, without a Concat between."""
    forward, _ = programs(Called(lambda z, y: (z * z.conj() * (y + 1j)).imag), torch.float32)
    formats.get("onnx").write(forward, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))
    used = {node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node}
    assert not used & {"Concat", "Gather", "Unsqueeze"}


@pytest.mark.parametrize(
    ("name", "shape", "programs"),
    [
        ("FourierOperator", "x:[batch,length,1]", []),
        ("FourierOperator", "x:[batch,length,1]", ["--program=forward"]),
        ("DiagonalStateSpace", "u:[batch,length,8]", []),
        ("GlobalFilter", "x:[batch,6,8,8]", []),
    ],
)
def test_models_of_transforms_are_verified_with_their_gradients(
    name: str, shape: str, programs: list[str], tmp_path: Path
) -> None:
    """A complex parameter's gradient is of its parts; the forward program has autograd of it."""
    torch.manual_seed(0)
    namespace: dict[str, type[nn.Module]] = {}
    exec(compile(MODELS.read_text(), MODELS, "exec"), namespace)  # our own fixture
    torch.save(namespace[name]().state_dict(), tmp_path / "w.pth")
    code, bundle = f"--model={MODELS}:{name}", tmp_path / "b"
    words = ["export", str(tmp_path / "w.pth"), f"-o{bundle}", code, f"--input-shapes={shape}"]
    run = CliRunner().invoke(main, [*words, *programs])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(main, ["verify", str(bundle), code, "--json=-"])
    assert run.exit_code == 0, run.output
    report = Report.from_json(run.stdout)
    compared = {row.tensor for row in report.results if row.verdict == "pass"}
    if name == "FourierOperator":
        assert "grad/spectral" in compared
        assert (
            sentence("onnxruntime", bundle / "forward.onnx", bundle / "weights.safetensors") is None
        )
    if not programs:
        ran = {r.runtime for r in report.results if r.artifact == "gradient.onnx"}
        assert ran == {"onnxruntime", "onnx_reference"}
