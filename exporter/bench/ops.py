"""How fast ops run natively, beside their references in plain torch: `fuseport ops bench`.

All take turns in one process, so that a busy machine disturbs all alike, and ratios are those of
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
from fuseport.ops.checks import dtype_name
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec, as_tuple

__all__ = ["SCHEMA", "OpBench", "OpTiming", "bench"]

SCHEMA = "fuseport.ops-bench/2"

_CASES = 2  # of each operator, where the op offers none for the purpose
_TURN_SECONDS = 0.05
_MOST_CALLS = 200


@dataclass(frozen=True)
class OpTiming:
    """One case of an op, natively and by others.

    Attributes:
        op, operator, case: their names.
        shapes: of the tensors, by input.
        dtype: of floating inputs that have no dtype of their own.
        way: `forward`, or `forward + backward`.
        implementation: what runs the op here.
        seconds: of one call, the median.
        peers: the same of others, by name: `reference`, `torch.compile` of it, and `copy`, of as
            many bytes as come in and go out.
        speedups: by name, the median over turns of a peer's time in units of the op's.
    """

    op: str
    operator: str
    case: str
    shapes: Mapping[str, Sequence[int]]
    dtype: str
    way: str
    implementation: str
    seconds: float
    peers: Mapping[str, float]
    speedups: Mapping[str, float]


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
        peers = dict.fromkeys(name for t in self.results for name in t.peers)
        for title in ("operator, case", "first input", ""):
            table.add_column(title, no_wrap=True)
        for title in ("time", *peers):
            table.add_column(title, justify="right", no_wrap=True)
        for t in self.results:
            first = "×".join(map(str, next(iter(t.shapes.values()), ())))
            ratios = (f"{t.speedups[n]:.2f} ×" if n in t.speedups else "" for n in peers)
            name = f"{t.operator}, {t.case}"
            table.add_row(name, first, t.way, f"{t.seconds * 1e3:.3g} ms", *ratios)
        return table

    def lines(self) -> list[str]:
        """What the columns are."""
        return ["Columns after the time: what others take, in units of it; copy is of the bytes."]


def bench(
    specs: Sequence[OpSpec],
    *,
    rounds: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> OpBench:
    """Time ops, forward and with backward, on their `bench` cases or else their largest.

    Args:
        specs: of the ops.
        rounds: of turns.
        seed: of the values.
        dtype: of floating inputs.
        compiled: whether torch.compile of the reference takes part, which compiles for a minute.
        progress: told of each step.
    """
    results: list[OpTiming] = []
    for spec in specs:
        progress(f"{spec.name}: registering, compiling if need be")
        implementation = registration.ensure(spec)
        for case in spec.bench or _largest(spec):
            if dtype in case.dtypes:
                progress(f"{spec.name}: {case.name}")
                results += _timings(spec, case, implementation, rounds, seed, dtype, compiled)
    return OpBench(tuple(results), rounds, environment())


def _largest(spec: OpSpec) -> Iterator[Case]:
    for operator in dict.fromkeys(case.operator for case in spec.cases):
        cases = [c for c in spec.cases if c.operator == operator and torch.float32 in c.dtypes]
        yield from sorted(cases, key=_elements, reverse=True)[:_CASES]


def _elements(case: Case) -> int:
    made = case.make(torch.float32, 0).values()
    return sum(value.numel() for value in made if isinstance(value, Tensor))


def _timings(
    spec: OpSpec,
    case: Case,
    implementation: str,
    rounds: int,
    seed: int,
    dtype: torch.dtype,
    compiled: bool,
) -> Iterator[OpTiming]:
    operator = spec.operator(case.operator)
    made = case.make(dtype, seed)
    shapes = {k: list(v.shape) for k, v in made.items() if isinstance(v, Tensor)}
    ways = ("forward", "forward + backward") if operator.backward else ("forward",)
    for way in ways:
        prepare = _forward if way == "forward" else _both(spec, operator)
        native = prepare(operator, made)
        peers = {"reference": prepare(operator.reference, made)}
        if compiled:
            torch.compiler.reset()  # no recompilation for other shapes: they would be dynamic
            peers["torch.compile"] = prepare(torch.compile(operator.reference), made)
        peers["copy"] = _copy(made, native())
        seconds, speedups = _turns(native, peers, rounds)
        yield OpTiming(
            spec.name,
            operator.name,
            case.name,
            shapes,
            dtype_name(dtype),
            way,
            implementation,
            seconds[0],
            dict(zip(peers, seconds[1:], strict=True)),
            speedups,
        )


def _copy(made: Inputs, results: object) -> Callable[[], object]:
    """A copy that reads and writes as many bytes as all inputs and results have."""
    tensors = [t for t in (*made.values(), *as_tuple(results)) if isinstance(t, Tensor)]  # type: ignore[arg-type]
    source = torch.ones(max(1, sum(t.nbytes for t in tensors) // 2), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


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
    native: Callable[[], object], peers: Mapping[str, Callable[[], object]], rounds: int
) -> tuple[list[float], dict[str, float]]:
    """Medians of one call of each, native first; and of the ratios of turns, by peer."""
    runs = [native, *peers.values()]
    calls = []
    for run in runs:
        run()
        once = min(_seconds(run, 2))
        calls.append(max(1, min(_MOST_CALLS, round(_TURN_SECONDS / max(once, 1e-9)))))
    taken: list[list[float]] = [[] for _ in runs]
    ratios: list[list[float]] = [[] for _ in peers]
    order = list(range(len(runs)))
    for turn in range(rounds):
        medians = [0.0] * len(runs)
        for i in order if turn % 2 == 0 else order[::-1]:
            seconds = _seconds(runs[i], calls[i])
            taken[i] += seconds
            medians[i] = statistics.median(seconds)
        for ratio, other in zip(ratios, medians[1:], strict=True):
            ratio.append(other / medians[0])
    speedups = dict(zip(peers, map(statistics.median, ratios), strict=True))
    return [statistics.median(t) for t in taken], speedups


def _seconds(run: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found
