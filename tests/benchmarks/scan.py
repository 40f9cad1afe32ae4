"""How fast is the selective scan on this CPU, beside its floor and other ways to compute it?

    pip install jax mambapy    # contenders; those that are missing are named in the result
    python tests/benchmarks/scan.py [--shape B,D,L,N] [--json FILE] [--rounds R] [--only NAME …]

Everyone computes the same: softplus and bias of the step, skip and gate included, in float32, from
inputs laid out as he likes best; his result is held against ours first. Then all take turns, so
that a busy machine disturbs all alike: figures are medians over the rounds, and ratios medians of
ratios within a round. The floor is the time that the scan's b·d·l·N exponentials alone take on all
threads, over data in the first-level cache, by the fastest exponential that is known here: ours.

Forward + backward gives the gradients of all inputs, for a random cotangent. The C library is told
to keep freed memory, as the arenas of ONNX Runtime and JAX do: fresh pages for a result of 100 MB
cost more than to compute it.
"""

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport import ops
from fuseport.exporter.describe import environment
from fuseport.ops import OPS, build
from fuseport.ops.selective_scan import selective_scan
from fuseport.ops.selective_scan.onnx import DOMAIN, VERSION, functions
from fuseport.ops.selective_scan.reference import selective_scan_gated as reference

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
OPSET = 20
_SHORT = 0.1  # seconds: a faster call is done several times in a turn
_MEMORY_SHARE = 0.7  # of what is available that a contender may be expected to take

Run = Callable[[], Any]


class CannotRun(Exception):
    """Why a contender does not take part."""


class Problem:
    """Inputs (b, d, l) with time last, (d, N) and (b, N, l), and a cotangent of the output."""

    def __init__(self, b: int, d: int, l: int, N: int) -> None:  # noqa: E741
        self.sizes = (b, d, l, N)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.tensors = {
            "u": normal(b, d, l),
            "delta": normal(b, d, l) - 1,
            "A": -torch.arange(1.0, N + 1).repeat(d, 1),
            "B": normal(b, N, l),
            "C": normal(b, N, l),
            "D": normal(d),
            "z": normal(b, d, l),
            "delta_bias": normal(d) * 0.2,
        }
        self.dout = normal(b, d, l)

    def leaves(self, **changed: Tensor) -> list[Tensor]:
        """The inputs in the order of NAMES, as leaves of autograd."""
        return [
            t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for t in {**self.tensors, **changed}.values()
        ]

    def needs(self, copies: int) -> None:
        """CannotRun unless so many float32 tensors (b, d, l, N) fit into memory."""
        b, d, l, N = self.sizes  # noqa: E741
        needed, there = copies * 4 * b * d * l * N, psutil.virtual_memory().available
        if needed > _MEMORY_SHARE * there:
            raise CannotRun(f"would take about {needed / 2**30:.0f} GiB of memory")


def _torch_runs(
    forward: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor
) -> dict[str, Run]:
    def run() -> Tensor:
        with torch.no_grad():
            return forward(*leaves)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(*leaves), leaves, dout)

    return {"forward": run, "forward + backward": both}


def ours(problem: Problem, dtype: torch.dtype = torch.float32) -> dict[str, Run]:
    """The registered op, time last."""
    cast = {n: problem.tensors[n].to(dtype) for n in ("u", "delta", "B", "C", "z")}
    run = lambda *leaves: selective_scan(*leaves, True)  # noqa: E731
    return _torch_runs(run, problem.leaves(**cast), problem.dout.to(dtype))


def ours_channels_last(problem: Problem) -> dict[str, Run]:
    """The same, from (b, l, d) in memory."""
    last = {n: problem.tensors[n].mT.contiguous().mT for n in ("u", "delta", "z")}
    run = lambda *leaves: selective_scan(*leaves, True)  # noqa: E731
    return _torch_runs(run, problem.leaves(**last), problem.dout.mT.contiguous().mT)


def ours_bfloat16(problem: Problem) -> dict[str, Run]:
    """The op on bfloat16, time last."""
    return ours(problem, torch.bfloat16)


def eager_reference(problem: Problem) -> dict[str, Run]:
    """The op's own reference in plain torch, channels last, which suits it best."""
    problem.needs(8)
    last = {n: problem.tensors[n].mT.contiguous().mT for n in ("u", "delta", "z")}

    def run(*leaves: Tensor) -> Tensor:
        return reference(*leaves, True)[0]

    return _torch_runs(run, problem.leaves(**last), problem.dout.mT.contiguous().mT)


def _prepared(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(δ̂ A) and δ̂ u B, (b, l, d, N), of inputs (b, l, d) and (b, l, N)."""
    step = F.softplus(delta + delta_bias)
    return torch.exp(step[..., None] * A), (step * u)[..., None] * B[:, :, None]


def _time_second(problem: Problem) -> dict[str, Tensor]:
    return {n: problem.tensors[n].mT.contiguous() for n in ("u", "delta", "B", "C", "z")}


def torch_compile(problem: Problem) -> dict[str, Run]:
    """torch.compile over torch's associative_scan."""
    from torch._higher_order_ops.associative_scan import associative_scan

    problem.needs(10)

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def scan(u, delta, A, B, C, D, z, delta_bias):  # type: ignore[no-untyped-def]
        decay, drive = _prepared(u, delta, A, B, delta_bias)
        _, h = associative_scan(combine, (decay, drive), dim=1, combine_mode="generic")
        y = (h * C[:, :, None]).sum(-1)
        return (y + D * u) * F.silu(z)

    compiled = torch.compile(scan)
    run = lambda *leaves: compiled(*leaves).mT  # noqa: E731
    return _torch_runs(run, problem.leaves(**_time_second(problem)), problem.dout)


def mamba_py(problem: Problem) -> dict[str, Run]:
    """The parallel scan of mamba.py (package mambapy)."""
    if find_spec("mambapy") is None:
        raise CannotRun("mambapy is not installed")
    from mambapy.pscan import pscan

    problem.needs(12)

    def run(u, delta, A, B, C, D, z, delta_bias):  # type: ignore[no-untyped-def]
        decay, drive = _prepared(u, delta, A, B, delta_bias)
        y = (pscan(decay, drive) @ C[..., None])[..., 0]
        return ((y + D * u) * F.silu(z)).mT

    return _torch_runs(run, problem.leaves(**_time_second(problem)), problem.dout)


def jax_scan(problem: Problem) -> dict[str, Run]:
    """jax.lax.scan over time under jit, time first."""
    if find_spec("jax") is None:
        raise CannotRun("jax is not installed")
    import jax
    import jax.numpy as jnp

    problem.needs(4)
    jax.config.update("jax_platforms", "cpu")
    first = {**problem.tensors, **{n: problem.tensors[n].permute(2, 0, 1) for n in "uzBC"}}
    first["delta"] = problem.tensors["delta"].permute(2, 0, 1)
    arrays = [jnp.asarray(first[n].contiguous().numpy()) for n in NAMES]
    dout = jnp.asarray(problem.dout.permute(2, 0, 1).contiguous().numpy())
    b, d, _, N = problem.sizes

    def scan(u, delta, A, B, C, D, z, delta_bias):  # type: ignore[no-untyped-def]
        def step(h, at):  # type: ignore[no-untyped-def]
            u_t, step_t, B_t, C_t = at
            h = jnp.exp(step_t[..., None] * A) * h + (step_t * u_t)[..., None] * B_t[:, None]
            return h, (h * C_t[:, None]).sum(-1)

        start = jnp.zeros((b, d, N), jnp.float32)
        _, y = jax.lax.scan(step, start, (u, jax.nn.softplus(delta + delta_bias), B, C))
        return (y + D * u) * jax.nn.silu(z)

    forward = jax.jit(scan)
    both = jax.jit(lambda *inputs: jax.vjp(scan, *inputs)[1](dout))

    def run() -> Tensor:
        out = forward(*arrays).block_until_ready()
        return torch.from_numpy(np.array(out)).permute(1, 2, 0)

    # Without the copy, which is only for the comparison.
    run.timed = lambda: forward(*arrays).block_until_ready()  # type: ignore[attr-defined]
    return {"forward": run, "forward + backward": lambda: jax.block_until_ready(both(*arrays))}


def _onnx_model(problem: Problem, backward: bool) -> bytes:
    """One scan node, or a scan node and its backward, with their function bodies."""
    spec = OPS["selective_scan"]
    forward = spec.operator("selective_scan_gated")
    assert forward.backward is not None
    gradient = spec.operator(forward.backward)
    inputs = [n for n in forward.inputs if n != "delta_softplus"]
    outputs = list(forward.outputs[:2])
    domain: dict[str, Any] = {"domain": DOMAIN, "delta_softplus": 1}
    nodes = [onnx.helper.make_node(forward.name, inputs, outputs, **domain)]
    shapes = {n: list(problem.tensors[n].shape) for n in inputs}
    shapes["B"].insert(1, 1)
    shapes["C"].insert(1, 1)
    if backward:
        b, d, l, N = problem.sizes  # noqa: E741
        shapes = {"dout": [b, d, l], "dlast_state": [b, d, N], **shapes}
        taken = [n for n in gradient.inputs if n not in ("chunk_states", "delta_softplus")]
        nodes.append(onnx.helper.make_node(gradient.name, taken, gradient.outputs, **domain))
        outputs = [outputs[0], *gradient.outputs]

    def value(name: str) -> Any:
        return onnx.helper.make_tensor_value_info(
            name, onnx.TensorProto.FLOAT, shapes.get(name, shapes.get(name.removeprefix("d")))
        )

    shapes["out"] = shapes["u"]
    graph = onnx.helper.make_graph(
        nodes, "scan", [value(n) for n in shapes if n != "out"], [value(n) for n in outputs]
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    model = onnx.helper.make_model(
        graph, functions=functions(OPSET), opset_imports=opsets, ir_version=10
    )
    serialized: bytes = model.SerializeToString()
    return serialized


def _onnx_runs(problem: Problem, libraries: tuple[Path, ...]) -> dict[str, Run]:
    import onnxruntime

    b, d, _, N = problem.sizes
    values = {**problem.tensors, "dout": problem.dout, "dlast_state": torch.zeros(b, d, N)}
    values["B"], values["C"] = values["B"][:, None], values["C"][:, None]

    def session(backward: bool) -> tuple[Any, Any]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for library in libraries:
            options.register_custom_ops_library(str(library))
        opened = onnxruntime.InferenceSession(
            _onnx_model(problem, backward), options, providers=["CPUExecutionProvider"]
        )
        binding = opened.io_binding()  # so that no call copies its inputs
        for entry in opened.get_inputs():
            array = values[entry.name].contiguous().numpy()
            binding.bind_ortvalue_input(entry.name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for entry in opened.get_outputs():
            binding.bind_output(entry.name)
        return opened, binding

    forward, gradient = session(False), session(True)

    def run() -> Tensor:
        forward[0].run_with_iobinding(forward[1])
        return torch.from_numpy(forward[1].get_outputs()[0].numpy())

    run.timed = lambda: forward[0].run_with_iobinding(forward[1])  # type: ignore[attr-defined]
    return {
        "forward": run,
        "forward + backward": lambda: gradient[0].run_with_iobinding(gradient[1]),
    }


def onnxruntime_body(problem: Problem) -> dict[str, Run]:
    """ONNX Runtime on the op's function body, a Scan of standard operators."""
    problem.needs(4)
    return _onnx_runs(problem, ())


def onnxruntime_fused(problem: Problem) -> dict[str, Run]:
    """ONNX Runtime on the same file, with the op's library."""
    try:
        return _onnx_runs(problem, (ops.onnxruntime_library(),))
    except build.BuildError as error:
        raise CannotRun(str(error)) from error


CONTENDERS: dict[str, Callable[[Problem], dict[str, Run]]] = {
    "fuseport": ours,
    "fuseport, channels last": ours_channels_last,
    "fuseport, bfloat16": ours_bfloat16,
    "ONNX Runtime, fuseport's library": onnxruntime_fused,
    "ONNX Runtime, Scan body": onnxruntime_body,
    "reference in eager torch": eager_reference,
    "torch.compile, associative_scan": torch_compile,
    "mamba.py, pscan": mamba_py,
    "JAX, lax.scan under jit": jax_scan,
}


def floor(problem: Problem) -> dict[str, Run]:
    """The exponentials alone: exp(x), and 2^(x·c) as the scan has it."""
    isa = _instruction_set()
    source = build.OPS_FOLDER / "native" / "floor.cpp"
    flags = (f"-DFUSEPORT_ISA={isa}", *build.VARIANTS[isa])
    library = build.Library(f"floor_{isa}", (build.Unit(source, flags),))
    function = ctypes.CDLL(str(build.built(library))).exponentials_per_second
    function.restype = ctypes.c_double
    b, d, l, N = problem.sizes  # noqa: E741
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def seconds(folded: int) -> float:
        repeats = 5000  # of 2048 exponentials: a millisecond or so
        rates = pool.map(lambda _: function(folded, ctypes.c_long(repeats)), range(threads))
        return b * d * l * N / sum(rates)

    return {"exp": lambda: seconds(0), "exp, folded": lambda: seconds(1)}


def _instruction_set() -> str:
    """The one that the kernels choose."""
    import os

    found = torch.cpu.get_capabilities()
    best = "baseline"
    if found.get("avx2") and found.get("fma3"):
        best = "avx2"
        if all(found.get(f"avx512_{part}") for part in ("f", "vl", "dq", "bw")):
            best = "avx512"
    order = list(build.VARIANTS)
    limit = os.environ.get("FUSEPORT_ISA", best)
    return min(best, limit, key=order.index) if limit in order else best


def measure(problem: Problem, rounds: int, only: list[str]) -> dict[str, Any]:
    """Medians of all, in turns."""
    runs: dict[str, dict[str, Run]] = {}
    missing: dict[str, str] = {}
    expected = ours(problem)["forward"]()
    for name, prepare in CONTENDERS.items():
        if only and name not in only:
            continue
        print(f"  {name}", file=sys.stderr)
        try:
            prepared = prepare(problem)
            got = prepared["forward"]()
            error = float((got.float() - expected).norm() / expected.norm())
            if not error < (1e-2 if "bfloat16" in name else 1e-5):
                raise CannotRun(f"is wrong: relative error {error:.1e}")
            prepared = {kind: getattr(run, "timed", run) for kind, run in prepared.items()}
            for kind in list(prepared):
                try:
                    prepared[kind]()
                except (RuntimeError, NotImplementedError, AssertionError) as error:
                    missing[f"{name}: {kind}"] = str(error).splitlines()[0][:200]
                    del prepared[kind]
            runs[name] = prepared
        except CannotRun as error:
            missing[name] = str(error)
        gc.collect()
    alone = floor(problem)
    seconds: dict[str, dict[str, list[float]]] = {n: {k: [] for k in r} for n, r in runs.items()}
    floors: dict[str, list[float]] = {kind: [] for kind in alone}
    for _ in range(rounds):
        for kind, run in alone.items():
            floors[kind].append(run())
        for name, kind, run in _turns(runs):
            time.sleep(0.01)  # the threads of whoever came before may still spin
            taken = [_timed(run)]
            if taken[0] < _SHORT:  # then the first call was the one that warms up
                taken = [_timed(run) for _ in range(min(25, int(_SHORT / taken[0])))]
            seconds[name][kind].append(statistics.median(taken))
    lowest = [min(pair) for pair in zip(*floors.values(), strict=True)]
    return {
        "shape": dict(zip("bdlN", problem.sizes, strict=True)),
        "rounds": rounds,
        "floor_ms": {k: statistics.median(v) * 1e3 for k, v in floors.items()},
        "missing": missing,
        "results": [
            {
                "name": name,
                "kind": kind,
                "ms": statistics.median(taken) * 1e3,
                "times_floor": _ratio(taken, lowest),
                "times_fuseport": _ratio(taken, seconds["fuseport"][kind]),
            }
            for name, kinds in seconds.items()
            for kind, taken in kinds.items()
        ],
    }


def _timed(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _turns(runs: dict[str, dict[str, Run]]) -> Iterator[tuple[str, str, Run]]:
    for name, kinds in runs.items():
        for kind, run in kinds.items():
            yield name, kind, run


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(o / u for o, u in zip(over, under, strict=True))


def _keep_memory() -> None:
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3), in glibc
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", action="append", help="b,d,l,N; may be given several times")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="fuseport is always among them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    _keep_memory()
    ops.register()
    only = ["fuseport", *arguments.only] if arguments.only else []
    measured = []
    for text in arguments.shape or ["1,1536,1024,16", "8,1536,2048,16"]:
        print(text, file=sys.stderr)
        one = measure(Problem(*map(int, text.split(","))), arguments.rounds, only)
        measured.append(one)
        print(f"{text}: floor {one['floor_ms']}")
        for row in one["results"]:
            print(
                f"  {row['name']:34} {row['kind']:20} {row['ms']:9.2f} ms"
                f" {row['times_floor']:8.2f} × floor {row['times_fuseport']:8.2f} × fuseport"
            )
        for name, reason in one["missing"].items():
            print(f"  {name}: {reason}")
    if arguments.json:
        content = {
            "command": "python tests/benchmarks/scan.py " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            "processor": _processor() if platform.system() == "Linux" else platform.processor(),
            "instruction_set": _instruction_set(),
            **environment(),
            "shapes": measured,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
