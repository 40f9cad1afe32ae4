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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
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
from fuseport.ops.causal_conv1d.cases import _Shape as ConvShape
from fuseport.ops.causal_conv1d_update.cases import _Shape as ConvStepShape
from fuseport.ops.correlation.cases import _Shape as CorrelationShape
from fuseport.ops.cross_scan.cases import ImageShape
from fuseport.ops.deform_conv2d.cases import _Shape as DeformConvShape
from fuseport.ops.gated_delta_rule.cases import _Shape as DeltaShape
from fuseport.ops.ms_deform_attn.cases import _Shape as DeformShape
from fuseport.ops.nf4_linear.cases import _Shape as LinearShape
from fuseport.ops.nf4_linear.storage import QUANT_TYPES
from fuseport.ops.rms_norm.cases import NormShape
from fuseport.ops.rotary_embedding.cases import _Shape as RotaryShape
from fuseport.ops.selective_scan.cases import _Shape as ScanShape
from fuseport.ops.selective_state_update.cases import _Shape as StateShape
from fuseport.ops.softmax_cross_entropy.cases import _Shape as LossShape
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec
from fuseport.ops.ssd_chunk_scan.cases import _Shape as ChunkShape
from fuseport.ops.swiglu.cases import _Shape as GatedShape
from fuseport.tests.ops.cuda_on_cpu import stand_in

__all__ = ["DRAWS", "drawn", "judged", "main", "tried"]

RESULTS = Path(__file__).parent / "results" / "random_shapes.json"
MISSING = 5
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)

STAND_IN, STAND_INS_MOST = "stand-in", 80


class Source(random.Random):
    """What is drawn from; no size is more than `most`."""

    most = 10_000


Draw = Callable[[Source], tuple[str, Any]]


def size(r: Source, most: int) -> int:
    """From 1 to `most`: as often small as large, and often beside a power of two."""
    most = min(most, r.most)
    if r.random() < 0.4:
        edges = [n + off for n in (16, 32, 64, 128, 256) for off in (-1, 0, 1) if n + off <= most]
        if edges:
            return r.choice(edges)
    return min(most, int(2 ** r.uniform(0, torch.tensor(most + 0.999).log2().item())))


def flag(r: Source) -> bool:
    return r.random() < 0.5


def divisor(r: Source, of: int) -> int:
    return r.choice([n for n in range(1, of + 1) if of % n == 0])


def _scan(r: Source) -> tuple[str, Any]:
    d = size(r, 130)
    groups: tuple[int | None, ...] = (None, 0, divisor(r, d), divisor(r, d))
    shape = ScanShape(
        b=size(r, 4),
        d=d,
        l=size(r, 300),
        N=size(r, 40),
        B_groups=r.choice(groups),
        C_groups=r.choice(groups),
        skip=flag(r),
        gated=flag(r),
        bias=flag(r),
        softplus=flag(r),
        complex=r.random() < 0.2,
    )
    return "selective_scan_gated" if shape.gated else "selective_scan", shape


def _conv(r: Source) -> tuple[str, Any]:
    packed = tuple(r.choice((-1, 0, 1, 2, 7)) for _ in range(r.randrange(1, 6)))
    shape = ConvShape(
        b=size(r, 4),
        d=size(r, 130),
        l=size(r, 600),
        W=size(r, 9),
        bias=flag(r),
        silu=flag(r),
        packed=packed if flag(r) else (),
        wide_weight=flag(r),
    )
    return "causal_conv1d_packed" if shape.packed else "causal_conv1d", shape


def _conv_step(r: Source) -> tuple[str, Any]:
    width = size(r, 9)
    slots = max(width - 1, 1) + size(r, 8) - 1
    circular = tuple(r.randrange(0, 3 * slots) for _ in range(4)) if flag(r) else ()
    shape = ConvStepShape(
        b=size(r, 8),
        d=size(r, 300),
        l=size(r, 12),
        W=width,
        slots=slots,
        silu=flag(r),
        seqlens=circular,
        wide_weight=flag(r),
    )
    return "causal_conv1d_update_circular" if circular else "causal_conv1d_update", shape


def _state(r: Source) -> tuple[str, Any]:
    h = size(r, 12)
    shape = StateShape(
        b=size(r, 6),
        h=h,
        d=size(r, 130),
        N=size(r, 130),
        g=divisor(r, h),
        gated=flag(r),
        softplus=flag(r),
        first=flag(r),
        wide_state=flag(r),
    )
    return "selective_state_update_gated" if shape.gated else "selective_state_update", shape


def _chunk(r: Source) -> tuple[str, Any]:
    H, length = size(r, 12), size(r, 700)
    starts = sorted(r.sample(range(1, length), min(length - 1, r.randrange(0, 4))))
    shape = ChunkShape(
        b=size(r, 3),
        l=length,
        H=H,
        P=size(r, 70),
        N=size(r, 130),
        G=divisor(r, H),
        gated=flag(r),
        softplus=flag(r),
        skip=flag(r),
        initial=flag(r),
        limit=r.choice(((0.0, float("inf")), (0.05, 0.6))),
        packed=((0, 0), *((n + 1, start) for n, start in enumerate(starts))),
    )
    return "ssd_chunk_scan_gated" if shape.gated else "ssd_chunk_scan", shape


def _delta(r: Source) -> tuple[str, Any]:
    H = size(r, 8)
    shape = DeltaShape(
        b=size(r, 3),
        l=size(r, 150),
        G=divisor(r, H),
        H=H,
        K=size(r, 130),
        V=size(r, 130),
        channels=flag(r),
        initial=flag(r),
        forgets=r.choice((-6.0, -1.0, 3.0)),
        scale=r.choice((0.1, 1.0, -2.0)),
    )
    return "gated_delta_rule", shape


def _norm(r: Source, gate: bool | None) -> NormShape:
    d = size(r, 700)
    shape = (*(size(r, 20) for _ in range(r.randrange(1, 3))), d)
    return NormShape(shape, r.choice((None, divisor(r, d))), r.choice((1e-5, 0.1)), flag(r), gate)


def _deform(r: Source) -> tuple[str, Any]:
    levels = tuple((size(r, 20), size(r, 20)) for _ in range(size(r, 4)))
    shape = DeformShape(
        b=size(r, 3),
        h=size(r, 4),
        c=size(r, 70),
        q=size(r, 130),
        P=size(r, 5),
        levels=levels,
        reach=r.choice((0.5, 1.4, 3.0)),
        wide_points=flag(r),
    )
    return "ms_deform_attn", shape


def _deform_conv(r: Source) -> tuple[str, Any]:
    depthwise = r.random() < 0.2
    groups = size(r, 60 if depthwise else 4)
    c, o = (groups * (1 if depthwise else size(r, 40)) for _ in range(2))
    kernel = size(r, 4), size(r, 4)
    dilation = size(r, 3), size(r, 3)
    padding = r.randrange(4), r.randrange(4)
    # So large that the filter is within the padded image.
    reached = zip(dilation, kernel, padding, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in reached]
    shape = DeformConvShape(
        b=size(r, 3),
        c=c,
        o=o,
        image=(least[0] + size(r, 24) - 1, least[1] + size(r, 24) - 1),
        kernel=kernel,
        groups=groups,
        offset_groups=divisor(r, c),
        stride=(size(r, 3), size(r, 3)),
        padding=padding,
        dilation=dilation,
        reach=r.choice((0.5, 1.5, 10.0)),
        modulated=flag(r),
    )
    return "deform_conv2d_modulated" if shape.modulated else "deform_conv2d", shape


def _correlation(r: Source) -> tuple[str, Any]:
    kernel = (1, 1) if flag(r) else (size(r, 4), size(r, 4))
    dilation = size(r, 3), size(r, 3)
    padding = r.randrange(-3, 5), r.randrange(-3, 5)
    # So large that a window is within the padded image.
    reached = zip(dilation, kernel, padding, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in reached]
    shape = CorrelationShape(
        b=size(r, 3),
        c=size(r, 150),
        image=(least[0] + size(r, 24) - 1, least[1] + size(r, 40) - 1),
        kernel=kernel,
        patch=(size(r, 9), size(r, 9)),
        stride=(size(r, 3), size(r, 3)),
        padding=padding,
        dilation=dilation,
        dilation_patch=(size(r, 4), size(r, 4)),
    )
    return "correlation", shape


def _linear(r: Source) -> tuple[str, Any]:
    block = 2 ** r.randrange(4, 9)
    code = r.choice(QUANT_TYPES)
    return "nf4_linear", LinearShape((size(r, 70),), size(r, 600), size(r, 200), block, code)


def _image(r: Source, walks: bool) -> ImageShape:
    return ImageShape(size(r, 4), size(r, 20), size(r, 70), size(r, 70), walks=walks)


def _gated(r: Source) -> tuple[str, Any]:
    shape = GatedShape((size(r, 5), size(r, 20), size(r, 300)), r.choice((1.0, 40.0)))
    return ("swiglu_packed", _Halves(shape)) if flag(r) else ("swiglu", shape)


def _rotary(r: Source) -> tuple[str, Any]:
    pairs = r.choice((0, *(size(r, 80) for _ in range(9))))
    rest = r.choice((0, 0, 0, 8, size(r, 20)))
    of_heads = size(r, 5), size(r, 40), size(r, 130)
    shape = RotaryShape(*of_heads, 2 * pairs + rest, pairs, flag(r), flag(r), flag(r))
    return "rotary_embedding", shape if shape.p else replace(shape, p=1)


def _loss(r: Source) -> tuple[str, Any]:
    n, classes = size(r, 40), size(r, 5000)
    ignored = tuple(i for i in range(n) if r.random() < 0.2)
    smoothing = r.choice((0.0, 0.0, 0.1, 1.0))
    offset = r.choice((0.0, 0.0, 50.0))
    return "softmax_cross_entropy", LossShape(
        n, classes, r.choice((-100, classes)), ignored, smoothing, r.choice((0.1, 2.0)), offset
    )


@dataclass(frozen=True)
class _Halves:
    """The two tensors of a shape as halves of one."""

    of: GatedShape

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        return self.of.packed(dtype, seed)


DRAWS: dict[str, Draw] = {
    "selective_scan": _scan,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_step,
    "selective_state_update": _state,
    "ssd_chunk_scan": _chunk,
    "gated_delta_rule": _delta,
    "rms_norm": lambda r: ("rms_norm", _norm(r, None)),
    "rms_norm_gated": lambda r: ("rms_norm_gated", _norm(r, flag(r))),
    "correlation": _correlation,
    "deform_conv2d": _deform_conv,
    "ms_deform_attn": _deform,
    "nf4_linear": _linear,
    "cross_scan": lambda r: ("cross_scan", _image(r, walks=False)),
    "cross_merge": lambda r: ("cross_merge", _image(r, walks=True)),
    "swiglu": _gated,
    "rotary_embedding": _rotary,
    "softmax_cross_entropy": _loss,
}
"""By op: the operator and what a case of it is made from, drawn."""


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
