"""MambaLM against transformers' own Mamba, and recognising what is Mamba-1 and what is not."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from fuseport.exporter.checkpoint import Checkpoint, load
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import mamba
from fuseport.exporter.models.mamba import MambaConfig, MambaLM
from fuseport.exporter.models.weights import fit

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMALL = MambaConfig(
    d_model=16, n_layer=2, vocab_size=30, d_state=4, d_conv=4, d_inner=32, dt_rank=2
)


class RaiseCasts(TorchFunctionMode):
    """Casts to float64 where code asks for float32, as transformers' code does in places."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def raised(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            return args[0].double()
        args = tuple(raised(a) for a in args)
        return func(*args, **{k: raised(v) for k, v in (kwargs or {}).items()})


def huggingface(**changes: Any) -> transformers.MambaForCausalLM:
    """A small Mamba of transformers', random but for no parameter at a special value."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    config = transformers.MambaConfig(**(sizes | {"conv_kernel": 4, "expand": 2} | changes))
    model = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def checkpoint_of(
    tensors: Mapping[str, Tensor], config: dict[str, Any] | None = None
) -> Checkpoint:
    return Checkpoint(Path("w.pt"), "state_dict", dict(tensors), config or {}, "")


def recognised(tensors: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> MambaConfig:
    found = mamba.recognise(checkpoint_of(tensors, config))
    assert found is not None
    return mamba.model(found).module.config


def ids_of(config: MambaConfig, batch: int, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, length))


def loaded(checkpoint: Checkpoint) -> MambaLM:
    config = mamba.recognise(checkpoint)
    assert config is not None
    model = mamba.model(json.loads(json.dumps(config)))
    fit(model.module, model.renamed(checkpoint.tensors), str(checkpoint.path))
    assert isinstance(model.module, MambaLM)
    return model.module.eval()


def ours(theirs: transformers.MambaForCausalLM) -> MambaLM:
    return loaded(checkpoint_of(theirs.state_dict(), theirs.config.to_dict()))


def test_fixture_is_what_transformers_loads() -> None:
    theirs = transformers.MambaForCausalLM.from_pretrained(FIXTURES / "huggingface").eval()
    model = loaded(load(FIXTURES / "huggingface"))
    ids = ids_of(model.config, 2, 33)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True, "use_conv_bias": False},
        {"conv_kernel": 2, "time_step_rank": 5, "expand": 3},
        {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1, "residual_in_fp32": False},
        {"num_hidden_layers": 1, "state_size": 1},
    ],
)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (3, 19)])
def test_float64_logits_and_gradients_are_transformers(
    changes: dict[str, Any], batch: int, length: int
) -> None:
    theirs = huggingface(**changes).double()
    model = ours(theirs)
    ids = ids_of(model.config, batch, length)
    with RaiseCasts():
        expected = theirs(ids, use_cache=False).logits
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
    logits = model(ids)
    logits.backward(cotangent)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    named = dict(model.named_parameters())
    wanted = {n.replace("embeddings", "embedding"): p for n, p in theirs.named_parameters()}
    assert named.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        assert scale > 0 or length == 1, name
        torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)]
)
def test_working_dtypes_are_near_transformers(dtype: torch.dtype, bound: float) -> None:
    theirs = huggingface()
    model = ours(theirs)
    ids = ids_of(model.config, 2, 40)
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        logits = model.to(dtype)(ids)
    assert logits.dtype == dtype
    assert (logits.float() - expected).norm() < bound * expected.norm()


def test_mixed_dtypes() -> None:
    """A_log and D in float32 beside half weights: what mixed-precision training leaves."""
    model = MambaLM(SMALL).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", ".D", "norm.weight", "norm_f.weight")):
            parameter.data = parameter.data.float()
    ids = ids_of(SMALL, 2, 5)
    assert model(ids).dtype == torch.bfloat16


def test_layer_norm() -> None:
    model = MambaLM(dataclasses.replace(SMALL, rms_norm=False))
    x = torch.randn(2, 3, 16)
    norm = torch.nn.LayerNorm(16, eps=1e-5)
    torch.testing.assert_close(model.backbone.norm_f(x), norm(x))
    assert recognised(model.state_dict()) == model.config


def test_outputs_are_causal() -> None:
    model = MambaLM(SMALL).eval()
    ids = ids_of(SMALL, 1, 9)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 30
    same = (model(ids) == model(changed)).all(-1)[0]
    assert same[:5].all()
    assert not same[5:].any()


@pytest.mark.parametrize("example", [5, 70])
def test_exports_with_free_sizes(example: int) -> None:
    model = MambaLM(SMALL).eval()
    ids = ids_of(SMALL, 2, example)
    dims = {0: Dim("batch", min=1), 1: Dim("length", min=1)}
    program = torch.export.export(model, (ids,), dynamic_shapes=(dims,), strict=False)
    scans = [n for n in program.graph.nodes if "selective_scan" in str(n.target)]
    assert len(scans) == SMALL.n_layer
    assert all(r.lower <= 1 and r.upper > 2**31 for r in program.range_constraints.values())
    casts = ("_assert_tensor_metadata", "aten._to_copy", "aten.to.")
    assert not [n for n in program.graph.nodes if any(c in str(n.target) for c in casts)]
    run = program.module()
    for batch, length in [(1, 1), (1, 2), (3, 1), (2, 63), (1, 129)]:
        held_out = ids_of(SMALL, batch, length)
        torch.testing.assert_close(run(held_out), model(held_out))


def test_a_tied_head_is_one_parameter() -> None:
    model = MambaLM(SMALL)
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = MambaLM(dataclasses.replace(SMALL, tie_embeddings=False))
    assert "lm_head.weight" in dict(untied.named_parameters())


def test_what_the_exporter_is_told() -> None:
    model = mamba.model(dataclasses.asdict(SMALL) | {"frozen": []})
    assert all(parameter.is_meta for parameter in model.module.parameters())
    assert model.scans == 2
    assert model.inputs[0].dims == ("batch", "length")
    assert model.inputs[0].high == 30
    assert model.notes == ()


class TestConfig:
    def test_round_trip_through_json(self) -> None:
        config = mamba.recognise(checkpoint_of(MambaLM(SMALL).state_dict()))
        assert config is not None
        model = mamba.model(json.loads(json.dumps(config)))
        assert model.module.config == SMALL
        assert model.config == config

    def test_a_manifest_that_makes_no_sense(self) -> None:
        config = dataclasses.asdict(SMALL)
        with pytest.raises(CorruptInput, match="d_state is -1"):
            mamba.model(config | {"d_state": -1})
        del config["d_conv"]
        with pytest.raises(CorruptInput, match="d_conv"):
            mamba.model(config)

    @pytest.mark.parametrize(
        "change",
        [{"d_model": 0}, {"n_layer": 2.0}, {"rms_norm": 1}, {"norm_epsilon": float("nan")}],
    )
    def test_nonsense_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(SMALL, **change)


VARIANTS = [
    SMALL,
    dataclasses.replace(SMALL, rms_norm=False),
    dataclasses.replace(SMALL, tie_embeddings=False),
    dataclasses.replace(SMALL, conv_bias=False, proj_bias=True),
    dataclasses.replace(SMALL, d_conv=3, d_state=7, dt_rank=5, d_inner=24, n_layer=1),
]


class TestRecognise:
    @pytest.mark.parametrize("config", VARIANTS)
    @pytest.mark.parametrize("prefix", ["", "model.", "_orig_mod.", "net._orig_mod."])
    def test_every_size_is_read_from_the_weights(self, config: MambaConfig, prefix: str) -> None:
        tensors = {prefix + n: t for n, t in MambaLM(config).state_dict().items()}
        assert recognised(tensors) == config

    @pytest.mark.parametrize("key", ["norm_epsilon", "layer_norm_epsilon", "rms_norm_eps"])
    @pytest.mark.parametrize("nested", [False, True])
    def test_epsilon_is_read_from_the_config(self, key: str, nested: bool) -> None:
        settings = {key: 1e-6, "residual_in_fp32": False}
        config = {"lr": 0.1, "model": settings} if nested else settings
        expected = dataclasses.replace(SMALL, norm_epsilon=1e-6, residual_in_fp32=False)
        found = mamba.recognise(checkpoint_of(MambaLM(SMALL).state_dict(), config))
        assert found == dataclasses.asdict(expected) | {"assumed": []}

    def test_an_epsilon_that_is_not_known_is_said(self) -> None:
        found = mamba.recognise(checkpoint_of(MambaLM(SMALL).state_dict()))
        assert found is not None
        assert any("norm_epsilon: 1e-05 is assumed" in note for note in mamba.model(found).notes)

    def test_huggingface_names(self) -> None:
        tensors = {
            f"net.{name.replace('embedding.', 'embeddings.')}": tensor
            for name, tensor in MambaLM(SMALL).state_dict().items()
        }
        assert recognised(tensors, {"model_type": "mamba"}) == SMALL
        loaded(checkpoint_of(tensors, {"network": {"model_type": "mamba"}}))

    def test_huggingface_names_may_be_falcon_mamba(self) -> None:
        """Its norms of B, C and delta have no weights: the names and shapes are Mamba's."""
        config = transformers.FalconMambaConfig(
            vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=2
        )
        tensors = transformers.FalconMambaForCausalLM(config).state_dict()
        with pytest.raises(Missing, match=r"w\.pt: .*tell Mamba from FalconMamba; give a folder"):
            mamba.recognise(checkpoint_of(tensors))
        assert mamba.recognise(checkpoint_of(tensors, config.to_dict())) is None

    def test_a_head_that_is_absent_is_tied(self) -> None:
        tensors = MambaLM(SMALL).state_dict()
        del tensors["lm_head.weight"]
        assert recognised(tensors) == SMALL

    def test_config_against_weights(self) -> None:
        tensors = MambaLM(dataclasses.replace(SMALL, tie_embeddings=False)).state_dict()
        with pytest.raises(Missing, match=r"w\.pt: lm_head\.weight"):
            recognised(tensors, {"tie_embeddings": True})
        with pytest.raises(Missing, match="n_layer: it is 'two'"):
            recognised(tensors, {"n_layer": "two"})

    @pytest.mark.parametrize(
        "name", ["mixer.Wqkv.weight", "mlp.experts.0.fc1.weight", "mlp.fc1.bias"]
    )
    def test_layers_of_another_kind_are_refused(self, name: str) -> None:
        tensors = MambaLM(SMALL).state_dict()
        tensors[f"backbone.layers.0.{name}"] = torch.ones(16)
        with pytest.raises(
            Missing, match=rf"w\.pt: .*layers\.0\.{name}: layers beside the Mamba-1"
        ):
            recognised(tensors)

    @pytest.mark.parametrize("lost", [0, 1])
    def test_a_layer_is_absent(self, lost: int) -> None:
        tensors = {
            n: t for n, t in MambaLM(SMALL).state_dict().items() if f"layers.{lost}." not in n
        }
        with pytest.raises(Missing, match="1 Mamba-1 layers"):
            recognised(tensors, {"n_layer": 2})

    def test_a_layer_number_out_of_reach(self) -> None:
        tensors = MambaLM(SMALL).state_dict()
        tensors["backbone.layers.999999999.mixer.A_log"] = torch.ones(32, 4)
        with pytest.raises(Missing, match="999999999"):
            recognised(tensors)

    def test_mamba_2_is_another_architecture(self) -> None:
        config = transformers.Mamba2Config(
            vocab_size=30, hidden_size=32, state_size=4, num_hidden_layers=1, num_heads=4,
            head_dim=16, n_groups=1,
        )  # fmt: skip
        tensors = transformers.Mamba2ForCausalLM(config).state_dict()
        assert mamba.recognise(checkpoint_of(tensors, config.to_dict())) is None
        assert mamba.recognise(checkpoint_of(tensors)) is None

    def test_falcon_mamba_is_another_architecture(self) -> None:
        checkpoint = checkpoint_of(MambaLM(SMALL).state_dict(), {"model_type": "falcon_mamba"})
        assert mamba.recognise(checkpoint) is None

    @pytest.mark.parametrize("key", ["A_b_log", "D_b", "conv1d_b.weight", "x_proj_b.weight"])
    def test_bidirectional_mamba_is_another_architecture(self, key: str) -> None:
        tensors = MambaLM(SMALL).state_dict()
        tensors[f"backbone.layers.0.mixer.{key}"] = torch.ones(1)
        assert mamba.recognise(checkpoint_of(tensors)) is None

    def test_other_models(self) -> None:
        assert mamba.recognise(checkpoint_of(torch.nn.Linear(2, 2).state_dict())) is None
        assert mamba.recognise(checkpoint_of({})) is None
