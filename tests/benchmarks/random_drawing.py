"""Models of statements that are drawn at random, and kept where plain torch runs them."""

import random
import re
import string
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.tests.benchmarks.random_blocks import BLOCKS
from fuseport.tests.benchmarks.random_functions import FUNCTIONS
from fuseport.tests.benchmarks.random_statements import (
    BOOLEANS,
    BUFFERS,
    FLOATS,
    INTEGERS,
    LAYERS,
    PARAMETERS,
)

__all__ = ["SIZES", "WIDTH", "Model", "drawn"]

WIDTH = 6
SIZES = ((2, 5), (3, 8), (1, 7), (4, 4))
_MOST_ELEMENTS, _LARGEST = 20_000, 1e3


@dataclass
class Model:
    """A model's code, and how it is called.

    Attributes:
        number: of the draw.
        text: of a Python file with a class `Net`, whose `forward` takes `x`.
    """

    number: int
    text: str
    names: dict[str, Any] = field(default_factory=dict)

    def module(self) -> nn.Module:
        """The model, with weights that are its own."""
        exec(compile(self.text, f"<model {self.number}>", "exec"), self.names)
        made: nn.Module = self.names["Net"]()
        return made.eval()


def drawn(number: int) -> Model:
    """The model of that number: the same one each time."""
    r = random.Random(f"model {number}")
    while True:
        drawing = _Drawing(r)
        wanted = r.randint(3, 9)
        for _ in range(12 * wanted):
            drawing.extend()
            if len(drawing.statements) == wanted:
                break
        if drawing.outputs():
            return Model(number, drawing.text())


class _Drawing:
    """Statements so far, and what they give at each of several sizes."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.statements: list[str] = []
        self.kinds = {"x": "f"}
        self.used: set[str] = set()
        state = torch.random.get_rng_state()
        torch.manual_seed(r.randrange(2**31))
        self.worlds: list[dict[str, Any]] = [
            {"x": torch.randn(*size, WIDTH, requires_grad=True)} for size in SIZES
        ]
        self.module = _layers()
        torch.random.set_rng_state(state)

    def extend(self) -> None:
        """One more statement, where one that is drawn runs."""
        kind = self.r.choices(("f", "i", "m", "block"), (12, 2, 2, 3))[0]
        name = f"v{len(self.statements)}"
        if kind == "block":
            text, kind = self.r.choice(BLOCKS), "f"
            lines = [line[4:] for line in text.strip("\n").splitlines() if line.strip()]
        else:
            source = {"f": FLOATS + FUNCTIONS, "i": INTEGERS, "m": BOOLEANS}[kind]
            lines = [f"$v = {self.r.choice(source.strip().splitlines())}"]
        slots = self._slots("\n".join(lines))
        if slots is None:
            return
        text = string.Template("\n".join(lines)).substitute(slots, v=name)
        if self._runs(text, name, kind):
            self.statements.append(text)
            self.kinds[name] = kind
            self.used |= {value for value in slots.values() if value in self.kinds}

    def _slots(self, text: str) -> dict[str, str] | None:
        wanted = set(re.findall(r"\$(\w)", text)) - {"v"}
        slots: dict[str, str] = {}
        for slot, kind in (("a", "f"), ("b", "f"), ("i", "i"), ("m", "m")):
            there = [name for name, known in self.kinds.items() if known == kind]
            if slot in wanted and not there:
                return None
            if slot in wanted:  # the latest more often, so that statements hang together
                slots[slot] = self.r.choice([*there, *there[-2:], there[-1]])
        first = self.worlds[0][slots.get("a", "x")]
        rank = max(first.dim(), 1)
        slots["d"] = str(self.r.randrange(rank))
        slots["k"] = str(self.r.randint(1, 3))
        owner = slots.get("a", "x")
        size = f"{owner}.shape[{self.r.randrange(first.dim())}]" if first.dim() else "3"
        slots["n"] = self.r.choice([size, size, f"({size} + 1)", f"max({size} - 1, 1)"])
        return slots

    def _runs(self, text: str, name: str, kind: str) -> bool:
        """Whether it gives such a value at each of the sizes."""
        found = []
        for world in self.worlds:
            names = {**world, "self": self.module, "torch": torch, "F": nn.functional, "nn": nn}
            state = torch.random.get_rng_state()
            try:
                exec(text, names)
            except Exception:  # what torch refuses is no model of anybody's
                return False
            finally:
                torch.random.set_rng_state(state)
            value = names[name]
            if not isinstance(value, Tensor) or not _is(value, kind):
                return False
            found.append(value)
        if len({value.dim() for value in found}) > 1:
            return False
        for world, value in zip(self.worlds, found, strict=True):
            world[name] = value
        return True

    def outputs(self) -> list[str]:
        """The floats that nothing takes, of which one at least hangs on the input."""
        found = [n for n, kind in self.kinds.items() if kind == "f" and n not in self.used | {"x"}]
        hangs = any(self.worlds[0][name].requires_grad for name in found)
        return found if hangs else []

    def text(self) -> str:
        """The file."""
        body = "\n".join(["x = x + self.w * 0.1", *self.statements])  # a checkpoint has weights
        made = [
            *(f"self.{n} = {made}" for n, made in LAYERS.items()
              if re.search(rf"self\.{n}\b", body)),
            *(f"self.{n} = nn.Parameter({made})" for n, made in PARAMETERS.items()
              if re.search(rf"self\.{n}\b", body)),
            *(f"self.register_buffer({n!r}, {made})" for n, made in BUFFERS.items()
              if re.search(rf"self\.{n}\b", body)),
        ]  # fmt: skip
        outputs = self.outputs()
        names = ", ".join(f'"{name}": {name}' for name in outputs)
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "from torch import nn",
                "",
                "",
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in made),
                "",
                "    def forward(self, x):",
                *(f"        {line}" for line in body.splitlines()),
                f"        return {{{names}}}",
                "",
            ]
        )


def _layers() -> nn.Module:
    module = nn.Module()
    for name, made in LAYERS.items():
        setattr(module, name, eval(made, {"nn": nn}))
    for name, made in PARAMETERS.items():
        setattr(module, name, nn.Parameter(eval(made, {"torch": torch})))
    for name, made in BUFFERS.items():
        module.register_buffer(name, eval(made, {"torch": torch}))
    return module.eval()


def _is(value: Tensor, kind: str) -> bool:
    """Whether it is of that kind, and neither empty, nor large, nor without an end."""
    if not 0 < value.numel() <= _MOST_ELEMENTS or value.dim() > 5 or value.is_complex():
        return False
    if kind == "f":
        return value.is_floating_point() and bool((value.abs() <= _LARGEST).all())
    return (value.dtype == torch.bool) == (kind == "m") and not value.is_floating_point()
