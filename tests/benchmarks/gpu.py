"""Ops on a GPU, against their peers and against the floor; first of all the selective scan.

    python tests/benchmarks/gpu.py                        # everything; writes results/cuda.json
    python tests/benchmarks/gpu.py --shape 8,1536,2048,16 --dtype bfloat16 --json /tmp/one.json
    python tests/benchmarks/gpu.py --op causal_conv1d --op rms_norm
    python tests/benchmarks/gpu.py --markdown             # README's table, of what was measured

Medians by CUDA events, over inputs that rotate through more than twice the L2. The floor of a pass
is the larger of two times: the bytes of its inputs and outputs, each moved once, over the bandwidth
of a copy, and its exponentials, one for each state and step, over their rate; both rates are
measured in the same run. Without a GPU, or nvcc, it says so and ends with exit code 5. The peer is
`selective_scan_cuda`, built from mamba_ssm's source distribution; without it `peer_us` is null, as
where a peer raises, and `peer` says what. `gpu_memory.py` has ops that memory bounds, `gpu_ops.py`
others. Rows are printed as soon as they are measured, and written as soon as all of an op's are.

It is not called cuda.py: a script's folder comes first among those that torch imports `cuda` from.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from gpu_memory import BENCHES, measure_bench
from gpu_ops import OPERATIONS, measure_op, products_per_second
from gpu_peers import installed_peers, peer_module, peer_time
from torch import Tensor

from fuseport.exporter.describe import environment
from fuseport.ops import OPS, build, cuda, registration
from fuseport.ops.build import BuildError, Library, Unit

SPEC = OPS["selective_scan"]
SHAPES = ("8,1536,2048,16", "1,5120,16384,16", "64,768,196,16")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MISSING = 5
RESULTS = Path(__file__).parent / "results" / "cuda.json"
Run = Callable[[int], Any]


def refuse(reason: str) -> NoReturn:
    print(f"nothing is measured: {reason}", file=sys.stderr)
    sys.exit(MISSING)


def microseconds(run: Run, rounds: int) -> float:
    """The median time of a call; `run(i)` takes the i-th set of inputs."""
    for i in range(3):
        run(i)
    marks = []
    for i in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(i)
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * start.elapsed_time(end) for start, end in marks)


def bytes_per_second() -> float:
    source = torch.randint(0, 256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-6 * microseconds(lambda _: target.copy_(source), 20))


def exponentials_per_second() -> float:
    flags = cuda.compile_command(cuda.architectures())
    unit = Unit(build.OPS_FOLDER / "native" / "floor.cu", tuple(flags[1:-1]), command=lambda: flags)
    path = build.built(Library("floor-cuda", (unit,), build.torch_link("c10_cuda")))
    library = ctypes.CDLL(str(path))
    library.exponentials_threads.restype = ctypes.c_int64
    launch = library.exponentials_launch
    launch.restype = ctypes.c_int64
    launch.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    to = torch.empty(library.exponentials_threads(), device="cuda")
    count = 0

    def run(_: int) -> None:
        nonlocal count
        stream = torch.cuda.current_stream().cuda_stream
        count = launch(4096, to.data_ptr(), stream)

    spent = microseconds(run, 20)
    if count <= 0:
        raise BuildError("the kernel that measures exponentials did not start")
    return count / (1e-6 * spent)


class Inputs:
    """One set: as a Mamba block has them, without a gate."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        b, d, l, states = shape  # noqa: E741
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device="cuda")

        self.u, self.delta = normal(b, d, l).to(dtype), (normal(b, d, l) - 1).to(dtype)
        self.A = -torch.exp(0.5 * normal(d, states))
        self.B, self.C = (normal(b, 1, states, l).to(dtype) for _ in range(2))
        self.D, self.bias = normal(d), 0.2 * normal(d)
        self.dout = normal(b, d, l).to(dtype)
        self.dlast = torch.zeros(b, d, states, device="cuda")

    @property
    def core(self) -> tuple[Tensor, ...]:
        return self.u, self.delta, self.A, self.B, self.C, self.D

    def bytes(self, direction: str) -> int:
        sequences = {"forward": 3, "backward": 5}[direction]  # u, δ, out; u, δ, dout, du, dδ
        others = {"forward": 1, "backward": 2}[direction]  # B and C; and their gradients
        return sum(
            count * t.numel() * t.element_size()
            for count, t in ((sequences, self.u), (others, self.B), (others, self.C))
        )


def theirs(sets: list[Inputs], direction: str, rounds: int) -> float | None:
    """Of mamba_ssm's extension, where it is."""
    found = peer_module("selective_scan_cuda")
    if found is None:
        return None

    def forward(x: Inputs) -> Any:
        return found.fwd(*x.core, None, x.bias, True)

    if direction == "forward":
        return microseconds(lambda i: forward(sets[i % len(sets)]), rounds)
    kept = [forward(x) for x in sets]

    def backward(i: int) -> Any:
        x, (out, states, *_) = sets[i % len(sets)], kept[i % len(sets)]
        return found.bwd(*x.core, None, x.bias, x.dout, states, out, None, True, False)

    return microseconds(backward, rounds)


def measure(
    text: str, name: str, rates: tuple[float, float], rounds: int
) -> Iterator[dict[str, Any]]:
    shape = tuple(map(int, text.split(",")))
    first = Inputs(shape, DTYPES[name], 0)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = 2 + int(2 * cache // first.bytes("forward"))
    sets = [first, *(Inputs(shape, DTYPES[name], seed) for seed in range(1, count))]
    forward, backward = (
        SPEC.operator(operator) for operator in ("selective_scan", "selective_scan_backward")
    )
    saved = [forward(*x.core, x.bias, True)[2] for x in sets]

    def ours(i: int) -> Any:
        x = sets[i % count]
        return forward(*x.core, x.bias, True)

    def ours_back(i: int) -> Any:
        x, states = sets[i % count], saved[i % count]
        return backward(x.dout, x.dlast, *x.core, x.bias, states, True)

    b, d, l, states = shape  # noqa: E741
    for direction, run in {"forward": ours, "backward": ours_back}.items():
        moved, exponentials = first.bytes(direction) / rates[0], b * d * l * states / rates[1]
        yield {
            "op": "selective_scan",
            "shape": list(shape),
            "dtype": name,
            "direction": direction,
            "ours_us": microseconds(run, rounds),
            **peer_time(theirs, sets, direction, rounds),
            "floor_us": 1e6 * max(moved, exponentials),
            "floor_is": "bytes" if moved > exponentials else "exponentials",
        }


def measured(
    ops: Sequence[str], shapes: Sequence[str], name: str, rates: tuple[float, float], rounds: int
) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of one op at one size after the other, in a dtype."""
    if SPEC.name in ops:
        for text in shapes:
            yield measure(text, name, rates, rounds)
    for bench in BENCHES:
        if bench.op in ops:
            yield measure_bench(bench, DTYPES[name], microseconds, rates[0], rounds)
    operations = [operation for operation in OPERATIONS if operation.op in ops]
    if operations:
        of_gpu = rates[0], products_per_second(DTYPES[name], microseconds)
        for operation in operations:
            yield measure_op(operation, name, DTYPES[name], of_gpu, microseconds, rounds)


def line(row: dict[str, Any]) -> str:
    if row["peer_us"] is not None:
        theirs = f"peer {row['peer_us']:.1f} µs"
    else:
        theirs = f"peer raises {row['peer']}" if "peer" in row else "no peer"
    share = row["floor_us"] / row["ours_us"]
    return (
        f"{row['op']} {row['shape']} {row['dtype']} {row['direction']}: "
        f"{row['ours_us']:.1f} µs, {theirs}, {share:.0%} of the floor by {row['floor_is']}"
    )


def markdown(content: dict[str, Any], ops: Sequence[str] | None = None) -> str:
    """Tables: of the results of `ops`, and of how each pass of every op compares with its peer."""
    table: dict[tuple[str, str, str], dict[str, str]] = {}
    faster: dict[tuple[str, str], list[float]] = {}
    for row in content["results"]:
        shape = row["shape"] if isinstance(row["shape"], str) else ",".join(map(str, row["shape"]))
        cell = f"{row['ours_us']:.1f} µs, {row['floor_us'] / row['ours_us']:.0%}"
        if row["peer_us"] is not None:
            ratio = row["peer_us"] / row["ours_us"]
            faster.setdefault((row["op"], row["direction"]), []).append(ratio)
            cell += f", {ratio:.2f} ×"
        if ops is None or row["op"] in ops:
            place = row["op"], f"{shape} {row.get('case', '')}".strip(), row["dtype"]
            table.setdefault(place, {})[row["direction"]] = cell
    lines = [
        f"{content['gpu']}, CUDA {content['cuda']}, torch {content['versions']['torch']}, "
        f"{content['date']}: `{content['command'].strip()}`. The time, the share of the floor that "
        "is reached, and how many times as long the peer takes:",
        "",
        "| op | shape | dtype | forward | backward |",
        "| --- | --- | --- | --- | --- |",
    ]
    for place, cells in table.items():
        passes = (cells.get(direction, "") for direction in ("forward", "backward"))
        lines.append("| " + " | ".join((*place, *passes)) + " |")
    lines += [
        "",
        "| beside its peer | forward, mean | at the least | backward, mean | at the least |",
        "| --- | --- | --- | --- | --- |",
    ]
    for op in dict.fromkeys(op for op, _ in faster):
        found = []
        for direction in ("forward", "backward"):
            ratios = faster.get((op, direction))
            found += (
                [f"{statistics.geometric_mean(ratios):.2f} ×", f"{min(ratios):.2f} ×"]
                if ratios
                else ["", ""]
            )
        lines.append("| " + " | ".join((op, *found)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", action="append", help="b,d,l,N; may be given several times")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    known = sorted({SPEC.name, *(other.op for other in (*BENCHES, *OPERATIONS))})
    parser.add_argument("--op", action="append", choices=known)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true", help="measure nothing: print the table")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(json.loads(arguments.json.read_text(encoding="utf-8")), arguments.op))
        return
    if torch.version.cuda is None:
        refuse(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        refuse("there is no GPU here")
    registration.ensure(SPEC)
    rows: list[dict[str, Any]] = []
    ops = arguments.op or ([SPEC.name] if arguments.shape else known)
    try:
        cuda.load(SPEC)
        rates = bytes_per_second(), exponentials_per_second()
        content = {
            "command": "python tests/benchmarks/gpu.py " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            **environment(),  # whose "cuda" is the GPU's name
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "peers": installed_peers(),
            "bytes_per_second": rates[0],
            "exponentials_per_second": rates[1],
            "results": rows,
        }
        for name in arguments.dtype or DTYPES:
            shapes = arguments.shape or SHAPES
            for of_op in measured(ops, shapes, name, rates, arguments.rounds):
                for row in of_op:
                    rows.append(row)
                    print(line(row), flush=True)
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    except BuildError as error:
        if rows:
            raise
        refuse(str(error))


if __name__ == "__main__":
    main()
