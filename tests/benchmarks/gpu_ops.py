"""Ops on a GPU, each at its own sizes, beside its peers: what `gpu.py` measures but for the scan.

The floor is the larger of two times: the bytes of inputs and outputs, each moved once, over the
bandwidth of a copy, and, where the op is a product of matrices, its sums over the rate of torch's
own product in that dtype. Peers are measured where they are installed: mamba_ssm's Triton kernels,
flash-linear-attention's, the extension `MultiScaleDeformableAttention`, bitsandbytes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpu_peers import peer_module, peer_time
from torch import Tensor

from fuseport.ops import OPS, cuda, registration
from fuseport.ops.correlation.cases import _Shape as VolumeShape
from fuseport.ops.cross_scan.cases import ImageShape
from fuseport.ops.dplr_delta_rule.cases import _Shape as LowRankShape
from fuseport.ops.gated_delta_rule.cases import _Shape as DeltaShape
from fuseport.ops.matmul_nbits.cases import _Shape as BitsShape
from fuseport.ops.ms_deform_attn.cases import _MAPS
from fuseport.ops.ms_deform_attn.cases import _Shape as DeformShape
from fuseport.ops.nf4_linear.cases import _Shape as LinearShape
from fuseport.ops.rotary_embedding.cases import _Shape as RotaryShape
from fuseport.ops.spec import Inputs, Operator
from fuseport.ops.ssd_chunk_scan.cases import _Shape as ChunkShape
from fuseport.ops.swiglu.cases import _Shape as GatedShape

__all__ = ["OPERATIONS", "measure_op", "products_per_second"]

Run = Callable[[int], Any]
Timer = Callable[[Run, int], float]
Peer = Callable[[Inputs, Inputs], Mapping[str, Callable[[], Any]]]
"""Inputs and cotangents → a call of each direction, which runs nothing before it is called."""


@dataclass(frozen=True)
class Operation:
    """Inputs of an operator at a size, and twice how many products a pass of it sums up.

    The operator is called as the op, unless `gated`, `<op>_gated`.
    """

    op: str
    shape: str
    make: Callable[[torch.dtype, int], Inputs]
    flops: float = 0
    gated: bool = False

    @property
    def operator(self) -> Operator:
        return OPS[self.op].operator(f"{self.op}_gated" if self.gated else self.op)


def _linear(rows: int, out: int, inner: int) -> Operation:
    shape = LinearShape((rows,), inner, out, 64)
    return Operation("nf4_linear", f"{rows},{out},{inner}", shape.make, 2.0 * rows * out * inner)


def _of_bits(rows: int, out: int, inner: int) -> Operation:
    shape = BitsShape((rows,), inner, out, 4, 128)
    return Operation("matmul_nbits", f"{rows},{out},{inner}", shape.make, 2.0 * rows * out * inner)


def _volume(b: int, c: int, height: int, width: int, patch: int, apart: int) -> Operation:
    shape = VolumeShape(b, c, (height, width), patch=(patch, patch), dilation_patch=(apart, apart))
    name = f"{b},{c},{height},{width}; patch {patch}, {apart} apart"
    return Operation("correlation", name, shape.make, 2.0 * b * c * height * width * patch**2)


_IMAGE = ImageShape(32, 192, 56, 56)
_WALKS = ImageShape(32, 192, 56, 56, walks=True)
OPERATIONS = (
    Operation("cross_scan", "32,192,56,56", _IMAGE.make),
    Operation("cross_merge", "32,192,56,56", _WALKS.make),
    *(
        Operation(
            "ms_deform_attn",
            f"{b},8500,8,32; {q} queries, 4 levels, 4 points",
            DeformShape(b, 8, 32, q, 4, _MAPS, s=8500, reach=1.1).make,
        )
        for b, q in ((4, 300), (4, 8500))
    ),
    *(_of_bits(rows, *sizes) for sizes in ((4096, 4096), (11008, 4096)) for rows in (1, 16, 2048)),
    _volume(8, 64, 48, 112, 9, 1),  # PWC-Net's
    _volume(8, 256, 48, 64, 21, 2),  # FlowNetC's
    *(_linear(rows, *sizes) for sizes in ((4096, 4096), (11008, 4096)) for rows in (1, 16, 2048)),
    Operation("swiglu", "16384,11008", GatedShape((16384, 11008)).make),
    Operation("rotary_embedding", "8,32,2048,128", RotaryShape(8, 32, 2048, 128, 64).make),
    *(
        Operation(
            "ssd_chunk_scan",
            f"{b},{n},24,64,{states}{', z' if gated else ''}",
            ChunkShape(b, n, 24, 64, states, gated=gated).make,
            gated=gated,
        )
        for b, n, states, gated in (
            (1, 4096, 128, False),
            (8, 2048, 128, False),
            (8, 2048, 128, True),
            (8, 2048, 256, False),
        )
    ),
    *(
        Operation("gated_delta_rule", f"{b},{n},16,32,128,128", shape.make)
        for b, n in ((1, 4096), (8, 2048))
        for shape in [DeltaShape(b, n, 16, 32, 128, 128)]
    ),
    *(
        Operation("dplr_delta_rule", f"{b},{n},12,64,64", LowRankShape(b, n, 12, 64, 64).make)
        for b, n in ((1, 4096), (8, 2048))
    ),
)


def _both(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Any:
    out = functools.cache(forward)
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out(), leaves, dout, retain_graph=True),
    }


def _chunk_peer() -> Peer | None:
    module = peer_module("mamba_ssm.ops.triton.ssd_combined")
    if module is None:
        return None

    def peer(inputs: Inputs, cotangents: Inputs) -> Any:
        names = ["x", "dt", "A", "B", "C", "D", "dt_bias", *(["z"] if "z" in inputs else [])]
        leaves = [inputs[name].detach().requires_grad_() for name in names]

        def forward() -> Tensor:
            x, dt, A, B, C, D, bias, *z = leaves
            out: Tensor = module.mamba_chunk_scan_combined(
                x, dt, A, B, C, 256, D=D, z=z[0] if z else None, dt_bias=bias, dt_softplus=True
            )
            return out

        return _both(forward, leaves, cotangents["dout"])

    return peer


def _delta_peer() -> Peer | None:
    module = peer_module("fla.ops.gated_delta_rule")
    if module is None:
        return None

    def peer(inputs: Inputs, cotangents: Inputs) -> Any:
        leaves = [inputs[n].detach().requires_grad_() for n in ("q", "k", "v", "g", "beta")]

        def forward() -> Tensor:
            q, k, v, g, beta = leaves
            rule = module.chunk_gated_delta_rule
            out: Tensor = rule(q, k, v, g.squeeze(3), beta, inputs["scale"])[0]
            return out

        return _both(forward, leaves, cotangents["dout"])

    return peer


def _low_rank_peer() -> Peer | None:
    module = peer_module("fla.ops.generalized_delta_rule")
    if module is None:
        return None

    def peer(inputs: Inputs, cotangents: Inputs) -> Any:
        names = ("q", "k", "v", "a", "b", "log_decay")
        leaves = [inputs[name].detach().requires_grad_() for name in names]

        def forward() -> Tensor:
            out: Tensor = module.chunk_dplr_delta_rule(*leaves, inputs["scale"])[0]
            return out

        return _both(forward, leaves, cotangents["dout"])

    return peer


def _deform_peer() -> Peer | None:
    module = peer_module("MultiScaleDeformableAttention")
    if module is None:
        return None

    def peer(inputs: Inputs, cotangents: Inputs) -> Any:
        given = tuple(inputs.values())
        dout = cotangents["dout"]
        return {
            "forward": lambda: module.ms_deform_attn_forward(*given, 64),
            "backward": lambda: module.ms_deform_attn_backward(*given, dout, 64),
        }

    return peer


def _linear_peer() -> Peer | None:
    module, functional = peer_module("bitsandbytes"), peer_module("bitsandbytes.functional")
    if module is None or functional is None:
        return None

    def peer(inputs: Inputs, cotangents: Inputs) -> Any:
        x, bias = (inputs[name].detach().requires_grad_() for name in ("x", "bias"))
        state = functional.QuantState(
            absmax=inputs["absmax"],
            shape=torch.Size((len(bias), x.shape[-1])),
            code=functional.get_4bit_type("nf4", device="cuda"),
            blocksize=inputs["block_size"],
            quant_type="nf4",
            dtype=x.dtype,
        )

        def forward() -> Tensor:
            packed = inputs["packed"].unsqueeze(1)
            out: Tensor = module.matmul_4bit(x, packed.t(), state, bias=bias)
            return out

        return _both(forward, [x, bias], cotangents["dout"])

    return peer


_PEERS: Mapping[str, Callable[[], Peer | None]] = {
    "ssd_chunk_scan": _chunk_peer,
    "gated_delta_rule": _delta_peer,
    "dplr_delta_rule": _low_rank_peer,
    "ms_deform_attn": _deform_peer,
    "nf4_linear": _linear_peer,
}


def products_per_second(dtype: torch.dtype, timer: Timer) -> float:
    """Twice the products that torch's own product of matrices sums up in a second."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda").to(dtype) for _ in range(2))
    return 2 * side**3 / (1e-6 * timer(lambda _: a @ b, 20))


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _elsewhere(inputs: Inputs) -> Inputs:
    """The same numbers in other memory, laid out the same: to draw others takes seconds."""

    def copied(t: Tensor) -> Tensor:
        storage = t.untyped_storage().clone()
        return t.new_empty(0).set_(storage, t.storage_offset(), t.size(), t.stride())

    return {k: copied(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _theirs(
    op: str,
    direction: str,
    sets: list[Inputs],
    cotangents: list[Inputs],
    timer: Timer,
    rounds: int,
) -> float | None:
    make = _PEERS.get(op, lambda: None)()
    if make is None:
        return None
    calls = [make(*pair)[direction] for pair in zip(sets, cotangents, strict=True)]
    for call in calls:  # a backward has its forward run now, and not while it is timed
        call()
    return timer(lambda i: calls[i % len(calls)](), rounds)


def measure_op(
    operation: Operation,
    name: str,
    dtype: torch.dtype,
    rates: tuple[float, float],
    timer: Timer,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Rows of forward and backward; `rates` are bytes and products in a second."""
    spec = OPS[operation.op]
    registration.ensure(spec)
    cuda.load(spec)
    forward = operation.operator
    backward = spec.operator(forward.backward or "")

    made = operation.make(dtype, 0)
    first = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in made.items()}
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = 2 + int(2 * cache // _bytes(first.values()))
    sets = [first, *(_elsewhere(first) for _ in range(1, min(count, 16)))]
    known, cotangents = [], []
    for inputs in sets:
        outputs = dict(zip(forward.outputs, forward(*inputs.values()), strict=True))
        given = {"d" + n: torch.randn_like(outputs[n]) for n in spec.differentiable(forward)[1]}
        cotangents.append(given)
        known.append({**inputs, **outputs, **given})
    gradients = backward(*(known[0][n] for n in backward.inputs))
    moved = {
        "forward": _bytes(first.values()) + _bytes(known[0][n] for n in forward.outputs),
        "backward": _bytes(known[0][n] for n in backward.inputs) + _bytes(gradients),
    }
    ours: dict[str, Run] = {
        "forward": lambda i: forward(*sets[i % len(sets)].values()),
        "backward": lambda i: backward(*(known[i % len(sets)][n] for n in backward.inputs)),
    }
    for direction, run in ours.items():
        bytes_us, flops_us = 1e6 * moved[direction] / rates[0], 1e6 * operation.flops / rates[1]
        yield {
            "op": operation.op,
            "shape": operation.shape,
            "dtype": name,
            "direction": direction,
            "ours_us": timer(run, rounds),
            **peer_time(_theirs, operation.op, direction, sets, cotangents, timer, rounds),
            "floor_us": max(bytes_us, flops_us),
            "floor_is": "bytes" if bytes_us > flops_us else "products",
        }
