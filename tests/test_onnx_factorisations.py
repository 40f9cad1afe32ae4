"""Linear algebra in ONNX Runtime, at sizes unlike the export's, and its gradients."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, formats
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of

linalg = torch.linalg
OLD = hasattr(torch.ops.aten, "cholesky")  # torch 2.14 has none
QR: Any = torch.qr if OLD else linalg.qr
Results = Tensor | tuple[Tensor, ...]


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def triangles(x: Tensor) -> Results:
    """Of what torch does not read there is more than it could compute with."""
    lower = x.tril(-1) / 4 + torch.eye(x.shape[-1], dtype=x.dtype) * (2 + x)
    beside = torch.full_like(x, torch.inf).triu(1)
    a = lower + torch.where(beside == torch.inf, beside, 0)
    return (
        linalg.solve_triangular(a, x, upper=False),
        linalg.solve_triangular(a.mT, x[..., :2], upper=True),
        linalg.solve_triangular(lower, x.mT, upper=False, left=False),
        linalg.solve_triangular(lower * 7, x, upper=False, unitriangular=True),
        linalg.solve_triangular(lower[0], x, upper=False),
        torch.triangular_solve(x, lower.mT, transpose=True)[0],
        torch.triangular_solve(x, lower, upper=False, unitriangular=True)[0],
    )


def by_cholesky(x: Tensor) -> Results:
    a = definite(x)
    lower, upper = linalg.cholesky(a), linalg.cholesky(a, upper=True)
    return (
        torch.cholesky_solve(x, lower),
        torch.cholesky_solve(x[..., :1], upper, upper=True),
        torch.cholesky_inverse(lower),
        torch.cholesky_inverse(upper, upper=True) * x,
        linalg.cholesky(a) - linalg.cholesky_ex(a.tril() + x.triu(1))[0],
        *((torch.cholesky(a), torch.cholesky(a, upper=True) * x) if OLD else ()),
    )


def of_vectors(x: Tensor) -> Results:
    return (
        linalg.solve(x, x.sum(-1)),
        linalg.solve(x[0], x[1, 0]),
        linalg.solve(x[0], x.mT * x),  # of one matrix, for a batch
        linalg.solve(x, x[0] ** 2),
        linalg.solve_ex(x, torch.tanh(x), left=False)[0],
        torch.linalg.tensorsolve(x[0], x[0, 0]),
    )


def by_lu(x: Tensor) -> Results:
    lu, pivots = linalg.lu_factor(x)
    p, lower, upper = torch.lu_unpack(lu, pivots)
    others = linalg.lu(x.mT)
    b = torch.tanh(x)
    return (
        *(lu, lower, upper, p * x, *others[1:]),
        linalg.lu_solve(lu, pivots, b),
        linalg.lu_solve(lu, pivots, b, adjoint=True),
        linalg.lu_solve(lu, pivots, b, left=False),
        x * pivots[..., None] + x * linalg.inv_ex(x)[1][..., None, None],
    )


FUNCTIONS: dict[str, Callable[[Tensor], Results]] = {
    "inverses": lambda x: (linalg.inv(x), x.inverse() * x, linalg.inv_ex(x.mT)[0] + x),
    "inverse of four dimensions": lambda x: linalg.inv(torch.stack([x, x.mT], 1) * x[:, None]),
    "inverse of one": lambda x: linalg.inv(x[0]),
    "powers": lambda x: (linalg.matrix_power(x, -2), linalg.tensorinv(x[0], ind=1)),
    "solve": lambda x: (linalg.solve(x, x.mT + 1), linalg.solve(x.mT, 1 - x**2, left=False)),
    "solve for vectors and of other batches": of_vectors,
    "determinants": lambda x: (x.det(), linalg.det(x.mT)[:, None, None] * x, linalg.det(x[0])),
    "logarithms of determinants": lambda x: (
        *linalg.slogdet(x),
        x.mT.slogdet()[1],
        torch.logdet(definite(x)),
        torch.logdet(-x[0]).isnan() * x,
    ),
    "LU": by_lu,
    "Cholesky": lambda x: (linalg.cholesky(definite(x)), linalg.cholesky(definite(x).mT[0])),
    "by Cholesky": by_cholesky,
    "triangles": triangles,
    "QR": lambda x: (*linalg.qr(x), *linalg.qr(x.mT, mode="complete"), *QR(x[0])),
    "QR of high ones": lambda x: linalg.qr(torch.cat([x, x.mT**2, x.tanh()], 1)),
}
TWICE = {"inverses", "solve", "determinants", "LU", "Cholesky", "QR"}  # in float64, too
CASES = [*((n, torch.float32) for n in FUNCTIONS), *((n, torch.float64) for n in sorted(TWICE))]


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        found = self.function(x)
        if isinstance(found, Tensor):
            return found
        return {f"y{i}": each for i, each in enumerate(found)}


def session(
    function: Callable[[Tensor], Any], dims: Sequence[int | str], example: Tensor, folder: Path
) -> Any:
    spec = TensorSpec("x", str(example.dtype).removeprefix("torch."), tuple(dims))
    program = capture_forward(Called(function), {"x": example}, [spec])
    return session_of(program, folder, "onnxruntime")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_outputs_and_gradients_are_those_of_float64(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(11)
    net = Called(FUNCTIONS[name])
    spec = TensorSpec("x", str(dtype).removeprefix("torch."), ("batch", "n", "n"))
    example = torch.randn(2, 5, 5, dtype=dtype, generator=generator)
    forward = capture_forward(net, {"x": example}, [spec])
    sessions: dict[str, Any] = {}
    for program in (forward, capture_gradient(forward)):
        sessions[program.kind] = session_of(program, tmp_path, "onnxruntime")
    near = 1e-10 if dtype == torch.float64 else 2e-5
    for batch, size in (2, 5), (3, 4), (2, 1), (2, 11):
        x = torch.randn(batch, size, size, dtype=dtype, generator=generator)
        x += 2 * torch.eye(size, dtype=dtype)
        exact = x.double().requires_grad_()
        found = copy.deepcopy(net)(exact)
        outputs: Mapping[str, Tensor] = {"output": found} if isinstance(found, Tensor) else found
        got = sessions["forward"].run({"x": x})
        assert set(got) == set(outputs)
        cotangents = {}
        for key, y in outputs.items():
            assert_near(got[key], y.detach().to(dtype), near)
            cotangents[key] = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        roots = [key for key, y in outputs.items() if y.requires_grad]
        wide = [cotangents[key].to(dtype).double() for key in roots]
        (dx,) = torch.autograd.grad([outputs[key] for key in roots], exact, wide)
        given = {f"cotangent_{key}": value.to(dtype) for key, value in cotangents.items()}
        assert_near(sessions["gradient"].run({"x": x, **given})["grad/x"], dx.to(dtype), near)


def assert_near(found: Tensor, expected: Tensor, near: float) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=near * max(scale, 1))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: linalg.inv(x), "linalg.inv: a matrix is singular"),
        (lambda x: linalg.solve(x, x + 1), "linalg.solve: a matrix is singular"),
        (lambda x: linalg.inv_ex(x, check_errors=True)[0], "inv_ex: a matrix is singular"),
        (lambda x: linalg.lu_factor(x)[0], "linalg.lu_factor: a matrix is singular"),
        (lambda x: linalg.cholesky(x + x.mT), "linalg.cholesky: a matrix is not positive definite"),
        *(
            [(lambda x: torch.cholesky(x + x.mT), "cholesky: a matrix is not positive definite")]
            if OLD
            else []
        ),
    ],
)
def test_what_torch_raises_of_is_refused(
    function: Callable[[Tensor], Tensor], why: str, tmp_path: Path
) -> None:
    program = session(function, ("batch", 2, 2), torch.eye(2).expand(3, 2, 2), tmp_path)
    assert program.run({"x": torch.eye(2)[None]})["output"].isfinite().all()
    x = torch.stack([torch.eye(2), torch.tensor([[1.0, 2], [2, 4]]), torch.eye(2)])
    x = x if "definite" not in why else -x
    with pytest.raises(RuntimeError):
        function(x)
    with pytest.raises(Exception, match=why):
        program.run({"x": x})


def test_a_gradient_program_refuses_singular_matrices_too(tmp_path: Path) -> None:
    spec = TensorSpec("x", "float32", ("batch", 2, 2))
    net = Called(lambda x: linalg.solve(x, x + 1))
    forward = capture_forward(net, {"x": torch.eye(2).expand(3, 2, 2)}, [spec])
    program = session_of(capture_gradient(forward), tmp_path, "onnxruntime")
    given = {"x": torch.tensor([[[1.0, 2], [2, 4]]]), "cotangent_output": torch.ones(1, 2, 2)}
    with pytest.raises(Exception, match=r"linalg\.solve: a matrix is singular"):
        program.run(given)


SINGULAR = [
    [[0.0, 0, 0], [0, 0, 0], [0, 0, 0]],
    [[1, 2, 4], [2, 4, 8], [0, 1, 5]],  # exactly, by rows and by columns
    [[0, 1, 2], [0, 3, 4], [0, 5, 6]],
]
ODD = [
    [[0.0, 1, 0], [0, 0, 1], [1, 0, 0]],
    [[1e-20, 1, 2], [1, 1, 0], [3, 1e20, 1]],
    [[1, -1, 1], [1, 1, 1], [-1, 1, 1]],  # of equal sizes the first
    [[1e-30, 0, 0], [0, 1e30, 0], [0, 1, 1]],
]


def test_rows_change_as_in_torch_and_singular_matrices_have_determinants(tmp_path: Path) -> None:
    def function(x: Tensor) -> Results:
        lu, pivots, info = linalg.lu_factor_ex(x)
        return (lu, pivots, info, linalg.det(x), *linalg.slogdet(x), torch.logdet(x))

    x = torch.tensor([*SINGULAR, *ODD], dtype=torch.float64)
    program = session(function, ("batch", "n", "n"), x, tmp_path)
    found = [*program.run({"x": x}).values()]
    for got, expected in zip(found, function(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13, equal_nan=True)
    assert found[2].tolist() == [1, 3, 1, 0, 0, 0, 0]
    x[0, 1, 1] = torch.nan
    for got, expected in zip([*program.run({"x": x}).values()][3:], function(x)[3:], strict=True):
        assert torch.equal(got.isnan(), expected.isnan())


def test_gradients_of_determinants_are_those_of_singular_matrices_too(tmp_path: Path) -> None:
    spec = TensorSpec("x", "float64", ("batch", 3, 3))
    net = Called(lambda x: linalg.det(x))
    x = torch.tensor(SINGULAR, dtype=torch.float64)
    forward = capture_forward(net, {"x": x}, [spec])
    program = session_of(capture_gradient(forward), tmp_path, "onnxruntime")
    found = program.run({"x": x, "cotangent_output": torch.ones(3, dtype=torch.float64)})
    given = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(linalg.det(given).sum(), given)
    torch.testing.assert_close(found["grad/x"], dx, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_of_nothing_there_is_nothing(shape: tuple[int, int], tmp_path: Path) -> None:
    def function(x: Tensor) -> Results:
        lower = linalg.cholesky(definite(x))
        return linalg.inv(x), linalg.det(x), lower, torch.cholesky_solve(x, lower), *linalg.qr(x)

    program = session(function, ("batch", "n", "n"), torch.eye(3).expand(2, 3, 3), tmp_path)
    x = torch.ones(shape[0], shape[1], shape[1])
    for got, expected in zip(program.run({"x": x}).values(), function(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dims", [("n", "m"), (4, "m"), ("n", 4)])
def test_oblong_matrices_have_factors(dims: Sequence[int | str], tmp_path: Path) -> None:
    def function(x: Tensor) -> Results:
        return *linalg.lu_factor(x), *linalg.lu(x)[1:], *linalg.qr(x), *linalg.qr(x, "complete")

    generator = torch.Generator().manual_seed(5)
    program = session(function, dims, torch.randn(4, 4, generator=generator), tmp_path)
    for n, m in (4, 4), (3, 6), (7, 2), (4, 1), (1, 4):
        if dims[0] in ("n", n) and dims[1] in ("m", m):
            x = torch.randn(n, m, generator=generator)
            for got, expected in zip(program.run({"x": x}).values(), function(x), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_reflections_are_multiplied(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)

    def function(x: Tensor) -> Tensor:
        return linalg.householder_product(x, x[..., 0, :].sigmoid())

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    program = session(function, ("batch", "n", 3), draw(2, 5, 3), tmp_path)
    for x in (draw(2, 5, 3), draw(3, 8, 3), draw(1, 3, 3)):
        found = program.run({"x": x})["output"]
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5)


def test_complex_matrices_are_refused_by_name(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return linalg.inv(torch.complex(x, x.mT)).real

    spec = TensorSpec("x", "float32", ("batch", 3, 3))
    program = capture_forward(Called(function), {"x": torch.randn(2, 3, 3)}, [spec])
    with pytest.raises(ExportFailed, match="inv"):
        formats.get("onnx").write(program, tmp_path / "f.onnx", formats.Options(tmp_path / "w"))


GLOW = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    '''Glow's step: actnorm, an invertible 1x1 convolution, and an affine coupling.'''

    def __init__(self, channels=4, hidden=8):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, channels, 1, 1) * 0.1)
        self.logs = nn.Parameter(torch.randn(1, channels, 1, 1) * 0.1)
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, hidden, 3, padding=1), nn.ReLU(),
            nn.Conv2d(hidden, channels, 3, padding=1),
        )

    def forward(self, x):
        pixels = x.shape[2] * x.shape[3]
        z = (x + self.bias) * torch.exp(self.logs)
        logdet = self.logs.sum() * pixels
        z = F.conv2d(z, self.weight[:, :, None, None])
        logdet = logdet + torch.slogdet(self.weight)[1] * pixels
        first, second = z.chunk(2, 1)
        shift, scale = self.net(first).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        z = torch.cat([first, (second + shift) * scale], 1)
        logdet = logdet + torch.log(scale).sum((1, 2, 3))
        back = F.conv2d(z, torch.inverse(self.weight)[:, :, None, None])
        return z, logdet, back
"""
PROCESS = """
import math
import torch
from torch import nn

class Net(nn.Module):
    '''A Gaussian process: its posterior's mean and variance, and the evidence.'''

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.noise = nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a, b):
        apart = (a[:, :, None] - b[:, None]).square().sum(-1)
        return torch.exp(-0.5 * apart * torch.exp(self.scale))

    def forward(self, x, y, at):
        k = self.kernel(x, x) + torch.exp(self.noise) * torch.eye(x.shape[1])
        lower = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y, lower)
        between = self.kernel(x, at)
        v = torch.linalg.solve_triangular(lower, between, upper=False)
        evidence = -0.5 * (y * alpha).sum((1, 2)) - lower.diagonal(dim1=1, dim2=2).log().sum(1)
        return between.mT @ alpha, 1 - v.square().sum(1), evidence - math.log(2) * x.shape[1]
"""
KALMAN = """
import torch
from torch import nn

class Net(nn.Module):
    '''A Kalman filter over a sequence of any length, and the likelihood of what was seen.'''

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.eye(4) + torch.randn(4, 4) * 0.1)
        self.c = nn.Parameter(torch.randn(2, 4))
        self.q = nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, seen):
        batch, length, _ = seen.shape
        one, q = torch.eye(4), self.q @ self.q.mT + 0.1 * torch.eye(4)
        mean, p = torch.zeros(batch, 4, 1), one.expand(batch, 4, 4)
        score, means = torch.zeros(batch), []
        for t in range(length):
            mean, p = self.a @ mean, self.a @ p @ self.a.mT + q
            s = self.c @ p @ self.c.mT + torch.eye(2)
            gain = torch.linalg.solve(s, self.c @ p).mT
            off = seen[:, t, :, None] - self.c @ mean
            score = score - torch.linalg.slogdet(s)[1]
            score = score - (off.mT @ torch.linalg.inv(s) @ off).flatten()
            mean, p = mean + gain @ off, (one - gain @ self.c) @ p
            means.append(mean[..., 0])
        return torch.stack(means, 1), score, p
"""
DETERMINANTS = """
import torch
from torch import nn

class Net(nn.Module):
    '''Determinants of matrices in either layout, in turns of any number.'''

    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        p = torch.zeros(x.shape[0])
        for t in range(x.shape[1]):
            r = x[:, t] @ (x[:, t] + 1)
            p = 0.5 * p + torch.det(r.mT + self.q).tanh() + torch.slogdet(r + self.q)[0]
            p = p + torch.logdet((r @ r.mT + torch.eye(3)).mT)
        return p
"""
# What a solver returns has one column after the other.
SOLVED = """
import torch
from torch import nn

class Net(nn.Module):
    '''Turns that carry solutions of linear systems.'''

    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        first = last = self.q.expand(x.shape[0], 3, 3)
        for t in range(x.shape[1]):
            p = x[:, t] @ x[:, t].mT + torch.eye(3)
            first = torch.linalg.solve(p, first + x[:, t])
            last = torch.cholesky_solve(last + x[:, t], torch.linalg.cholesky(p)).mT
        return first, last
"""


@pytest.mark.parametrize(
    ("code", "inputs"),
    [
        (DETERMINANTS, ["x:[batch,length,3,3]"]),
        (SOLVED, ["x:[batch,length,3,3]"]),
        (GLOW, ["x:[batch,4,h,w]"]),
        (PROCESS, ["x:[batch,n,3]", "y:[batch,n,1]", "at:[batch,m,3]"]),
        (KALMAN, ["seen:[batch,length,2]"]),
    ],
    ids=["determinants", "solved", "Glow", "Gaussian process", "Kalman filter"],
)
def test_models_are_exported_and_verified(code: str, inputs: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(code)
    scope: dict[str, Any] = {}
    exec(code, scope)
    torch.manual_seed(3)
    torch.save(scope["Net"]().state_dict(), tmp_path / "w.pth")
    model = f"{tmp_path}/net.py:Net"
    given: Any = {"model": model, "inputs": parse_inputs(inputs), "format": ["onnx", "torchscript"]}
    if code in (DETERMINANTS, SOLVED):
        given["format"].append("exported_program")
    api.export(tmp_path / "w.pth", tmp_path / "b", **given)
    report = api.verify(tmp_path / "b", model=model)
    assert [row for row in report.results if row.verdict != "pass"] == []
    assert {"onnxruntime", "onnx_reference"} <= {row.runtime for row in report.results}
