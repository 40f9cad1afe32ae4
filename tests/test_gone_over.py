"""What takes a dynamic dimension apart and joins the parts again, of any size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        x = self.a(x)
        parts = x.unbind(1)
        return RESULT
"""

RESULTS = {
    "stacked as they are": "torch.stack(x.unbind(0)), torch.stack(parts, -1)",
    "joined as they are": "torch.cat(parts), torch.cat(torch.unbind(x, dim=-2), dim=1)",
    "spread": "torch.stack([*x]), torch.stack(list(parts), 1)",
    "from the second on": "torch.stack(parts[1:]), torch.stack([r.tanh() for r in parts[1:]])",
    "from behind": "torch.stack([r.tanh() for r in reversed(parts)])",
    "one alone": "parts[-1] * parts[0]",
    "twice": "torch.stack([*x, *x])",
    "with others": "torch.stack(parts + (x[:, 0],), 1)",
    "rows": "torch.vstack([r.tanh() for r in x]), torch.hstack(parts)",
    "rows of vectors": "torch.vstack([r.mean(0) for r in x]), torch.hstack([r.sum(0) for r in x])",
    "in depth": "torch.dstack([r.tanh() for r in parts])",
    "counted": "sum(r * len(parts) for r in parts) / len(parts)",
    "split": "torch.cat([r.tanh() for r in x.split(1, 1)], 1), torch.stack(torch.split(x, 1))",
    "chunks": "torch.cat([r + 1 for r in x.chunk(x.size(1), 1)], 1), torch.chunk(x, x.size(0))[0]",
}


@pytest.mark.parametrize("name", RESULTS)
def test_there_are_as_many_as_the_input_has(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(CODE.replace("RESULT", RESULTS[name]))
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, programs="forward",
        format="torchscript",
    )  # fmt: skip
    program = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for batch, length in (1, 2), (3, 5), (2, 41):
            x = torch.randn(batch, length, 3)
            found, wanted = program(x), module(x)
            if isinstance(found, dict):
                found = tuple(found.values())
            torch.testing.assert_close(found, wanted)


def test_a_size_that_hardly_any_other_makes_is_not_fixed(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """Parts of `length // 2 + 1` leave two lengths, and a program for these has no gradient."""
    changed = CODE.replace("x.unbind(1)", "torch.fft.rfft(x, dim=1).real.unbind(1)")
    _, checkpoint, code = saved_net(changed.replace("RESULT", "parts[-1]"))
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="torchscript")
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=code, runtime=["torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()
