"""What stands for flash-linear-attention's kernels computes what its own references do."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter import shims
from fuseport.exporter.models._huggingface.library import library
from fuseport.exporter.program.float64 import Float64
from fuseport.exporter.shims import _fla, _overlay
from fuseport.exporter.shims._dtypes import beside

library("gated_deltanet")  # before others import it: transformers keeps its names so
with shims.installed():
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    import fla.layers
    from fla import models, ops
    from fla.modules import convolution
    from fla.ops import gated_delta_product, gated_delta_rule, kda, lightning_attn, simple_gla
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate, naive_gdn_gate
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.gsa import chunk_gsa
    from fla.ops.gsa.naive import naive_recurrent_gsa
    from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.retention.naive import naive_retention
    from fla.ops.rwkv7 import channel_mixing as _channel_mixing  # noqa: F401  # looked up by name
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    LOADED = {name: module for name, module in sys.modules.items() if name.startswith("fla.")}

INSTALLED = {"triton"} if importlib.util.find_spec("triton") else set()
B, L, G, H, K, V = 2, 9, 2, 4, 5, 6


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(shape, dtype=torch.float64), dim=-1).requires_grad_()


def flat(result: Any) -> list[Tensor]:
    given = result if isinstance(result, tuple) else (result,)
    return [
        t
        for part in given
        if part is not None
        for t in (flat(part) if isinstance(part, tuple) else [part])
    ]


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], **given: Any) -> None:
    """Results and gradients are the same; fla's references cast to float32, which is undone."""
    with Float64():
        pairs = [flat(function(**given)) for function in (ours, theirs)]
    assert len(pairs[0]) == len(pairs[1]) > 0
    leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
    cotangents = [torch.randn_like(t) for t in pairs[0]]
    gradients = []
    for results in pairs:
        chosen = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        total = sum((r * c).sum() for r, c in chosen)
        gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-9, atol=1e-9)
    for mine, its in zip(*gradients, strict=True):
        assert (mine is None) is (its is None)
        if mine is not None:
            torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-8)


def wide(t: Tensor) -> Tensor:
    return t.repeat_interleave(H // G, 2)


def delta(channels: bool = False, heads: int = G) -> dict[str, Any]:
    return {
        "q": unit(B, L, heads, K),
        "k": unit(B, L, heads, K),
        "v": rand(B, L, H, V),
        "g": rand(*(B, L, H, K)[: 4 if channels else 3]),
        "beta": rand(B, L, H),
        "initial_state": rand(B, H, K, V),
    }


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_the_gated_delta_rule(way: str) -> None:
    function = getattr(gated_delta_rule, f"{way}_gated_delta_rule")

    def ours(g: Tensor, beta: Tensor, **given: Any) -> Any:
        rest = {"g": F.logsigmoid(g), "beta": beta.sigmoid(), "scale": 0.3}
        return function(**given, **rest, output_final_state=True)

    def theirs(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
        rest = {"g": F.logsigmoid(g), "beta": beta.sigmoid(), "scale": 0.3}
        naive = gated_delta_rule.naive_recurrent_gated_delta_rule
        return naive(wide(q), wide(k), **given, **rest, output_final_state=True)

    agree(ours, theirs, **delta())


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_the_gated_delta_rule_as_layers_call_it(way: str) -> None:
    """Gate, norm of queries and keys and rate inside, and the state the other way round."""
    function = getattr(gated_delta_rule, f"{way}_gated_delta_rule")

    def ours(initial_state: Tensor, **given: Any) -> Any:
        out, state = function(
            **given,
            initial_state=initial_state.mT,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
            state_v_first=True,
        )
        return out, state.mT

    def theirs(
        q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **given: Any
    ) -> Any:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        gate, rate = naive_gdn_gate(g, A_log, dt_bias), 2 * beta.sigmoid()
        naive = gated_delta_rule.naive_recurrent_gated_delta_rule
        return naive(wide(q), wide(k), g=gate, beta=rate, output_final_state=True, **given)

    agree(ours, theirs, A_log=rand(H), dt_bias=rand(H), **delta())


@pytest.mark.parametrize("bound", [None, -4.0])
@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_kimi_delta_attention(way: str, bound: float | None) -> None:
    function = getattr(kda, f"{way}_kda")

    def ours(initial_state: Tensor, beta: Tensor, **given: Any) -> Any:
        return function(
            **given,
            beta=beta.sigmoid(),
            initial_state=initial_state,
            output_final_state=True,
            use_gate_in_kernel=True,
            lower_bound=bound,
        )

    def theirs(g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **given: Any) -> Any:
        if bound is None:
            gate = naive_kda_gate(g, A_log, dt_bias)
        else:
            gate = naive_kda_lowerbound_gate(g, A_log, dt_bias, bound)
        return naive_recurrent_kda(**given, g=gate, beta=beta.sigmoid(), output_final_state=True)

    agree(ours, theirs, A_log=rand(H), dt_bias=rand(H * K), **delta(channels=True))


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_the_delta_rule(way: str) -> None:
    function = getattr(ops, f"{way}_delta_rule")
    given = {name: t for name, t in delta(heads=H).items() if name != "g"}

    def theirs(initial_state: Tensor, **given: Any) -> Any:
        turned = {name: t.transpose(1, 2) for name, t in given.items()}
        out, state = delta_rule_recurrence(**turned, initial_state=initial_state)
        return out.transpose(1, 2), state

    agree(lambda **given: function(**given, output_final_state=True), theirs, **given)


def mixer() -> dict[str, Any]:
    return {
        "q": rand(B, L, H, K),
        "k": rand(B, L, H, K),
        "v": rand(B, L, H, V),
        "initial_state": rand(B, H, K, V),
    }


@pytest.mark.parametrize("way", ["chunk", "fused_chunk", "fused_recurrent"])
@pytest.mark.parametrize("fixed", [True, False])
def test_linear_attention_that_decays(way: str, fixed: bool) -> None:
    function = getattr(simple_gla, f"{way}_simple_gla")
    name = "g_gamma" if fixed else "g"

    def ours(decay: Tensor, **given: Any) -> Any:
        return function(**given, **{name: F.logsigmoid(decay)}, output_final_state=True)

    def theirs(decay: Tensor, **given: Any) -> Any:
        decay = F.logsigmoid(decay)
        decay = decay.expand(B, L, H) if fixed else decay
        return naive_recurrent_simple_gla(**given, g=decay)

    agree(ours, theirs, decay=rand(H) if fixed else rand(B, L, H), **mixer())


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_linear_attention_whose_key_channels_decay(way: str) -> None:
    function, name = getattr(ops, f"{way}_gla"), "g" if way == "chunk" else "gk"

    def ours(decay: Tensor, **given: Any) -> Any:
        return function(**given, **{name: F.logsigmoid(decay)}, output_final_state=True)

    def theirs(decay: Tensor, **given: Any) -> Any:
        return naive_recurrent_gla(**given, gk=F.logsigmoid(decay), output_final_state=True)

    given = mixer()
    with torch.no_grad():
        given["k"][:, 3] = 0  # as feature maps make them
    agree(ours, theirs, decay=rand(B, L, H, K), **given)


@pytest.mark.parametrize("name", ["chunk_simple_gla", "fused_recurrent_simple_gla", "chunk_gla"])
def test_states_the_other_way_round(name: str) -> None:
    function = getattr(ops, name)
    decay = {"g": -torch.rand((B, L, H, K)[: 3 if "simple" in name else 4], dtype=torch.float64)}

    def ours(initial_state: Tensor, **given: Any) -> Any:
        out, state = function(
            **given, initial_state=initial_state.mT, output_final_state=True, state_v_first=True
        )
        return out, state.mT

    def theirs(**given: Any) -> Any:
        return function(**given, output_final_state=True)

    agree(
        lambda **given: ours(**given, **decay), lambda **given: theirs(**given, **decay), **mixer()
    )


def test_several_keys_at_each_step() -> None:
    n = 3
    keys = delta(heads=H)
    keys |= {"k": unit(B, L * n, H, K), "v": rand(B, L * n, H, V), "beta": rand(B, L * n, H)}
    options = {"num_householder": n, "scale": 0.3, "output_final_state": True}

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda g, beta, **given: function(
            **given, g=F.logsigmoid(g), beta=beta.sigmoid(), **options
        )

    agree(
        called(gated_delta_product.chunk_gated_delta_product),
        called(naive_recurrent_gated_delta_product),
        **keys,
    )


@pytest.mark.parametrize("way", ["chunk", "fused_chunk", "fused_recurrent", "parallel"])
def test_retention(way: str) -> None:
    function = getattr(ops, f"{way}_retention")
    given = {name: t for name, t in mixer().items() if name != "initial_state"}

    def theirs(**given: Any) -> Any:
        return naive_retention(*(t.transpose(1, 2) for t in given.values())).transpose(1, 2)

    agree(lambda **given: function(**given)[0], theirs, **given)


@pytest.mark.parametrize("way", ["chunk", "fused_recurrent"])
def test_lightning_attention(way: str) -> None:
    function = getattr(lightning_attn, f"{way}_lightning_attn")
    decay = -(8 / H * (1 - 3 / 7)) * torch.arange(H, dtype=torch.float64)

    def ours(**given: Any) -> Any:
        return function(**given, layer_idx=3, num_layers=7, output_final_state=True)

    agree(
        ours,
        lambda **given: naive_recurrent_simple_gla(**given, g=decay.expand(B, L, H)),
        **mixer(),
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("way", ["chunk", "fused_chunk", "fused_recurrent"])
def test_linear_attention(way: str, normalize: bool) -> None:
    given = {name: t.exp().detach().requires_grad_() for name, t in mixer().items()}
    options = {"normalize": normalize, "output_final_state": True}
    function = getattr(ops, f"{way}_linear_attn")
    agree(
        lambda **given: function(**given, **options),
        lambda **given: naive_recurrent_linear_attn(**given, **options),
        **given,
    )


def test_gates_by_themselves() -> None:
    agree(fused_gdn_gate, naive_gdn_gate, g=rand(B, L, H), A_log=rand(H), dt_bias=rand(H))
    given = {"g": rand(B, L, H, K), "A_log": rand(H), "dt_bias": rand(H * K)}
    agree(fused_kda_gate, naive_kda_gate, **given)
    agree(
        lambda **given: fused_kda_gate(**given, lower_bound=-3.0),
        lambda **given: naive_kda_lowerbound_gate(**given, lower_bound=-3.0),
        **given,
    )


def found(name: str) -> list[Any]:
    owner, _, last = name.rpartition(".")
    holders = [vars(m).get(owner) if owner else m for m in LOADED.values()]
    return [vars(h)[last] for h in holders if h is not None and last in vars(h)]


@pytest.mark.parametrize("name", sorted(_fla.FUNCTIONS))
def test_each_function_is_there_and_ours_wherever_it_is(name: str) -> None:
    functions = [f for f in found(name) if callable(f)]
    assert functions
    for function in functions:
        module = getattr(function, "__module__", None)
        assert module is None or not module.startswith("fla."), f"{name} of {module}"


def test_kernels_of_what_has_no_form_here_are_computed() -> None:
    """As the package's own plain code computes the same."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, s = torch.randn(4, 1, 21, 2, 16, generator=draw)
    with shims.installed():
        g = torch.randn(1, 21, 2, 16, generator=draw).sigmoid().log()
        found, _ = chunk_gsa(q, k, v, s, g)
        expected, _ = naive_recurrent_gsa(q, k, v, s, g)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_has_no_form_here_says_what_it_is() -> None:
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="fla's chunk_kda was called with head_first"):
        kda.chunk_kda(x, x, x, x, x[..., 0], head_first=True)
    with pytest.raises(NotImplementedError, match="fla's chunk_rwkv6 was called with cu_seqlens"):
        ops.chunk_rwkv6(x, x, x, x, x[0, 0], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(NotImplementedError, match="fla's chunk_simple_gla was called with cu_seq"):
        ops.chunk_simple_gla(
            x, x, x, x[..., 0], output_final_state=True, cu_seqlens=torch.tensor([0, 4])
        )
    with pytest.raises(TypeError, match=r"^fla's chunk_kda: missing a required argument: 'beta'"):
        kda.chunk_kda(x, x, x, x)
    with pytest.raises(
        TypeError, match=r"^fla's chunk_gla: got an unexpected keyword argument 'decay'"
    ):
        ops.chunk_gla(x, x, x, x, decay=x)


@pytest.mark.parametrize(
    ("name", "size", "taken"),
    [
        ("chunk_gated_delta_rule", 48, "16, 32, 64"),
        ("chunk_delta_rule", 128, "16, 32, 64"),
        ("chunk_kda", 16, "32, 64"),
        ("chunk_simple_gla", 48, "powers of 2"),
        ("chunk_retention", 0, "powers of 2"),
        ("chunk_lightning_attn", 48, "powers of 2"),
    ],
)
def test_chunks_that_the_package_refuses_are_refused(name: str, size: int, taken: str) -> None:
    x = torch.randn(1, 4, 2, 8)
    given: dict[str, Any] = {"q": x, "k": x, "v": x, "g": x[..., 0], "beta": x[..., 0]}
    given |= {"layer_idx": 1, "num_layers": 2}
    if name == "chunk_kda":
        given["g"] = x
    wanted = inspect.signature(_fla.FUNCTIONS[name]).parameters
    given = {n: value for n, value in given.items() if n in wanted}
    if name == "chunk_delta_rule":
        del given["g"]
    function = getattr(ops, name)
    with pytest.raises(ValueError, match=f"^fla's {name}: chunk_size is {size}, .* takes {taken}"):
        function(**given, chunk_size=size)
    torch.testing.assert_close(function(**given, chunk_size=32)[0], function(**given)[0])


def test_kernels_of_triton_itself_are_computed_alike() -> None:
    """Where Triton is installed, fla's kernels are its own."""
    with shims.installed("triton"):
        import triton.language as tl

    def some_kernel(x, by):  # type: ignore[no-untyped-def]  # a stand-in has no types
        tl.store(x, tl.load(x) * by)

    kernel = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()
    tuned = type("Autotuner", (), {"__module__": "triton.runtime.autotuner"})()
    kernel.fn, tuned.fn = some_kernel, kernel
    launched: list[str] = []
    kernel.run = tuned.run = lambda **given: launched.append("launched")
    module = ModuleType("fla.ops.some")
    vars(module).update(first=kernel, second=tuned, other=ModuleType("triton.language"))
    _overlay._overlay(module, "fla", {}, frozenset())
    x = torch.ones(2)
    for each in (kernel, tuned):
        each.run(x, 3.0, grid=(1,))
    assert x.tolist() == [9, 1]
    assert launched == []


def test_the_package_is_as_it_was_outside_and_the_same_the_next_time() -> None:
    def outside() -> dict[str, Any]:
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "fla"}

    before = outside()
    with shims.installed() as used:
        from fla.layers import GatedDeltaNet

        assert GatedDeltaNet is fla.layers.GatedDeltaNet
        with shims.installed("auto"):
            import fla.modules.convolution as again

            assert again is convolution
        assert sys.modules["fla.layers"] is fla.layers
    # What it needs, although that was imported before, where it is not installed.
    assert {"fla", *({"triton"} - INSTALLED)} <= set(used)
    assert outside() == before
    assert before.get("fla.layers") is not fla.layers
    assert models.GatedDeltaNetConfig.model_type == "gated_deltanet"


def test_nothing_of_it_is_replaced_where_only_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would take names of transformers' own, for all tests to come.
    monkeypatch.setattr("transformers.AutoConfig.register", lambda *args, **kwargs: None)
    with shims.installed("triton"):
        from fla.ops.kda import chunk_kda as theirs
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]
    assert theirs.__module__ == "fla.ops.kda.chunk"
    assert theirs is not kda.chunk_kda


def test_what_is_not_given_is_what_the_package_has() -> None:
    """Its defaults differ from version to version, and from ours."""

    def own(x: Tensor, eps: float = 3.0) -> Tensor:
        raise AssertionError

    ours = _overlay._replaced(own, "theirs", lambda x, eps=5.0: x + eps, frozenset())
    assert (ours(torch.zeros(1)).item(), ours(torch.zeros(1), 4.0).item()) == (3.0, 4.0)


def test_a_weight_keeps_its_float32_beside_a_half_type() -> None:
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.full((8,), 1 + 2**-12)
    kept = beside(weight, x)
    assert kept is weight
    assert beside(weight.double(), x).dtype == torch.bfloat16
    assert beside(weight, x.double()).dtype == torch.float64
