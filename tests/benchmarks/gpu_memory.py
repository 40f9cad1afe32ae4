"""Ops on a GPU that memory bounds, beside their peers: a part of what `gpu.py` measures.

The floor is the bytes of inputs and outputs, each moved once, over the bandwidth of a copy. Calls,
those of peers too, are captured in a CUDA graph: what is timed is the GPU's work alone. Peers are
the `causal-conv1d` extension (from 1.5 on) and mamba_ssm's Triton kernels where they are installed,
and for the plain norm torch's own; where there is none, or it raises, `peer_us` is null.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_peers import peer_module, peer_time
from torch import Tensor

from fuseport.ops import OPS, cuda, registration
from fuseport.ops.spec import Inputs, OpSpec

__all__ = ["BENCHES", "Bench", "measure_bench"]

Known = dict[str, Any]
"""Inputs, outputs and cotangents of an operator, by name."""
Call = Callable[[], Any]
Timer = Callable[[Callable[[int], Any], int], float]


class Draw:
    """Normal numbers on the GPU, of one dtype and seed."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device="cuda")
        return drawn.to(dtype or self.dtype)


@dataclass(frozen=True)
class Bench:
    """An operator at one size.

    `make(draw)` gives its inputs. `forward` and `backward`, given what is known, return a call of
    the peer that does the same, or None.
    """

    op: str
    operator: str
    name: str
    shape: tuple[int, ...]
    make: Callable[[Draw], Inputs]
    forward: Callable[[Known], Call | None]
    backward: Callable[[Known], Call | None] = lambda known: None

    @property
    def spec(self) -> OpSpec:
        return OPS[self.op]


def measure_bench(
    bench: Bench, dtype: torch.dtype, timer: Timer, bytes_per_second: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row of results for each direction; `timer(run, rounds)` gives microseconds of a run.

    BuildError if the op has no CUDA kernels here: nothing else is measured in their place.
    """
    registration.ensure(bench.spec)
    cuda.load(bench.spec)
    operator = bench.spec.operator(bench.operator)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    inputs = bench.make(Draw(dtype, 0))
    count = 2 + int(2 * cache // max(1, moved(inputs.values())))
    sets: list[Known] = [inputs, *(bench.make(Draw(dtype, seed)) for seed in range(1, count))]
    directions = {"forward": (operator, bench.forward)}
    if operator.backward is not None:
        gradient = bench.spec.operator(operator.backward)
        directions["backward"] = (gradient, bench.backward)
        outputs = bench.spec.differentiable(operator)[1]
        for known in sets:
            known.update(zip(operator.outputs, operator(*known.values()), strict=True))
            known.update({f"d{name}": torch.randn_like(known[name]) for name in outputs})
    for direction, (called, peer) in directions.items():
        given = [[known[name] for name in called.inputs] for known in sets]
        ours = [functools.partial(called, *values) for values in given]
        total = moved([*given[0], *called(*given[0])])
        yield {
            "op": bench.op,
            "case": bench.name,
            "shape": list(bench.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "direction": direction,
            "ours_us": in_a_graph(ours, timer, rounds),
            **peer_time(theirs, peer, sets, timer, rounds),
            "floor_us": 1e6 * total / bytes_per_second,
            "floor_is": "bytes",
        }


def theirs(
    peer: Callable[[Known], Call | None], sets: list[Known], timer: Timer, rounds: int
) -> float | None:
    calls = [call for call in map(peer, sets) if call is not None]
    return in_a_graph(calls, timer, rounds) if calls else None


def moved(values: Any) -> int:
    """Bytes of tensors, of expanded ones those that are there."""
    return sum(
        t.element_size()
        * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
        for t in values
        if isinstance(t, Tensor)
    )


def in_a_graph(calls: list[Call], timer: Timer, rounds: int) -> float:
    """Microseconds of a call, of the mean of all."""
    for call in calls:  # compiles and loads what a capture could not
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # none of them writes to what another wrote
    del kept
    return timer(lambda _: graph.replay(), rounds) / len(calls)


def conv_inputs(draw: Draw, b: int, d: int, l: int, channels_last: bool) -> Inputs:  # noqa: E741
    x = draw(b, l, d).mT if channels_last else draw(b, d, l)
    return {
        "x": x,
        "weight": draw(d, 4),
        "bias": draw(d),
        "initial_states": draw(b, d, 3).zero_(),
        "silu": True,
    }


def conv_peer(known: Known) -> Call | None:
    if not (found := peer_module("causal_conv1d.cpp_functions")):
        return None
    x, weight, bias = (known[name] for name in ("x", "weight", "bias"))
    return lambda: found.causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)


def conv_peer_back(known: Known) -> Call | None:
    if not (found := peer_module("causal_conv1d.cpp_functions")):
        return None
    given = [known[name] for name in ("x", "weight", "bias", "dout")]
    return lambda: found.causal_conv1d_bwd_function(*given, None, None, None, None, False, True)


def step_inputs(draw: Draw, b: int, d: int) -> Inputs:
    return {
        "x": draw(b, d, 1),
        "conv_state": draw(b, d, 4),
        "weight": draw(d, 4),
        "bias": draw(d),
        "silu": True,
    }


def step_peer(known: Known) -> Call | None:
    if not (found := peer_module("causal_conv1d.cpp_functions")):
        return None
    given = [known[name] for name in ("x", "conv_state", "weight", "bias")]
    return lambda: found.causal_conv1d_update_function(*given, True, None, None)


def state_inputs(draw: Draw, b: int, h: int, d: int, N: int, one_A: bool) -> Inputs:
    def parameter(*shape: int) -> Tensor:
        wide = draw(*shape, dtype=torch.float32)
        return wide.view(h, 1).expand(h, d) if one_A else wide.view(h, d)

    rate = -draw(h if one_A else h * d * N, dtype=torch.float32).exp()
    dt = draw(b, h, 1).expand(b, h, d) if one_A else draw(b, h, d)
    size = h if one_A else h * d
    return {
        "state": draw(b, h, d, N, dtype=torch.float32),
        "x": draw(b, h, d),
        "dt": dt,
        "A": rate.view(h, 1, 1).expand(h, d, N) if one_A else rate.view(h, d, N),
        "B": draw(b, 1, N),
        "C": draw(b, 1, N),
        "D": parameter(size),
        "z": draw(b, h, d),
        "dt_bias": parameter(size),
        "dt_softplus": True,
    }


def state_peer(known: Known) -> Call | None:
    if not (found := peer_module("mamba_ssm.ops.triton.selective_state_update")):
        return None
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    given = [known[name] for name in names]
    return lambda: found.selective_state_update(*given, dt_softplus=True)


def norm_inputs(draw: Draw, rows: int, d: int, group: int, gated: bool) -> Inputs:
    inputs: Inputs = {"x": draw(rows, d)}
    if gated:
        inputs["z"] = draw(rows, d)
    inputs |= {"weight": draw(d), "eps": 1e-5, "group_size": group}
    return inputs | ({"norm_before_gate": False} if gated else {})


def norm_peer(known: Known) -> Call:
    x, weight, eps = known["x"], known["weight"], known["eps"]
    return lambda: torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)


def norm_peer_back(known: Known) -> Call:
    x, weight, rstd, dout = (known[name] for name in ("x", "weight", "rstd", "dout"))
    backward = torch.ops.aten._fused_rms_norm_backward
    return lambda: backward(dout, x, [x.shape[-1]], rstd, weight, [True, True])


def gated_call(known: Known) -> Callable[[], tuple[Any, ...]] | None:
    if not (found := peer_module("mamba_ssm.ops.triton.layernorm_gated")):
        return None
    x, z, weight, size = (known[name] for name in ("x", "z", "weight", "group_size"))
    return lambda: found._layer_norm_fwd(
        x, weight, None, 1e-5, z=z, group_size=size, norm_before_gate=False, is_rms_norm=True
    )


def gated_back(known: Known) -> Call | None:
    if not (forward := gated_call(known)):
        return None
    found = peer_module("mamba_ssm.ops.triton.layernorm_gated")
    assert found is not None
    _, mean, rstd = forward()
    x, z, weight, dout, size = (known[k] for k in ("x", "z", "weight", "dout", "group_size"))
    options = {"group_size": size, "norm_before_gate": False, "is_rms_norm": True}
    return lambda: found._layer_norm_bwd(dout, x, weight, None, 1e-5, mean, rstd, z=z, **options)


def convs() -> Iterator[Bench]:
    for b, d, l in ((8, 1536, 2048), (1, 5120, 16384), (64, 768, 196)):  # noqa: E741
        for last in (True, False):
            make = functools.partial(conv_inputs, b=b, d=d, l=l, channels_last=last)
            name = "channels last" if last else "time last"
            shape = (b, d, l, 4)
            op = "causal_conv1d"
            yield Bench(op, op, name, shape, make, conv_peer, conv_peer_back)


def steps() -> Iterator[Bench]:
    for b, d in ((64, 1536), (1024, 5120)):
        make = functools.partial(step_inputs, b=b, d=d)
        op = "causal_conv1d_update"
        yield Bench(op, op, "a token", (b, d, 4), make, step_peer)


def states() -> Iterator[Bench]:
    for b, h, d, N, one in ((64, 1, 1536, 16, False), (64, 80, 64, 128, True)):
        make = functools.partial(state_inputs, b=b, h=h, d=d, N=N, one_A=one)
        name = "Mamba-2" if one else "Mamba-1"
        op = "selective_state_update"
        yield Bench(op, f"{op}_gated", name, (b, h, d, N), make, state_peer)


def norms() -> Iterator[Bench]:
    for rows, d in ((16384, 768), (8192, 4096)):
        make = functools.partial(norm_inputs, rows=rows, d=d, group=d, gated=False)
        op = "rms_norm"
        yield Bench(op, op, "rows", (rows, d, d), make, norm_peer, norm_peer_back)
    for rows, d, group in ((16384, 1536, 1536), (8192, 8192, 1024)):
        make = functools.partial(norm_inputs, rows=rows, d=d, group=group, gated=True)
        op = "rms_norm_gated"
        yield Bench(op, op, "gate first", (rows, d, group), make, gated_call, gated_back)


BENCHES = (*convs(), *steps(), *states(), *norms())
