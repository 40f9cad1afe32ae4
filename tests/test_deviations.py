"""Gradients of deviations and variances, over as few values as make them infinite or NaN, too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import formats, runtimes
from fuseport.exporter.program import TensorSpec, named_outputs
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SPEC = TensorSpec("x", "float32", ("batch", "length", 3))
RUNTIMES = {
    "torchscript": "torchscript",
    "onnx": "onnxruntime",
    "exported_program": "exported_program",
    "aot_inductor": "aot_inductor",
}
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.std(1),
    lambda x: x.var(1, keepdim=True),
    lambda x: x.var(dim=(0, 1), correction=2),
    lambda x: torch.stack(torch.var_mean(x, 1)),
    lambda x: x.std(0, unbiased=False),
    lambda x: x.transpose(0, 1).std(),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * self.scale
        return tuple(function(x) for function in FUNCTIONS)


@pytest.mark.filterwarnings("ignore:(std|var)")
@pytest.mark.parametrize("name", RUNTIMES)
def test_they_are_torchs_over_one_value_and_over_several(name: str, tmp_path: Path) -> None:
    net, generator = Net().eval(), torch.Generator().manual_seed(0)
    forward = capture_forward(net, {"x": torch.randn(3, 6, 3, generator=generator)}, [SPEC])
    program = capture_gradient(forward)
    writer = formats.get(name)
    file = tmp_path / f"gradient{writer.SUFFIX}"
    writer.write(program, file, formats.Options(tmp_path / "weights.safetensors"))
    outputs = [{"name": s.name, "dtype": s.dtype} for s in program.outputs]
    session = runtimes.get(RUNTIMES[name]).load(file, {"kind": "gradient", "outputs": outputs})
    for batch, length in ((2, 1), (1, 5), (1, 1), (1, 2), (3, 5)):
        x = torch.randn(batch, length, 3, generator=generator, requires_grad=True)
        wanted = named_outputs(net(x))
        seeds = [torch.randn(out.shape, generator=generator) for out in wanted.values()]
        leaves = {"x": x, "scale": net.scale}
        # One after another: NaN of one would hide what others give.
        for number, out in enumerate(wanted.values()):
            given = [s if n == number else torch.zeros_like(s) for n, s in enumerate(seeds)]
            gradients = torch.autograd.grad(
                list(wanted.values()), list(leaves.values()), given, retain_graph=True
            )
            found = session.run(
                {
                    "x": x.detach(),
                    **{f"cotangent_{n}": s for n, s in zip(wanted, given, strict=True)},
                }
            )
            for key, value in zip(leaves, gradients, strict=True):
                torch.testing.assert_close(found[f"grad/{key}"], value, equal_nan=True)
            key = [*wanted][number]
            torch.testing.assert_close(found[key], out.detach(), equal_nan=True)
