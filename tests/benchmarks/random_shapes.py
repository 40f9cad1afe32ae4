"""Ops at random shapes, flags, dtypes and memory layouts, against their references in float64.

    python tests/benchmarks/random_shapes.py               # writes results/random_shapes.json
    python tests/benchmarks/random_shapes.py --device cuda --jobs 16
    python tests/benchmarks/random_shapes.py --device stand-in    # CUDA kernels, run by the CPU
    python tests/benchmarks/random_shapes.py --op selective_scan --count 50 --json -

Each draw is judged as `fuseport ops check` judges a case: outputs and gradients may be a small
factor worse than plain torch in the same dtype is. Many sizes are at the edges of blocks of 16 to
256, where kernels err; the stand-in for a GPU, which is slow, has smaller ones, and in each draw
another number of multiprocessors, order of threads and amount of shared memory. The exit code is 1
if one fails, with the draw's number, which `--first` begins at; 5 where there is no such device.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.describe import environment
from fuseport.exporter.verify.op_check import surroundings
from fuseport.exporter.verify.op_check.gradients import standard
from fuseport.exporter.verify.op_check.subject import (
    LAYOUTS,
    Point,
    Subject,
    cotangents,
    differentiated,
    outputs,
)
from fuseport.ops import OPS, registration
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec
from fuseport.tests.benchmarks.random_draws import DRAWS, Source
from fuseport.tests.ops.cuda_on_cpu import stand_in

__all__ = ["DRAWS", "drawn", "judged", "main", "tried"]

RESULTS = Path(__file__).parent / "results" / "random_shapes.json"
MISSING = 5
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)

STAND_IN, STAND_INS_MOST = "stand-in", 80


def drawn(op: str, number: int, device: str = "cpu") -> Point:
    """The draw of that number: the same one each time."""
    r = Source(f"{op} {number}")
    if device == STAND_IN:
        r.most = STAND_INS_MOST
    operator, shape = DRAWS[op](r)
    layout = r.choice(["as it is", *LAYOUTS])
    return Point(Case(repr(shape), operator, shape.make), r.choice(DTYPES), number, layout)


def moved(inputs: Inputs, device: str) -> Inputs:
    """On the device, laid out in memory as they are."""
    return {k: _placed(v, device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _placed(t: Tensor, device: str) -> Tensor:
    if device == "cpu" or t.numel() == 0:
        return t.to(device)
    # `to` packs what has gaps: the buffer goes there whole.
    buffer = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return buffer.as_strided(t.shape, t.stride(), t.storage_offset())


@cache
def _ready(op: str, device: str) -> None:
    """Registered, with a kernel of its own for the device."""
    spec = OPS[op]
    registration.ensure(spec)
    if device == STAND_IN:
        with stand_in.device(spec):  # compiled now
            return
    for operator in spec.operators:
        name = operator.qualified_name
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()):
            raise RuntimeError(f"{name} has no kernel for {device}")


def tried(op: str, number: int, device: str) -> tuple[str | None, bool]:
    """What is wrong at a draw, None for nothing; and whether the op took it at all."""
    return judged(op, drawn(op, number, device), device)


def judged(op: str, point: Point, device: str) -> tuple[str | None, bool]:
    """The same at a point, whichever device it was drawn for."""
    _ready(op, device)
    spec, number = OPS[op], point.seed
    subject = Subject(spec, (point.case,), number)
    operator, given = subject.forward(point.case), point.inputs()
    try:
        outputs(operator.reference, given)
    except ValueError:  # a layout of ours: sizes of levels that are all the first one, for example
        if point.layout == "as it is":
            raise
        return None, False
    with surroundings():
        seeds = cotangents(subject, operator, given, "as it is") if operator.backward else None
        right = standard(subject, operator, given, seeds)
        found: dict[str, Tensor | None]
        if device == STAND_IN:
            found = _emulated(spec, operator, given, seeds or {}, number)
        elif seeds is None:
            results = outputs(operator, moved(given, device))
            found = dict(zip(operator.outputs, results, strict=True))
        else:
            there = moved(given, device), moved(seeds, device)
            found = differentiated(subject, operator, operator, *there)
        fault = right.fault({n: None if t is None else t.cpu() for n, t in found.items()})
    return None if fault is None else f"{op} {number}: {point}: {fault}", True


def _emulated(
    spec: OpSpec, operator: Operator, given: Inputs, seeds: Inputs, number: int
) -> dict[str, Tensor | None]:
    """Outputs and gradients as `differentiated` names them, from CUDA kernels on the stand-in."""
    r = random.Random(number)
    with stand_in.device(spec) as device:
        device.multiprocessors(r.choice((1, 2, 7, 132)))
        device.order(r.randrange(4))
        device.shared_memory(r.choice((99, 163, 227)))
        found = device.forward_and_backward(operator, given, seeds)
    named: dict[str, Tensor | None] = {name: found[name] for name in operator.outputs}
    if operator.backward:
        named |= {f"grad/{n}": found["d" + n] for n in spec.differentiable(operator)[0]}
    return named


def _batch(task: tuple[str, Sequence[int], str]) -> tuple[str, int, int, list[str]]:
    op, numbers, device = task
    torch.set_num_threads(1)
    taken, faults = 0, []
    for number in numbers:
        try:
            fault, took = tried(op, number, device)
        except Exception as error:  # whatever an op raises is a finding
            fault, took = f"{op} {number}: {drawn(op, number, device)}: raises {error!r}", True
        taken += took
        faults += [] if fault is None else [fault]
    return op, len(numbers), taken, faults


def _tasks(ops: Sequence[str], first: int, count: int, device: str) -> Iterator[Any]:
    """Some draws of one op each, so that processes end at about the same time."""
    each = 20
    for begin in range(first, first + count, each):
        for op in ops:
            yield op, range(begin, min(begin + each, first + count)), device


def _done(tasks: Iterator[Any], jobs: int) -> Iterator[tuple[str, int, int, list[str]]]:
    """What comes of tasks, in their order; one job is this process, which a tool may watch."""
    if jobs == 1:
        yield from map(_batch, tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_batch, tasks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda", STAND_IN), default="cpu")
    parser.add_argument("--op", action="append", choices=DRAWS)
    parser.add_argument("--count", type=int, default=10_000, help="of all ops together")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write; - for nowhere")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("nothing is tried: torch sees no GPU", file=sys.stderr)
        return MISSING
    ops, begin = chosen.op or list(DRAWS), time.monotonic()
    for op in ops:  # compiled once, not by each process
        _ready(op, chosen.device)
    each = -(-chosen.count // len(ops))
    rows = {op: {"op": op, "draws": 0, "taken": 0, "faults": []} for op in ops}
    tasks = _tasks(ops, chosen.first, each, chosen.device)
    for op, draws, taken, faults in _done(tasks, chosen.jobs):
        row: Any = rows[op]
        row["draws"], row["taken"] = row["draws"] + draws, row["taken"] + taken
        row["faults"] += faults
        for fault in faults:
            print(fault, flush=True)
    wrong = sum(len(row["faults"]) for row in rows.values())  # type: ignore[arg-type]
    taken = sum(row["taken"] for row in rows.values())  # type: ignore[misc]
    print(f"{taken} draws of {len(ops)} ops on {chosen.device}, {wrong} wrong")
    if str(chosen.json) != "-":
        content = {
            "command": "python tests/benchmarks/random_shapes.py " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            "device": chosen.device,
            "seconds": round(time.monotonic() - begin),
            **environment(),
            "results": list(rows.values()),
        }
        known = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
        chosen.json.write_text(json.dumps({**known, chosen.device: content}, indent=1) + "\n")
    if not taken:
        print("nothing was tried", file=sys.stderr)
        return 6
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
