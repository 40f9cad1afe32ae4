"""What model code counts in its loops over dynamic sizes, beside the number of the turn."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_loops import HEAD

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

COUNTED = {
    "behind the loop": """
        n, left = 0, 40
        for t in range(length):
            h = self.step(h, x[:, t])
            n += 2
            left -= 1
        return h / n + left
""",
    "the last number": """
        for i, row in enumerate(x.unbind(1), 3):
            h = self.step(h, row * i)
        return h * i
""",
    "in a turn": """
        n = 5
        for t in range(length):
            h = self.step(h, x[:, t] * n)
            n += 3
        return h
""",
    "the first turn": """
        n = 0
        for t in range(length):
            h = self.step(h, x[:, t]) if n > 0 else x[:, t] * 2
            n += 1
        return h
""",
    "in a loop within": """
        n = 0
        for i in range(batch):
            g, row = torch.zeros(3), []
            for t in range(length):
                g = self.step(g, x[i, t])
                row.append(g)
                n += 1
            ys.append(torch.stack(row))
        return torch.stack(ys)
""",
    "of another function": """
        def turned(h):
            n = 0
            for t in range(length):
                h = self.step(h, x[:, t])
                n += 1
            return h * n, n
        h, n = turned(h)
        return h + n
""",
}


@pytest.mark.parametrize("name", COUNTED)
def test_it_is_what_all_turns_make_of_it(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    module, checkpoint, code = saved_net(HEAD + COUNTED[name])
    inputs, only = parse_inputs(["x:[batch,length,3]"]), {"programs": "forward"}
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, format="torchscript", **only
    )
    program = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for batch, length in (1, 2), (3, 5), (2, 41):
            x = torch.randn(batch, length, 3)
            torch.testing.assert_close(program(x), module(x))


DECIDED = {
    "up": ("n = 0", "n += 1", "n < 700"),
    "down": ("n = 800", "n -= 1", "n > 5"),
    "twofold": ("n = 1", "n *= 2", "n < 10**9"),
    "every other": ("n = 0", "n += 1", "n % 16 != 15"),
    "by how many there are": ("n = 3", "n += 4", "n < length"),
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_it_decides_in_other_turns_is_refused(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    """A few turns, and those of a program that is held against the model, do not show it."""
    first, more, condition = DECIDED[name]
    body = f"""
        {first}
        for t in range(length):
            h = self.step(h, x[:, t]) if {condition} else h * 0.5
            {more}
        return h
"""
    _, checkpoint, code = saved_net(HEAD + body)
    inputs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed, match=r"some of its turns, as net\.py:21 decides"):
        api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, programs="forward")
