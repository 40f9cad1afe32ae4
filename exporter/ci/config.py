"""`fuseport.toml` as data: what to export and verify, and what to expect."""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fuseport.exporter import formats, runtimes, shims
from fuseport.exporter.ci.schema import Source, filled
from fuseport.exporter.errors import FuseportError, StorageError, UsageError
from fuseport.exporter.models.given import parse_dynamic, parse_sizes
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import KINDS
from fuseport.exporter.runtimes._device import DEVICES
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["FILE", "Bounds", "Checkpoint", "Config", "Expected", "Limits", "Tolerated", "read"]

FILE = "fuseport.toml"
"""The name that the file has unless another is given."""

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_OF_ALL = (
    "formats", "programs", "runtimes", "device", "strict", "seeds", "limits", "tolerances",
)  # fmt: skip
_VERDICTS = ("fail", "error", "unsupported")


@dataclass(frozen=True)
class Bounds:
    """Tolerances of tensors: |error| ≤ atol + rtol·|truth|; None is that of all, or 0."""

    atol: float | None = None
    rtol: float | None = None


@dataclass(frozen=True)
class Tolerated:
    """Tolerances instead of the rule: of all tensors, and of those that patterns name."""

    atol: float | None = None
    rtol: float | None = None
    tensors: Mapping[str, Bounds] = field(default_factory=dict)

    def tolerances(self) -> Tolerances:
        """As `verify` takes them; of the patterns that fit a name, the most specific counts."""
        bounds = {"*": Bounds(self.atol, self.rtol), **self.tensors}
        return Tolerances(
            {p: bound.atol for p, bound in bounds.items() if bound.atol is not None},
            {p: bound.rtol for p, bound in bounds.items() if bound.rtol is not None},
        )


@dataclass(frozen=True)
class Limits:
    """What a runtime's process may take: seconds for a job, and GiB; and how many run at once."""

    timeout: float = 900.0
    memory: float | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Expected:
    """Rows of a report that are expected not to pass; each field is a pattern, as shells have them.

    Attributes:
        reason: why; it is printed.
        runtime, artifact, program, way, case, tensor: of the rows.
        verdict: what they are expected to be.
    """

    reason: str
    runtime: str = "*"
    artifact: str = "*"
    program: str = "*"
    way: str = "*"
    case: str = "*"
    tensor: str = "*"
    verdict: str = "fail"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, how it is exported, and how the bundle is verified; see `api.export`.

    What is None is as the file says for all checkpoints. Paths are relative to the file.
    `adapter` is a folder of a LoRA adapter, `inputs` a file of examples, `bundle` the folder that
    the bundle is kept in, `seed` that of the export, and `seeds` how many sets of values are
    compared. `device` is where runtimes compute, and what AOTInductor compiles for.
    """

    path: str
    name: str | None = None
    weights: str | None = None
    adapter: str | None = None
    model: str | None = None
    ops: str | None = None
    shim: tuple[str, ...] = ()
    input_shapes: tuple[str, ...] = ()
    inputs: str | None = None
    dynamic: tuple[str, ...] = ()
    size: str | None = None
    dtype: str | None = None
    opset: int = formats.DEFAULT_OPSET
    seed: int = 0
    bundle: str | None = None
    formats: tuple[str, ...] | None = None
    programs: tuple[str, ...] | None = None
    runtimes: tuple[str, ...] | None = None
    device: str | None = None
    strict: bool | None = None
    seeds: int | None = None
    limits: Limits | None = None
    tolerances: Tolerated | None = None
    expected: tuple[Expected, ...] = ()


@dataclass(frozen=True)
class Config:
    """The file: checkpoints, and what holds for each that says nothing else.

    Attributes:
        checkpoint: those of the file; `read` gives each its name and what holds for all.
        report: the folder that reports are written to, relative to the file.
        formats: None for those that an export writes unasked.
        programs: what to export.
        runtimes: None for all that are installed; one that is named must be.
        device: `cpu`, or `cuda` for runtimes on a GPU.
        strict: whether what is unsupported is a mismatch.
        seeds: how many sets of values to compare.
        limits, tolerances: as of a checkpoint.
    """

    checkpoint: tuple[Checkpoint, ...]
    report: str = "fuseport-report"
    formats: tuple[str, ...] | None = None
    programs: tuple[str, ...] = ("forward", "gradient")
    runtimes: tuple[str, ...] | None = None
    device: str = "cpu"
    strict: bool = False
    seeds: int = 1
    limits: Limits = field(default_factory=Limits)
    tolerances: Tolerated = field(default_factory=Tolerated)


def read(path: Path) -> Config:
    """The file's content, checked; paths in it, but for `report`, as they are from here.

    Raises:
        UsageError: there is no such file, it is not TOML, or a key, a type or a name is wrong.
        StorageError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: there is no such file; fuseport ci --init writes one to begin with"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    source = Source(path, text)
    config = filled(Config, table, source, ())
    _check(config, source, ())
    if not config.checkpoint:
        raise source.wrong(("checkpoint",), "there is none: nothing would be verified")
    checked = tuple(
        _complete(checkpoint, config, source, i) for i, checkpoint in enumerate(config.checkpoint)
    )
    for key in ("name", "bundle"):
        found = [getattr(checkpoint, key) for checkpoint in checked]
        for i, value in enumerate(found):
            if value is not None and value in found[:i]:
                raise source.wrong((f"checkpoint[{i}]", key), f"two checkpoints have {value}")
    return replace(config, checkpoint=checked)


def _complete(given: Checkpoint, config: Config, source: Source, index: int) -> Checkpoint:
    """With its name, what holds for all, and paths from the current folder."""
    where = (f"checkpoint[{index}]",)
    _check(given, source, where)
    folder = source.file.parent
    path = _from_here(folder, given.path)
    name = given.name or Path(given.path).stem
    if not re.fullmatch(r"[\w+-][\w.+ -]*", name) or name == "summary":
        raise source.wrong(
            (*where, "name"), f'"{name}" cannot be a file\'s name: letters, digits, ., -, _ and +'
        )
    if given.input_shapes and (given.inputs or given.dynamic):
        reason = "it says all of the inputs: leave inputs and dynamic out"
        raise source.wrong((*where, "input-shapes"), reason)
    defaults = {key: getattr(config, key) for key in _OF_ALL if getattr(given, key) is None}
    return replace(
        given,
        **defaults,
        name=name,
        path=str(path),
        model=_code(folder, given.model),
        ops=_code(folder, given.ops),
        adapter=None if given.adapter is None else str(_from_here(folder, given.adapter)),
        inputs=None if given.inputs is None else str(_from_here(folder, given.inputs)),
        bundle=None if given.bundle is None else str(_from_here(folder, given.bundle)),
    )


def _check(table: Config | Checkpoint, source: Source, where: Sequence[str]) -> None:
    """That names exist and numbers can be.

    Raises:
        UsageError: one cannot.
    """
    _known(table.formats, formats.FORMATS, source, (*where, "formats"))
    _known(table.programs, KINDS, source, (*where, "programs"))
    _known(table.runtimes, runtimes.RUNTIMES, source, (*where, "runtimes"))
    if table.device is not None:
        _known((table.device,), DEVICES, source, (*where, "device"))
    for key in ("formats", "programs", "runtimes"):
        if getattr(table, key) == ():
            raise source.wrong((*where, key), "an empty list: leave the key out")
    if table.seeds is not None and table.seeds < 1:
        raise source.wrong((*where, "seeds"), f"{table.seeds} is not 1 or more")
    if table.limits is not None and table.limits.jobs is not None and table.limits.jobs < 1:
        raise source.wrong((*where, "limits", "jobs"), f"{table.limits.jobs} is not 1 or more")
    for keys, number in _numbers(table):
        if not 0.0 <= number < math.inf:
            raise source.wrong((*where, *keys), f"{number:g} is not a number of 0 or more")
    if isinstance(table, Checkpoint):
        _check_export(table, source, where)


def _check_export(table: Checkpoint, source: Source, where: Sequence[str]) -> None:
    if table.dtype is not None:
        _known((table.dtype,), _DTYPES, source, (*where, "dtype"))
    if table.opset not in formats.OPSETS:
        among = f"{formats.OPSETS[0]} to {formats.OPSETS[-1]}"
        raise source.wrong((*where, "opset"), f"{table.opset} is not one of {among}")
    given: tuple[tuple[str, Callable[[Any], Any], Any], ...] = (
        ("shim", shims.chosen, table.shim),
        ("input-shapes", parse_inputs, table.input_shapes),
        ("dynamic", parse_dynamic, table.dynamic),
        ("size", parse_sizes, table.size),
    )
    for key, parse, value in given:
        try:
            if value is not None:
                parse(value)
        except FuseportError as error:
            raise source.wrong((*where, key), str(error)) from error
    if table.shim and table.model is None:
        raise source.wrong((*where, "shim"), "shims are for model code: set model too")
    for i, row in enumerate(table.expected):
        here = (*where, f"expected[{i}]")
        _known((row.verdict,), _VERDICTS, source, (*here, "verdict"))
        if not row.reason.strip():
            raise source.wrong((*here, "reason"), "say why these rows are expected not to pass")
        if row.runtime.isidentifier():  # no pattern
            _known((row.runtime,), (*runtimes.RUNTIMES, "float64"), source, (*here, "runtime"))


def _known(
    names: Sequence[str] | None, known: Sequence[str], source: Source, where: Sequence[str]
) -> None:
    for name in names or ():
        if name not in known:
            raise source.wrong(where, f'there is no "{name}"; there are: {", ".join(known)}')


def _numbers(table: Config | Checkpoint) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number that must not be negative, by its keys."""
    found: dict[tuple[str, ...], Any] = {}
    if table.limits is not None:
        found["limits", "timeout"] = table.limits.timeout
        found["limits", "memory"] = table.limits.memory
    if table.tolerances is not None:
        found["tolerances", "atol"] = table.tolerances.atol
        found["tolerances", "rtol"] = table.tolerances.rtol
        for pattern, bounds in table.tolerances.tensors.items():
            found["tolerances", "tensors", pattern, "atol"] = bounds.atol
            found["tolerances", "tensors", pattern, "rtol"] = bounds.rtol
    return ((key, number) for key, number in found.items() if number is not None)


def _from_here(folder: Path, path: str) -> Path:
    """A path of the file, from the current folder."""
    return Path(os.path.relpath(folder / path))


def _code(folder: Path, place: str | None) -> str | None:
    """Code that a path names, from the current folder; a module's name stays."""
    if place is None:
        return None
    path, colon, function = place.rpartition(":") if ":" in place else (place, "", "")
    if path.endswith(".py") or "/" in path or (folder / path).exists():
        return f"{_from_here(folder, path)}{colon}{function}"
    return place
