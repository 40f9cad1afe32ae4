"""Artifact → session. One file is one runtime, and the file's name is the runtime's: `a__b.py` has
`a+b`, which is `a` with something added.

Sessions run in child processes (`_worker`), which load the artifact, run it and hand tensors back;
the process that judges the results never loads an artifact itself. Modules with a leading
underscore are parts of runtimes.
"""

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.errors import UsageError

__all__ = [
    "RUNTIMES",
    "Differentiable",
    "Runtime",
    "Session",
    "Unsupported",
    "confine",
    "devices",
    "differs",
    "get",
]

RUNTIMES = tuple(
    module.name.replace("__", "+")
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
)
"""The names of all runtimes."""


class Unsupported(Exception):
    """A runtime cannot run this artifact at all, by its nature; the message says why."""


class Session(Protocol):
    """An artifact, loaded.

    One that hands tensors to another process may say what its last call took there: `seconds`. One
    that takes them elsewhere than on the CPU says where: `device`, of torch.
    """

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name; `inputs` by name, in the program's order."""


class Differentiable(Session, Protocol):
    """A session of a runtime with `AUTOGRAD`."""

    def differentiate(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """The forward program's outputs, and gradients as `grad/<name>`, by the runtime's autograd.

        `cotangents` are by output name. None stands where there is no gradient at all.
        """


class Runtime(Protocol):
    """What a module here implements.

    `FORMAT` names the format that it runs; None stands for the model itself. `AUTOGRAD` says
    whether it differentiates a forward program by itself.

    A module may have `DEVICES`, the names of the devices that it runs on (see `_device`) and the
    execution provider of each, None where there are no such things; without it, it is the CPU
    alone.

    A module may have `WRITABLE`, what its children write to beside folders of their own.

    A module may have `differs(ops, device)`, whether it runs programs with these operators of fused
    ops otherwise than another runtime; without it, it always does.

    A module may have `prepare(program)`, which compiles what its children could not: they write to
    no cache. What fails there is tried again in the child, which says why it fails.
    """

    FORMAT: str | None
    AUTOGRAD: bool

    def missing(self) -> str | None:
        """What is not installed, and how to install it; None where the runtime can run."""

    def load(self, artifact: Path, program: Mapping[str, Any]) -> Session:
        """A session on an artifact.

        Args:
            artifact: the file; for `FORMAT` None, the bundle's weights.
            program: its `kind`, `forward` if absent, and what the manifest says: `inputs`,
                `outputs`, and `ops`, the operators in it, where that is known; for `FORMAT` None
                also `architecture` and `code`. `device` is where to run it, the CPU if absent.
                `optimised` is False where a runtime is to run the artifact as it is, for the sake
                of finding a fault, if it can.
        """


def differs(name: str, ops: Collection[str], device: str) -> bool:
    """Whether the runtime runs programs with these operators otherwise than another one does."""
    asked = getattr(get(name), "differs", None)
    return asked is None or asked(ops, device)


def get(name: str) -> Runtime:
    """The runtime of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in RUNTIMES:
        raise UsageError(f"{name} is not a runtime; there are: {', '.join(RUNTIMES)}")
    return cast(Runtime, importlib.import_module(f"{__name__}.{name.replace('+', '__')}"))


def devices(name: str) -> Mapping[str, str | None]:
    """The devices that a runtime runs on, and the execution provider of each, if it has such."""
    found: Mapping[str, str | None] = getattr(get(name), "DEVICES", {"cpu": None})
    return found


def confine(name: str, programs: Sequence[Mapping[str, Any]], folder: Path) -> Bounds | None:
    """What a child of a runtime, with a folder of its own, may do; None: it is not confined.

    A child that runs the user's own code may do what the user may. All others are confined, also
    where the model came from such code: artifacts are not it. What they need compiled is compiled
    now, for they cannot write to the cache.

    Args:
        name: of the runtime.
        programs: that the child will run, all of one bundle.
        folder: the child's own.
    """
    runtime = get(name)
    if any(p.get("own_ops") or (runtime.FORMAT is None and p.get("code")) for p in programs):
        return None
    if (prepare := getattr(runtime, "prepare", None)) is not None:
        for program in programs:
            prepare(program)
    gpu = any(program.get("device", "cpu") != "cpu" for program in programs)
    return Bounds((folder, *getattr(runtime, "WRITABLE", ())), gpu)
