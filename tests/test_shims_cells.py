"""Recurrent cells that xLSTM and FlashRNN compile, against torch's own layers and the paper's."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.runtimes.eager import _explained
from fuseport.exporter.shims import _cuda
from fuseport.exporter.shims._compiled import COMPILER
from fuseport.exporter.shims._cuda_sources import known
from fuseport.tests.by_stand_ins import RUNTIMES, verified

LENGTH, BATCH, HEADS, WIDTH = 6, 3, 2, 4
GATES = {"slstm": (4, 4, 4), "lstm": (4, 4, 4), "gru": (3, 3, 4), "elman": (1, 1, 1)}
STATES = {"slstm": 4, "lstm": 2, "gru": 1, "elman": 1}


@pytest.fixture
def extension(tmp_path: Path) -> Callable[..., Any]:
    """The class of cells that sources bind, `sLSTMFunc` or `FlashRNNFunc`."""

    def made(bound: str, cell: str, *flags: str) -> Any:
        (tmp_path / "cells.cc").write_text(f'pybind11::class_<{bound}>(m, "{bound}")')
        (tmp_path / f"{cell}_pointwise.cu").write_text("// one step\n")
        found = known([tmp_path / "cells.cc", tmp_path / f"{cell}_pointwise.cu"], flags)
        assert found is not None
        return found.functions[bound](True, BATCH, HEADS * WIDTH, HEADS)

    return made


def drawn(cell: str, seed: int = 0) -> list[Tensor]:
    """x, states before the first step, the recurrent kernel and biases, as FlashRNN has them."""
    draw = torch.Generator().manual_seed(seed)
    recurrent, given, gates = GATES[cell]
    shapes = (
        (LENGTH, BATCH, HEADS, given, WIDTH),
        (STATES[cell], BATCH, HEADS, WIDTH),
        (HEADS, WIDTH, recurrent, WIDTH),
        (HEADS, gates, WIDTH),
    )
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    if cell == "slstm":
        tensors[1][2] = tensors[1][2].exp()  # its normaliser is positive
    return tensors


def of_torch(cell: str, x: Tensor, s0: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """The hidden states, (length, batch, heads, width), by torch's layers, head by head."""
    heads = []
    for head in range(HEADS):
        first = [state[None, :, head].contiguous() for state in s0]
        # Torch's order of an LSTM's gates is this one, and of a GRU's it is r, z and the new state.
        order = [1, 2, 0] if cell == "gru" else [*range(kernel.shape[2])]
        over = torch.cat([kernel[head, :, gate] for gate in order], -1).T
        of_inputs = x[:, :, head].flatten(2)
        here = bias[head].flatten()
        beside = torch.zeros_like(here[: over.shape[0]])
        if cell == "gru":
            beside = torch.cat([beside[: 2 * WIDTH], bias[head, 0]])
            here = bias[head, 1:].flatten()
        weights = [torch.eye(len(here), dtype=x.dtype), over, here, beside]
        function = {"lstm": torch.lstm, "gru": torch.gru, "elman": torch.rnn_tanh}[cell]
        hidden = first if cell == "lstm" else first[0]
        given: Any = (of_inputs, hidden, weights, True, 1, 0.0, False, False, False)
        heads.append(function(*given)[0])
    return torch.stack(heads, 2)


def of_paper(cell: str, x: Tensor, s0: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """xLSTM's equations 8 to 14, whose exponentials nothing keeps in range."""
    y, c, n, m = s0
    c, n = c * m.exp(), n * m.exp()
    hidden = []
    for step in x:
        of_y = torch.einsum("bnd,ndge->bnge", y, kernel)
        i, f, z, o = (step + of_y + bias).unbind(2)
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        y = o.sigmoid() * c / n
        hidden.append(y)
    return torch.stack(hidden)


REFERENCES = {"slstm": of_paper, "lstm": of_torch, "gru": of_torch, "elman": of_torch}


def backward(extension: Any, given: Sequence[Tensor], made: Sequence[Tensor], dy: Tensor) -> Any:
    """Gradients of x, states, kernel and bias, of cotangents of hidden states alone."""
    _, _, kernel, bias = given
    cotangents = torch.zeros_like(made[0])
    cotangents[0, 1:] = dy
    transposed = kernel.permute(0, 2, 3, 1).contiguous()
    return extension.backward(transposed, bias, *made, cotangents)


@pytest.mark.parametrize("cell", GATES)
def test_a_cell_is_torch_s_or_the_paper_s_with_its_gradient(
    extension: Callable[..., Any], cell: str
) -> None:
    given = drawn(cell)
    ours = extension("FlashRNNFunc", cell)
    made = ours.forward(True, *given)
    leaves = [t.clone().requires_grad_() for t in given]
    expected = REFERENCES[cell](cell, *leaves)
    torch.testing.assert_close(made[0][0, 1:], expected.detach())
    torch.testing.assert_close(made[0][:, 0], given[1])
    dy = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    gradients = torch.autograd.grad(expected, leaves, dy)
    of_x, *others = backward(ours, given, made, dy)
    of_x = of_x[..., -GATES[cell][1] :, :]  # a GRU's is that of all gates
    for found, gradient in zip([of_x, *others], gradients, strict=True):
        if cell == "slstm" and found is others[0]:  # m is a constant to it
            found, gradient = found[:3], gradient[:3]
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("cell", ["slstm", "lstm"])
def test_xlstm_has_the_same_in_fewer_dimensions(extension: Callable[..., Any], cell: str) -> None:
    given = drawn(cell)
    theirs = extension("FlashRNNFunc", cell).forward(True, *given)
    x, s0, kernel, bias = given
    flat = x.flatten(2), s0.flatten(2), kernel.flatten(2), bias.flatten()
    ours = extension("sLSTMFunc", cell)
    made = ours.forward(True, *flat)
    for a, b in zip(made, theirs, strict=True):
        assert torch.equal(a.flatten(), b.flatten())
    assert made[0].shape == (STATES[cell], LENGTH + 1, BATCH, HEADS * WIDTH)
    dy = torch.ones((LENGTH, BATCH, HEADS * WIDTH), dtype=torch.float64)
    cotangents = torch.zeros_like(made[0])
    cotangents[0, 1:] = dy
    found = ours.backward(flat[2].permute(0, 2, 1).contiguous(), flat[3], *made, cotangents)
    expected = backward(
        extension("FlashRNNFunc", cell), given, theirs, dy.unflatten(2, (HEADS, WIDTH))
    )
    for tensor, like, wanted in zip(found, flat, expected, strict=True):
        assert tensor.shape == like.shape
        torch.testing.assert_close(tensor.flatten(), wanted.flatten())


def test_nothing_before_is_all_of_the_first_step(extension: Callable[..., Any]) -> None:
    x, s0, kernel, bias = drawn("slstm")
    x[0, :, :, 0] = -1000.0  # m would be far above it, of which nothing is there yet
    made = extension("FlashRNNFunc", "slstm").forward(True, x, torch.zeros_like(s0), kernel, bias)
    assert made[0].isfinite().all()
    z, o = (x[0] + bias)[:, :, 2].tanh(), (x[0] + bias)[:, :, 3].sigmoid()
    torch.testing.assert_close(made[0][0, 1], o * z)


def test_gradients_of_hidden_states_are_cut_and_limited(extension: Callable[..., Any]) -> None:
    given = drawn("lstm")
    ours = extension("FlashRNNFunc", "lstm")
    made = ours.forward(True, *given)
    dy = torch.ones((LENGTH, BATCH, HEADS, WIDTH), dtype=torch.float64)
    cotangents = torch.zeros_like(made[0])
    cotangents[0, 1:] = dy
    transposed = given[2].permute(0, 2, 3, 1).contiguous()
    cut = ours.backward_cut(transposed, given[3], *made, cotangents)
    limits = "GRADIENT_RECURRENT_CLIPVAL"
    limited = extension(
        "FlashRNNFunc", "lstm", f"-DFLASHRNN_{limits}_VALID=true", f"-DFLASHRNN_{limits}=0.0"
    )
    nothing = backward(limited, given, made, dy)
    for a, b in zip(cut[:1] + cut[2:], nothing[:1] + nothing[2:], strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(cut[0], backward(ours, given, made, dy)[0])
    assert not cut[1][0].any()


def test_hidden_states_are_limited(extension: Callable[..., Any]) -> None:
    given = drawn("lstm")
    flags = "-DSLSTM_FORWARD_CLIPVAL_VALID=true", "-DSLSTM_FORWARD_CLIPVAL=0.05"
    x, s0, kernel, bias = given
    flat = x.flatten(2), s0.flatten(2), kernel.flatten(2), bias.flatten()
    states = extension("sLSTMFunc", "lstm", *flags).forward(True, *flat)[0][0, 1:]
    assert states.abs().max() == 0.05
    assert (states.abs() < 0.05).any()


def test_other_sources_are_not_taken_for_cells(tmp_path: Path) -> None:
    bound, other = tmp_path / "cells.cc", tmp_path / "other_pointwise.cu"
    bound.write_text('pybind11::class_<sLSTMFunc>(m, "sLSTMFunc")')
    other.write_text("// one step\n")
    assert known([bound, other], []) is None
    cell = tmp_path / "slstm_pointwise.cu"
    cell.write_text("// one step\n")
    assert known([cell], []) is None
    assert known([bound, cell], ["-DFLASHRNN_STABILIZATION_EPSILON=1e-6"]) is None


CODE = """
import os
from pathlib import Path
import torch
from torch.utils.cpp_extension import load

HERE = Path(__file__).parent
FLAGS = ["-DSLSTM_HIDDEN_SIZE=8", "-DSLSTM_FORWARD_CLIPVAL_VALID=false"]

def compiled():
    torch.cuda.current_device()  # by which FlashRNN keeps what it has compiled
    sources = [str(HERE / "slstm.cc"), str(HERE / "slstm_pointwise.cu")]
    return load("slstm_HS8", sources, FLAGS, extra_ldflags=["-L" + os.environ["CUDA_LIB"]])

class Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, func, training, x, states, kernel, bias):
        made, *caches = func.forward(training, x, states, kernel, bias)
        ctx.save_for_backward(kernel, bias, made, *caches)
        ctx.func, ctx.training = func, training
        return made

    @staticmethod
    def backward(ctx, cotangents):
        if not ctx.training:
            raise RuntimeError("backward can only be called in training mode")
        kernel, *others = ctx.saved_tensors
        kernel = kernel.permute(0, 2, 1).contiguous()
        return None, None, *ctx.func.backward(kernel, *others, cotangents.contiguous())

class Net(torch.nn.Module):
    def __init__(self, backward_in_eval=True):
        super().__init__()
        self.given = torch.nn.Linear(5, 32)
        self.kernel = torch.nn.Parameter(torch.zeros(2, 4, 16))
        self.bias = torch.nn.Parameter(torch.zeros(32))
        self.func = compiled().sLSTMFunc(True, 8, 8, 2)
        self.backward_in_eval = backward_in_eval

    def forward(self, x):
        x = self.given(x).transpose(0, 1).contiguous()
        states = x.new_zeros(4, x.shape[1], 8)
        training = self.training or self.backward_in_eval
        made = Cell.apply(self.func, training, x, states, self.kernel, self.bias)
        return made[0][1:].transpose(0, 1)

class Strict(Net):
    def __init__(self):
        super().__init__(backward_in_eval=False)
"""


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint of such a model, and its code."""
    torch.manual_seed(0)
    linear = nn.Linear(5, 32)
    checkpoint, file = tmp_path / "net.pt", tmp_path / "net_of_cells.py"
    weights = {f"given.{name}": value for name, value in linear.state_dict().items()}
    weights |= {"kernel": torch.randn(2, 4, 16) / 2, "bias": torch.randn(32)}
    torch.save(weights, checkpoint)
    file.write_text(CODE)
    (tmp_path / "slstm.cc").write_text('pybind11::class_<sLSTMFunc>(m, "sLSTMFunc")')
    (tmp_path / "slstm_pointwise.cu").write_text("// one step\n")
    return checkpoint, f"{file}:Net"


@pytest.mark.skipif(_cuda.is_there(), reason="there is CUDA to compile for")
def test_a_model_of_it_verifies_at_any_length(saved: tuple[Path, str], tmp_path: Path) -> None:
    verified(tmp_path / "b", saved, ["x:[batch,length,5]"], [COMPILER])


@pytest.mark.skipif(_cuda.is_there(), reason="there is CUDA to compile for")
def test_a_backward_that_refuses_to_be_called_is_no_mismatch(
    saved: tuple[Path, str], tmp_path: Path
) -> None:
    checkpoint, model = saved[0], saved[1].replace(":Net", ":Strict")
    given = parse_inputs(["x:[batch,6,5]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, shim="auto", inputs=given, format=["torchscript"]
    )
    report = api.verify(bundle.folder, model=model, runtime=RUNTIMES[:2])
    assert report.exit_code() == 0, report.failures()
    others = {row.reason for row in report.results if row.verdict != "pass"}
    assert others == {
        "the model's own backward refuses to be called (RuntimeError: backward can only be called "
        "in training mode): artifacts have the gradient of its forward"
    }


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent.view(7)


def test_a_backward_that_fails_is_not_taken_for_one_that_refuses() -> None:
    session = ModuleSession(Broken.apply, [], lambda y: {"y": y}, torch.device("cpu"), _explained)
    with pytest.raises(RuntimeError, match="is invalid for input of size 3"):
        session.differentiate({"x": torch.ones(3)}, {"y": torch.ones(3)})


class Unsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        if saves:
            ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        first, second = cotangent + x
        return torch.stack([first, second]), None


def test_a_backward_whose_forward_saves_nothing_has_no_gradient_to_compare() -> None:
    """As of ViG's recurrent kernel, which is for inference alone."""
    for saves, kind, said in ((True, ValueError, "too many"), (False, Unsupported, "not saved")):
        session = ModuleSession(
            lambda x, saves=saves: Unsaved.apply(x, saves),
            [],
            lambda y: {"y": y},
            torch.device("cpu"),
            _explained,
        )
        with pytest.raises(kind, match=said):
            session.differentiate({"x": torch.ones(3)}, {"y": torch.ones(3)})


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (None, "/theirs"):
        monkeypatch.delenv("CUDA_LIB", raising=False)
        if there is not None:
            monkeypatch.setenv("CUDA_LIB", there)
        with shims.installed(COMPILER):
            assert os.environ["CUDA_LIB"] == there or there is None
        assert os.environ.get("CUDA_LIB") == there
