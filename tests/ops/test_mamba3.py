"""The scans of Mamba-3, made of ops: values, gradients, states, and what they export as."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.formats import Options, get
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes.onnxruntime import load
from fuseport.ops import register
from fuseport.ops.compositions.mamba3 import (
    mamba3_mimo,
    mamba3_mimo_step,
    mamba3_siso,
    mamba3_siso_step,
)

b, G, H, N, P = 2, 2, 4, 8, 3
MIMO = ("MIMO_V", "MIMO_Z", "MIMO_Out")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {"rotary_dim_divisor": 2},
    "norm": {"fuse_pregate_headwise_rms_norm": True, "outproj_norm_eps": 0.1},
    "all_ranks": {"MIMO_Out": None},
    "no_gate": {"Z": None, "MIMO_Z": None, "D": None},
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register("ssd_chunk_scan", "rotary_embedding", "rms_norm_gated")


def drawn(
    ranks: int | None, length: int, rows: int = b, dtype: torch.dtype = torch.float64, **given: Any
) -> dict[str, Any]:
    """Arguments of either scan, with every tensor asking for its gradient; SISO for no ranks."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rank = () if ranks is None else (ranks,)
    angles = 3 if ranks is None else N // given.get("rotary_dim_divisor", 4)
    values = {
        "Q": normal(rows, length, *rank, G, N),
        "K": normal(rows, length, *rank, G, N),
        "V": normal(rows, length, H, P),
        "ADT": -normal(rows, H, length).abs(),
        "DT": normal(rows, H, length).abs(),
        "Trap": normal(rows, H, length),
        "Q_bias": normal(H, *rank, N),
        "K_bias": normal(H, *rank, N),
        "Angles": normal(rows, length, H, angles),
        "D": normal(H),
        "Z": normal(rows, length, H, P),
    }
    if ranks is not None:
        values |= {name: normal(H, ranks, P) for name in MIMO}
    if given.get("fuse_pregate_headwise_rms_norm"):
        values["outproj_norm_weight"] = normal(H, P)
    leaves = {name: v.to(dtype).requires_grad_() for name, v in values.items()}
    return {**leaves, **given}


def states_of(ranks: int | None, angles: int, count: int = b) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    rank = () if ranks is None else (ranks,)
    shapes = ((count, H, angles), (count, H, P, N), (count, *rank, H, N), (count, H, P))
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )


def by_definition(states: tuple[Tensor, ...] | None = None, **given: Any) -> Any:
    """Step by step in float64, with the operators of torch alone: the result, and the states."""
    siso = "MIMO_V" not in given
    V, DT, one = given["V"], given["DT"], torch.ones(1, 1, 1, dtype=torch.float64)
    Q, K = (given[name].unsqueeze(2) if siso else given[name] for name in "QK")
    q_bias, k_bias = (given[n].unsqueeze(1) if siso else given[n] for n in ("Q_bias", "K_bias"))
    Q, K = (t.repeat_interleave(H // G, 3) for t in (Q, K))
    up, gate, down = (one if siso else given[name] for name in MIMO)
    rows, length, ranks = Q.shape[:3]
    angle = torch.zeros(rows, H, given["Angles"].shape[-1], dtype=torch.float64)
    h = torch.zeros(rows, H, P, N, dtype=torch.float64)
    k_last = torch.zeros(rows, ranks, H, N, dtype=torch.float64)
    v_last = torch.zeros(rows, H, P, dtype=torch.float64)
    if states is not None:
        angle, h, k_last, v_last = states
        k_last = k_last.unsqueeze(1) if siso else k_last

    def turned(x: Tensor) -> Tensor:
        first = list(range(0, N, 2)) if siso else list(range(N // 2))
        first = first[: angle.shape[-1]]
        second = [i + 1 if siso else i + N // 2 for i in first]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    results = []
    for t in range(length):
        step = DT[:, :, t]
        angle = angle + torch.tanh(given["Angles"][:, t]) * math.pi * step[..., None]
        q, k = turned(Q[:, t] + q_bias.transpose(0, 1)), turned(K[:, t] + k_bias.transpose(0, 1))
        share = torch.sigmoid(given["Trap"][:, :, t])
        before = torch.einsum("bhp,hrp,brhn->bhpn", v_last, up.expand(H, -1, P), k_last)
        now = torch.einsum("bhp,hrp,brhn->bhpn", V[:, t], up.expand(H, -1, P), k)
        h = h + ((1 - share) * step)[..., None, None] * before
        h = given["ADT"][:, :, t].exp()[..., None, None] * h
        h = h + (share * step)[..., None, None] * now
        y = torch.einsum("bhpn,brhn->brhp", h, q)
        if given["D"] is not None:
            y = y + given["D"][:, None] * V[:, None, t] * up.transpose(0, 1)
        if given.get("fuse_pregate_headwise_rms_norm"):
            root = (y.square().mean(-1, keepdim=True) + given["outproj_norm_eps"]).sqrt()
            y = y / root * given["outproj_norm_weight"]
        if given["Z"] is not None:
            y = y * F.silu(given["Z"][:, None, t] * gate.transpose(0, 1))
        if down is not None:
            y = (y * down.transpose(0, 1)).sum(1)
        results.append(y)
        k_last, v_last = k, V[:, t]
    k_last = k_last.squeeze(1) if siso else k_last
    return torch.stack(results, 1), (angle.remainder(2 * math.pi), h, k_last, v_last)


def computed(states: tuple[Tensor, ...] | None = None, **given: Any) -> Any:
    wanted = {"Input_States": states}
    if "MIMO_V" in given:
        out, *last = mamba3_mimo(**given, **wanted, return_state=True)
    else:
        out, *last = mamba3_siso(**given, **wanted, return_final_states=True)
    return out, tuple(last)


def assert_same(mine: Any, right: Any, leaves: list[Tensor]) -> None:
    """Both results, all states, and the gradients of them together."""
    mine, right = ((out, *last) for out, last in (mine, right))
    generator = torch.Generator().manual_seed(3)
    losses = []
    for tensors in (mine, right):
        generator.manual_seed(3)
        terms = [
            (t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors
        ]
        losses.append(torch.stack(terms).sum())
    for a, e in zip(mine, right, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)
    found, wanted = (torch.autograd.grad(loss, leaves) for loss in losses)
    for a, e in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-10)
        assert e.abs().max() > 0


CASES = [(None, "plain"), (None, "no_gate"), *((3, name) for name in OPTIONS), (1, "plain")]


def arguments(ranks: int | None, option: str, length: int, rows: int = b) -> dict[str, Any]:
    options = OPTIONS[option]
    if ranks is None:
        options = {name: value for name, value in options.items() if name != "MIMO_Z"}
    return drawn(ranks, length, rows, **options)


def leaves_of(*given: Any) -> list[Tensor]:
    return [t for t in given if isinstance(t, Tensor) and t.requires_grad]


@pytest.mark.parametrize("length", [2, 9])
@pytest.mark.parametrize(("ranks", "option"), CASES)
def test_values_states_and_gradients_are_those_of_the_definition(
    ranks: int | None, option: str, length: int
) -> None:
    given = arguments(ranks, option, length)
    assert_same(computed(**given), by_definition(**given), leaves_of(*given.values()))


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("ranks", [None, 3])
def test_from_states(ranks: int | None, length: int) -> None:
    given = arguments(ranks, "plain", length)
    states = states_of(ranks, given["Angles"].shape[-1])
    leaves = leaves_of(*given.values(), *states)
    assert_same(computed(states, **given), by_definition(states, **given), leaves)


def cut(given: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The arguments of some steps."""
    by_step = {name: given[name][:, first:last] for name in ("Q", "K", "V", "Angles", "Z")}
    late = {name: given[name][:, :, first:last] for name in ("ADT", "DT", "Trap")}
    return {**given, **by_step, **late}


def token(given: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step of decoding."""
    by_step = {name: given[name][:, t] for name in ("Q", "K", "V", "Angles", "Z")}
    late = {name: given[name][:, :, t] for name in ("ADT", "DT", "Trap")}
    return {**given, **by_step, **late}


@pytest.mark.parametrize("ranks", [None, 3])
def test_it_goes_on_from_its_last_states_and_by_steps(ranks: int | None) -> None:
    given = arguments(ranks, "plain", 8)
    whole, last = computed(**given)
    first, states = computed(**cut(given, 0, 5))
    parts = [first]
    for t in range(5, 8):
        one = token(given, t)
        kept = [s.clone() for s in states]
        step = mamba3_siso_step if ranks is None else mamba3_mimo_step
        out, new = step(**one, Input_States=states)
        for now, then in zip(states, kept, strict=True):
            assert torch.equal(now, then)  # nothing is written to
        states = new
        parts.append(out.unsqueeze(1))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
    assert (states[0] < 0).any()  # they do not jump at 0
    wound = (states[0].remainder(2 * math.pi), *states[1:])
    for mine, right in zip(wound, last, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


def test_angles_of_steps_stay_within_32_turns() -> None:
    one = token(drawn(None, 1), 0)
    states = states_of(None, 3)
    turns = torch.tensor([-1000.0, 500.0, 33.0], dtype=torch.float64)
    far = (states[0] + 2 * math.pi * turns, *states[1:])
    out, new = mamba3_siso_step(**one, Input_States=far)
    right, near = mamba3_siso_step(**one, Input_States=states)
    torch.testing.assert_close(out, right)
    assert new[0].abs().max() <= 64 * math.pi
    torch.testing.assert_close(new[0].cos(), near[0].cos())


STARTS = [0, 1, 5, 5, 9]
"""Sequences of 1, 4, 0 and 4 steps."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ranks", [None, 3])
def test_packed_sequences_are_each_its_own(ranks: int | None, dtype: torch.dtype) -> None:
    given = arguments(ranks, "plain", 9, 1)
    starts = torch.tensor(STARTS, dtype=dtype)
    states = states_of(ranks, given["Angles"].shape[-1], 4)
    for initial in (None, states):
        outs, lasts = [], []
        for i in (0, 1, 3):
            own = None if initial is None else tuple(s[i : i + 1] for s in initial)
            out, last = by_definition(own, **cut(given, STARTS[i], STARTS[i + 1]))
            outs.append(out)
            lasts.append(last)
        right = torch.cat(outs, 1)
        leaves = leaves_of(*given.values(), *(initial or ()))
        mine, last = computed(initial, **given, cu_seqlens=starts)
        ends = tuple(torch.cat(parts) for parts in zip(*lasts, strict=True))
        full = tuple(s[[0, 1, 3]] for s in last)
        assert_same((mine, full), (right, ends), leaves)
        for i, s in enumerate(last):  # of no steps: what was before, or nothing
            before = 0 * s[2] if initial is None else initial[i][2]
            before = before.remainder(2 * math.pi) if i == 0 else before
            torch.testing.assert_close(s[2], before)
    function = mamba3_siso if ranks is None else mamba3_mimo
    assert_same((function(**given, cu_seqlens=starts), ()), (
        torch.cat([by_definition(**cut(given, STARTS[i], STARTS[i + 1]))[0] for i in (0, 1, 3)], 1),
        (),
    ), leaves_of(*given.values()))  # fmt: skip


def test_steps_after_the_last_sequence_change_none() -> None:
    given = arguments(None, "plain", 9, 1)
    starts = torch.tensor([0, 4, 7])
    out = mamba3_siso(**given, cu_seqlens=starts)
    right = mamba3_siso(**cut(given, 0, 7), cu_seqlens=starts)
    torch.testing.assert_close(out[:, :7], right)
    with_states = mamba3_siso(**given, cu_seqlens=starts, return_final_states=True)
    of_seven = mamba3_siso(**cut(given, 0, 7), cu_seqlens=starts, return_final_states=True)
    for mine, last in zip(with_states[1:], of_seven[1:], strict=True):
        torch.testing.assert_close(mine, last)


def test_a_step_of_the_next_sequence_does_not_round_the_last_of_this() -> None:
    given = arguments(None, "plain", 9, 1)
    huge = {**given, "DT": given["DT"].detach().clone()}
    huge["DT"][:, :, 5] = 1e12
    starts = torch.tensor(STARTS)
    mine, right = (mamba3_siso(**values, cu_seqlens=starts)[:, :5] for values in (huge, given))
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ranks", [None, 2])
def test_gradients_are_derivatives(ranks: int | None) -> None:
    given = drawn(ranks, 3, 1)
    names = list(given)

    def function(*tensors: Tensor) -> Any:
        out, states = computed(**dict(zip(names, tensors, strict=True)))
        return (out, *states[1:])  # angles jump at 2π

    assert torch.autograd.gradcheck(function, tuple(given.values()), fast_mode=True)


def test_angles_of_one_head_are_those_of_all() -> None:
    given = arguments(None, "plain", 6)
    one = given["Angles"][:, :, :1]
    mine = mamba3_siso(**{**given, "Angles": one})
    right = mamba3_siso(**{**given, "Angles": one.expand(-1, -1, H, -1)})
    torch.testing.assert_close(mine, right)


def test_angles_of_long_sequences_keep_their_digits() -> None:
    given = {k: t.detach() for k, t in drawn(None, 3000, 1).items()}
    given["ADT"] = given["ADT"] - 3  # only the angles remember
    given["Angles"] = given["Angles"].abs()  # and all go one way
    narrow = {name: t.float() for name, t in given.items()}
    wide = {name: t.double() for name, t in narrow.items()}
    found = mamba3_siso(**narrow, return_final_states=True)
    right = mamba3_siso(**wide, return_final_states=True)
    turns = (found[1].double() - right[1]) / (2 * math.pi)
    assert (turns - turns.round()).abs().max() < 1e-5
    assert (found[0].double() - right[0]).abs().max() < 2e-5 * right[0].abs().max()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 0.003)]
)
@pytest.mark.parametrize("ranks", [None, 3])
def test_other_dtypes(ranks: int | None, dtype: torch.dtype, bound: float) -> None:
    given = drawn(ranks, 20)
    activations = ("Q", "K", "V", "Z", "Trap", "Angles")
    given = {
        name: t.detach().to(dtype if name in activations else torch.float32)
        for name, t in given.items()
    }
    right, _ = by_definition(**{name: t.double() for name, t in given.items()})
    out, (angle, h, k, v) = computed(**given)
    assert (out.dtype, k.dtype, v.dtype) == (dtype, dtype, dtype)
    assert (angle.dtype, h.dtype) == (torch.float32, torch.float32)
    assert (out.double() - right).norm() < bound * right.norm()


@pytest.mark.parametrize(
    ("ranks", "name", "shape", "reason"),
    [
        (None, "K", (b, 4, G, N + 1), "K must be Q's shape"),
        (None, "Q", (b, 4, 3, N), "Q must be of groups that divide 4 heads; got 3"),
        (None, "DT", (b, 4, H + 1), r"DT must be \(b, H, l\)"),
        (None, "Angles", (b, 4, H, 5), "Angles must be of at most 4 angles; got 5"),
        (None, "Angles", (b, 4, 3, 3), "Angles must be of 1 or 4 heads; got 3"),
        (None, "Q_bias", (H, N + 2), r"Q_bias must be \(H, R, N\)"),
        (None, "D", (H + 1,), r"D must be \(H,\)"),
        (None, "cu_seqlens", (3,), "cu_seqlens must be given for one row; got 2 rows"),
        (None, "Q", (b, 4, 2, G, N), "Q must be of 4 dimensions"),
        (2, "Q", (b, 4, G, N), "Q must be of 5 dimensions"),
        (2, "MIMO_V", (H, 3, P), r"MIMO_V must be \(H, R, P\)"),
        (2, "Angles", (b, 4, H, 3), "Angles must be of 2 angles; got 3"),
    ],
)
def test_what_does_not_fit_is_refused(
    ranks: int | None, name: str, shape: tuple[int, ...], reason: str
) -> None:
    given = {**drawn(ranks, 4), name: torch.zeros(shape, dtype=torch.float64)}
    function = mamba3_siso if ranks is None else mamba3_mimo
    with pytest.raises(ValueError, match=f"^fuseport::mamba3_(siso|mimo): {reason}"):
        function(**given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MIMO_Z": None}, "MIMO_Z must be given where Z is"),
        ({"Z": None, "fuse_pregate_headwise_rms_norm": True}, "a fused norm must have Z"),
        ({"MIMO_Out": None, "fuse_pregate_headwise_rms_norm": True}, "a fused norm must have Z"),
        ({"rotary_dim_divisor": 3}, "rotary_dim_divisor must be 2 or 4"),
    ],
)
def test_what_lacks_a_part_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^fuseport::mamba3_mimo: {reason}"):
        mamba3_mimo(**{**drawn(2, 4), **changes})


def test_states_of_another_shape_are_refused() -> None:
    angle, h, k, v = states_of(None, 3)
    with pytest.raises(ValueError, match="Input_States: h must be of all sequences"):
        mamba3_siso(**drawn(None, 4), Input_States=(angle, h[:1], k, v))


class Layer(nn.Module):
    """All but V is a parameter or made of V."""

    def __init__(self, ranks: int | None) -> None:
        super().__init__()
        given = drawn(ranks, 1, 1, torch.float32)
        parts = ("Q_bias", "K_bias", "D", *(MIMO if ranks else ()))
        self.parts = nn.ParameterDict({k: nn.Parameter(given[k].detach()) for k in parts})
        self.ranks = ranks
        self.angles = given["Angles"].shape[-1]
        width = 2 * (ranks or 1) * G * N + 3 * H + self.angles
        self.projected = nn.Linear(H * P, width)

    def forward(self, V: Tensor) -> Tensor:
        coefficients = (self.ranks or 1) * G * N
        rows = self.projected(V.flatten(2)).split(
            [coefficients, coefficients, H, H, H, self.angles], -1
        )
        shape = (G, N) if self.ranks is None else (self.ranks, G, N)
        step = F.softplus(rows[2]).mT
        given = {
            "Q": rows[0].unflatten(-1, shape),
            "K": rows[1].unflatten(-1, shape),
            "V": V,
            "ADT": -step * F.softplus(rows[3]).mT,
            "DT": step,
            "Trap": rows[4].mT,
            "Angles": rows[5].unsqueeze(2),
            "Z": V,
            **dict(self.parts.items()),
        }
        out = mamba3_siso(**given) if self.ranks is None else mamba3_mimo(**given)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("ranks", [None, 2])
def test_it_exports_as_its_ops_with_gradients(ranks: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Layer(ranks).eval()
    spec = TensorSpec("V", "float32", ("batch", "length", H, P))
    forward = capture_forward(module, {"V": torch.randn(2, 7, H, P)}, [spec], ("out",))
    nodes = Counter(str(node.target) for node in forward.exported.graph.nodes)
    fused = {name: count for name, count in nodes.items() if name.startswith("fuseport")}
    assert fused == {
        "fuseport.rotary_embedding.default": 2,
        "fuseport.ssd_chunk_scan_discrete.default": 1,
    }
    gradient = capture_gradient(forward)
    file = tmp_path / "gradient.onnx"
    get("onnx").write(gradient, file, Options(tmp_path / "weights.safetensors"))
    right = module.double()
    for rows, length in ((3, 21), (1, 1)):
        V = torch.randn(rows, length, H, P)
        cotangent = torch.randn(rows, length, H, P)
        found = load(file, {}).run({"V": V, "cotangent_out": cotangent})
        leaf = V.double().requires_grad_()
        right.zero_grad()
        out = right(leaf)
        out.backward(cotangent.double())
        torch.testing.assert_close(found["out"].double(), out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["grad/V"].double(), leaf.grad, rtol=1e-3, atol=1e-3)
        for name, parameter in right.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                found[f"grad/{name}"].double(), parameter.grad, rtol=1e-3, atol=1e-5 * scale + 1e-6
            )
