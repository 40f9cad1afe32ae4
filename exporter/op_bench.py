"""How fast ops run natively, beside their references in plain torch: `fuseport ops bench`.

Both take turns in one process, so that a busy machine disturbs both alike, and ratios are those of
turns.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from fuseport.exporter.describe import environment
from fuseport.ops import registration
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec, as_tuple

__all__ = ["SCHEMA", "OpBench", "OpTiming", "bench"]

SCHEMA = "fuseport.ops-bench/1"

_CASES = 2  # of each operator, where the op offers none for the purpose
_TURN_SECONDS = 0.05
_MOST_CALLS = 200


@dataclass(frozen=True)
class OpTiming:
    """One case of an op in float32, natively and by its reference.

    Attributes:
        op, operator, case: their names.
        shapes: of the tensors, by input.
        way: `forward`, or `forward + backward`.
        implementation: what runs the op here.
        seconds, reference_seconds: of one call, the medians.
        speedup: the median over turns of the reference's time in units of the op's.
    """

    op: str
    operator: str
    case: str
    shapes: Mapping[str, Sequence[int]]
    way: str
    implementation: str
    seconds: float
    reference_seconds: float
    speedup: float


@dataclass(frozen=True)
class OpBench:
    """All timings, and where they were taken."""

    results: tuple[OpTiming, ...]
    rounds: int
    environment: Mapping[str, Any]

    def to_json(self) -> str:
        """JSON, version 1."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def table(self) -> Table:
        """For a terminal."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for title in ("operator, case", "first input", ""):
            table.add_column(title, no_wrap=True)
        for title in ("time", "reference", "speedup"):
            table.add_column(title, justify="right", no_wrap=True)
        for t in self.results:
            first = "×".join(map(str, next(iter(t.shapes.values()), ())))
            times = (f"{s * 1e3:.3g} ms" for s in (t.seconds, t.reference_seconds))
            name = f"{t.operator}, {t.case}"
            table.add_row(name, first, t.way, *times, f"{t.speedup:.2f} ×")
        return table


def bench(
    specs: Sequence[OpSpec],
    *,
    rounds: int = 10,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> OpBench:
    """Time ops, forward and with backward, on their `bench` cases or else their largest.

    Args:
        specs: of the ops.
        rounds: of turns.
        seed: of the values.
        progress: told of each step.
    """
    results: list[OpTiming] = []
    for spec in specs:
        progress(f"{spec.name}: registering, compiling if need be")
        implementation = registration.ensure(spec)
        for case in spec.bench or _largest(spec):
            progress(f"{spec.name}: {case.name}")
            results += _timings(spec, case, implementation, rounds, seed)
    return OpBench(tuple(results), rounds, environment())


def _largest(spec: OpSpec) -> Iterator[Case]:
    for operator in dict.fromkeys(case.operator for case in spec.cases):
        cases = [c for c in spec.cases if c.operator == operator and torch.float32 in c.dtypes]
        yield from sorted(cases, key=_elements, reverse=True)[:_CASES]


def _elements(case: Case) -> int:
    made = case.make(torch.float32, 0).values()
    return sum(value.numel() for value in made if isinstance(value, Tensor))


def _timings(
    spec: OpSpec, case: Case, implementation: str, rounds: int, seed: int
) -> Iterator[OpTiming]:
    operator = spec.operator(case.operator)
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    made = case.make(dtype, seed)
    shapes = {k: list(v.shape) for k, v in made.items() if isinstance(v, Tensor)}
    ways = ("forward", "forward + backward") if operator.backward else ("forward",)
    for way in ways:
        prepare = _forward if way == "forward" else _both(spec, operator)
        native, plain = prepare(operator, made), prepare(operator.reference, made)
        seconds, reference, ratios = _turns(native, plain, rounds)
        yield OpTiming(
            spec.name,
            operator.name,
            case.name,
            shapes,
            way,
            implementation,
            seconds,
            reference,
            ratios,
        )


def _forward(run: Callable[..., Any], made: Inputs) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return run(*made.values())

    return call


def _both(
    spec: OpSpec, operator: Operator
) -> Callable[[Callable[..., Any], Inputs], Callable[[], object]]:
    takes = spec.differentiable(operator)[1]

    def prepare(run: Callable[..., Any], made: Inputs) -> Callable[[], object]:
        leaves = [
            value.detach().requires_grad_(value.is_floating_point() or value.is_complex())
            if isinstance(value, Tensor)
            else value
            for value in made.values()
        ]
        wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

        def results() -> list[Tensor]:
            found = as_tuple(run(*leaves))
            named = dict(zip(operator.outputs, found, strict=True))
            return [named[name] for name in takes]

        generator = torch.Generator().manual_seed(0)
        seeds = [torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y) for y in results()]
        return lambda: torch.autograd.grad(results(), wanted, seeds, allow_unused=True)

    return prepare


def _turns(
    one: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Medians of one call of each, and of the ratio of turns, the other's to the one's."""
    calls = []
    for run in (one, other):
        run()
        once = _seconds(run, 1)[0]
        calls.append(max(1, min(_MOST_CALLS, round(_TURN_SECONDS / max(once, 1e-9)))))
    taken: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for turn in range(rounds):
        medians = [0.0, 0.0]
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds = _seconds((one, other)[i], calls[i])
            taken[i].extend(seconds)
            medians[i] = statistics.median(seconds)
        ratios.append(medians[1] / medians[0])
    return statistics.median(taken[0]), statistics.median(taken[1]), statistics.median(ratios)


def _seconds(run: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found
