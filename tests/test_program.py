"""Forward and gradient programs: their names, their gradients, their sizes, and what is refused."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport import ops
from fuseport.exporter import api, formats
from fuseport.exporter.errors import ExportFailed, Missing
from fuseport.exporter.models import mamba
from fuseport.exporter.models.model import Model, example
from fuseport.exporter.program import Program, TensorSpec, count_nodes, named_outputs
from fuseport.exporter.program.conditions import violated
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SEQUENCE = (TensorSpec("x", "float32", ("batch", "length", 8)),)
SIZES = {"batch": 2, "length": 16}
HELD_OUT = ({"batch": 1, "length": 1}, {"batch": 3, "length": 7}, {"batch": 20, "length": 65})


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    ops.register()


class Everything(nn.Module):
    """Two inputs, one of them integers; several outputs; parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.layer(x) * self.frozen) + self.embedding(ids) * self.scale
        logits = self.head(h) + self.shift
        return {"logits": logits, "best": logits.argmax(-1), "mean": h.mean((1, 2))}


EVERYTHING = (*SEQUENCE, TensorSpec("ids", "int64", ("batch", "length"), 8))


def inputs_of(
    specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: example(spec, sizes, generator) for spec in specs}


def captured(
    module: nn.Module, specs: Sequence[TensorSpec] = SEQUENCE, sizes: Mapping[str, int] = SIZES
) -> tuple[Program, Program]:
    forward = capture_forward(module.eval(), inputs_of(specs, sizes), specs)
    return forward, capture_gradient(forward)


def eager(
    module: nn.Module, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs and, as `grad/<name>`, gradients that are there."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    outputs = named_outputs(module(*{**inputs, **leaves}.values()))
    leaves |= {n: p for n, p in module.named_parameters() if p.requires_grad}
    roots = {n: o for n, o in outputs.items() if o.requires_grad}
    gradients = torch.autograd.grad(
        list(roots.values()),
        list(leaves.values()),
        [cotangents[f"cotangent_{n}"] for n in roots],
        allow_unused=True,
    )
    found = {f"grad/{n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
    return {n: o.detach() for n, o in outputs.items()} | found


def cotangents_of(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        outputs = named_outputs(module(*inputs.values()))
    return {
        f"cotangent_{n}": torch.randn(o.shape, dtype=o.dtype)
        for n, o in outputs.items()
        if o.is_floating_point()
    }


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        torch.testing.assert_close(got[name].detach(), value, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture(scope="module")
def programs(module: nn.Module) -> tuple[Program, Program]:
    return captured(module, EVERYTHING)


def test_names_survive(programs: tuple[Program, Program]) -> None:
    forward, gradient = programs
    assert [spec.name for spec in forward.inputs] == ["x", "ids"]
    assert [spec.name for spec in forward.outputs] == ["logits", "best", "mean"]
    assert [spec.name for spec in gradient.inputs] == [
        "x",
        "ids",
        "cotangent_logits",  # none for the integers
        "cotangent_mean",
    ]
    assert [spec.name for spec in gradient.outputs] == [
        "logits",
        "best",
        "mean",
        "grad/x",
        "grad/embedding.weight",  # tied: once; and none for what is frozen
        "grad/layer.weight",
        "grad/layer.bias",
    ]
    assert gradient.none == ("grad/unused",)


def test_dimensions_are_named(programs: tuple[Program, Program]) -> None:
    forward, gradient = programs
    assert [spec.dims for spec in forward.outputs] == [
        ("batch", "length", 8),
        ("batch", "length"),
        ("batch",),
    ]
    assert [spec.dtype for spec in forward.outputs] == ["float32", "int64", "float32"]
    assert gradient.outputs[3].dims == ("batch", "length", 8)
    assert gradient.outputs[4].dims == (8, 8)


def test_a_tied_parameter_is_one_parameter(programs: tuple[Program, Program]) -> None:
    names = {name for name, _ in programs[0].exported.module().named_parameters()}
    assert names == {"embedding.weight", "frozen", "unused", "layer.weight", "layer.bias"}
    state = programs[0].state(requires_grad=True)
    assert {n for n, t in state.items() if not t.requires_grad} == {"frozen", "scale", "shift"}
    assert not any(t.requires_grad for t in programs[1].state(requires_grad=False).values())


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("layout", [transposed, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [SIZES, *HELD_OUT], ids=str)
def test_gradients_at_held_out_sizes_and_layouts(
    module: nn.Module,
    programs: tuple[Program, Program],
    sizes: dict[str, int],
    layout: Callable[[Tensor], Tensor],
) -> None:
    inputs = inputs_of(EVERYTHING, sizes, seed=2)
    cotangents = {n: layout(c) for n, c in cotangents_of(module, inputs).items()}
    inputs["x"] = layout(inputs["x"])
    expected = eager(module, inputs, cotangents)
    forward, gradient = (program.exported.module() for program in programs)
    assert_same(gradient(*inputs.values(), *cotangents.values()), expected)
    outputs = {n: t for n, t in expected.items() if not n.startswith("grad/")}
    assert_same(forward(*inputs.values()), outputs)


class Detached(nn.Module):
    """Regions without gradients, written in several ways, nested too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.a(x).mean(-1, keepdim=True)
            with torch.enable_grad():
                inner = self.b(mean.expand(x.shape))
            stopped = inner * 2
        with torch.autocast("cpu", enabled=False):
            y = self.c(x)
        return y - mean + stopped * x + self.b(x).detach()


class InPlace(nn.Module):
    """Writes to its own intermediate values, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[..., 0] = 0.5
        y[..., 1:3] += x[..., :2]
        y.mul_(2)
        return y.clamp_(min=-1)


class Levels(nn.Module):
    """As Deformable DETR's: sizes in a tensor, from which loops over levels take them."""

    def forward(self, x: Tensor) -> Tensor:
        shapes = torch.as_tensor([(2, 2), (1, 4)], dtype=torch.long)
        parts = x.split([int(height * width) for height, width in shapes], dim=2)
        images = (part.unflatten(2, (h, w)) for part, (h, w) in zip(parts, shapes, strict=True))
        return torch.cat([image.cumsum(2).flatten(2) * image.sum() for image in images], 2)


class Convolution(nn.Module):
    """torch chooses among algorithms by sizes here, and would bound the batch by its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool1d(self.a(x.mT), 3, 1, 1).mT


class Heads(nn.Module):
    """The fake of softplus' derivative is laid out as its input, its kernel as the cotangent."""

    def forward(self, x: Tensor) -> Tensor:
        heads = F.softplus((2 * x).unflatten(2, (2, 4)).transpose(1, 2))
        return heads.contiguous().cumsum(2)


@pytest.mark.parametrize("kind", [Detached, InPlace, Levels, Convolution, Heads])
def test_gradients_are_eagers_in_both_ways(kind: type[nn.Module]) -> None:
    """By the gradient program, and by autograd through the forward program."""
    torch.manual_seed(0)
    module = kind().eval()
    forward, gradient = captured(module)
    for sizes in HELD_OUT:
        if violated(gradient, sizes):
            # torch takes more than one element for granted, when it copies.
            assert kind in (InPlace, Levels)
            continue
        inputs = inputs_of(SEQUENCE, sizes)
        cotangents = cotangents_of(module, inputs)
        expected = eager(module, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)
        assert_same(eager(forward.exported.module(), inputs, cotangents), expected)


class ChannelsLast(nn.Module):
    """As VMamba's layers: a norm over the channels makes images whose channels lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(3), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.adaptive_avg_pool2d(self.conv(normed), 1).flatten(1)


def test_images_whose_channels_lie_together_come_one_at_a_time_too() -> None:
    torch.manual_seed(0)
    module, specs = ChannelsLast().eval(), (TensorSpec("x", "float32", ("batch", 3, 8, 8)),)
    forward = capture_forward(module, inputs_of(specs, {"batch": 2}), specs)
    gradient = capture_gradient(forward)
    for sizes in ({"batch": 1}, {"batch": 3}):
        assert not violated(forward, sizes)
        assert not violated(gradient, sizes)
        inputs = inputs_of(specs, sizes)
        cotangents = cotangents_of(module, inputs)
        expected = eager(module, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)
        assert_same(eager(forward.exported.module(), inputs, cotangents), expected)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.polar(x, x)


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        waves = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        return torch.view_as_real(waves.cumprod(1))


class Data(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.data.abs().amax()


def test_the_data_of_a_tensor_is_it_without_a_gradient() -> None:
    """torch.export makes a constant of it, which it cannot write."""
    forward, gradient = captured(Data())
    x, cotangent = torch.randn(2, 3, 5, 8).unbind()
    torch.testing.assert_close(forward.exported.module()(x), Data()(x))
    found = gradient.exported.module()(x, cotangent)["grad/x"]
    torch.testing.assert_close(found, cotangent / x.abs().amax())


class Smooth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._upsample_bicubic2d_aa.default(x[None], (4, 4), False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Smooth, "for sizes that are numbers alone, as interpolation with antialias: .* --input"),
        (Complex, "output output is torch.complex64, .* torch.view_as_real"),
        (Products, "derivative in the gradient program holds for few sizes of length: give the"),
        (Fixed, "dimension 1 of input x comes out fixed at 16"),
        (Counting, "forward writes to calls"),
        (Overwriting, "forward writes to x"),
        (Branching, "a size or a decision hangs on the values of a tensor"),
    ],
)
def test_what_is_no_program_is_refused_in_one_line(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(ExportFailed, match=reason) as raised:
        captured(kind())
    assert "\n" not in str(raised.value)


def test_graphs_that_torch_prints_of_what_it_refuses_are_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Talking(Branching):
        def forward(self, x: Tensor) -> Tensor:
            print("said by the model", file=sys.stderr)
            return super().forward(x)

    with pytest.raises(ExportFailed):
        captured(Talking())
    printed = capfd.readouterr().err
    assert "said by the model" in printed
    assert "def forward" not in printed


def test_an_operator_without_a_derivative_is_refused() -> None:
    class Zeta(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.zeta(x, x)

    with pytest.raises(ExportFailed, match=r"the gradient program cannot be captured: .*zeta"):
        captured(Zeta())


class Clash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.x


class Constant(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float() * 2


@pytest.mark.parametrize(
    ("module", "specs", "reason"),
    [
        (Clash(), SEQUENCE, "x: an input and a parameter of one name"),
        (Constant(), EVERYTHING[1:], "no floating input, no trainable parameter"),
    ],
)
def test_a_program_without_gradients_is_refused(
    module: nn.Module, specs: Sequence[TensorSpec], reason: str
) -> None:
    with pytest.raises(ExportFailed, match=reason):
        captured(module, specs)


def test_outputs_that_depend_on_nothing_have_no_gradients() -> None:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    _, gradient = captured(Best())
    assert [spec.name for spec in gradient.outputs] == ["output"]
    assert gradient.none == ("grad/x",)


def small(length: int) -> Model:
    config = mamba.MambaConfig(
        d_model=8, n_layer=1, vocab_size=11, d_state=4, d_conv=4, d_inner=16, dt_rank=2
    )
    model = mamba.model(dataclasses.asdict(config))
    torch.manual_seed(0)
    module = mamba.MambaLM(config).eval()
    return dataclasses.replace(model, module=module, sizes={"batch": 2, "length": length})


def test_node_counts_do_not_depend_on_length(tmp_path: Path) -> None:
    def counts(length: int) -> Iterator[int]:
        for program in api.capture(small(length), api.PROGRAMS, seed=0):
            yield len(program.exported.graph.nodes)
            file = tmp_path / f"{program.kind}.onnx"
            formats.get("onnx").write(program, file, formats.Options(tmp_path / "w.safetensors"))
            yield len(onnx.load(file).graph.node)

    assert list(counts(16)) == list(counts(2048))


def test_one_scan_node_for_each_layer_or_none_at_all() -> None:
    model = small(16)
    forward, gradient = api.capture(model, api.PROGRAMS, seed=0)
    assert count_nodes(forward, "fuseport::selective_scan_gated") == 1
    assert count_nodes(gradient, "fuseport::selective_scan_gated") == 1
    assert count_nodes(gradient, "fuseport::selective_scan_gated_backward") == 1
    with pytest.raises(Missing, match="has 1 scan nodes where the model has 2 scans"):
        list(api.capture(dataclasses.replace(model, scans=2), ("forward",), seed=0))


def test_outputs_that_are_counted_wrong_are_refused() -> None:
    with pytest.raises(ExportFailed, match="returned 1 tensors where 2 are named"):
        capture_forward(
            nn.Linear(8, 8), inputs_of(SEQUENCE, SIZES), SEQUENCE, output_names=("a", "b")
        )


def test_a_list_of_outputs_is_numbered() -> None:
    x = torch.ones(2)
    assert list(named_outputs((x, [x, None]))) == ["output_0", "output_1"]
    assert list(named_outputs(x)) == ["output"]
    assert list(named_outputs((x,), ("y",))) == ["y"]


def test_capturing_leaves_the_module_as_it_was(module: nn.Module) -> None:
    before: dict[str, Any] = dict(module.__dict__)
    capture_forward(module, inputs_of(EVERYTHING, SIZES), EVERYTHING)
    assert module.__dict__ == before
    assert "forward" not in module.__dict__
