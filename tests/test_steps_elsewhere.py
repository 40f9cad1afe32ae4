"""The step program of transformers' models and of the user's own: one token, states in and out."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from fuseport.exporter import api, models
from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import ExportFailed, FuseportError, UsageError
from fuseport.exporter.models import user
from fuseport.exporter.models._huggingface import step as decoding
from fuseport.exporter.models.model import Model, at
from fuseport.exporter.verify.decoding import decoded
from fuseport.tests import test_huggingface

COMMON = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Mamba": {},
    "Mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "FalconMamba": {},
}


def saved(kind: str, folder: Path, **changes: Any) -> Path:
    """A small model of transformers', random but for no parameter at a special value."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | KINDS.get(kind, {}) | changes)
    module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Model:
    model, _ = models.from_checkpoint(load(folder))
    return model


def zeros(step: Model, batch: int) -> list[Tensor]:
    return [
        torch.zeros(
            [{"batch": batch, "past": 0}.get(d, d) for d in spec.dims], dtype=spec.torch_dtype
        )
        for spec in step.inputs[1:]
    ]


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_own_step_through_its_cache_is_the_sequence(kind: str, tmp_path: Path) -> None:
    model = loaded(saved(kind, tmp_path))
    step = at(model, "step")
    ids = torch.randint(0, 30, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), step.fused():
        found, states = [], zeros(step, 3)
        for token in ids.split(1, dim=1):
            given = [state.clone() for state in states]
            logits, *new = step.module(token, *states)
            assert all(map(torch.equal, states, given)), "states are not written to"
            found.append(logits)
            states = new
        expected = model.module(ids).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    (row,) = decoded(model, {"step": {}}, 0, lambda _: None)
    assert (row.verdict, row.tensor) == ("pass", "logits")


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_has_an_update_for_each_layer_and_takes_any_batch(
    kind: str, tmp_path: Path
) -> None:
    model = loaded(saved(kind, tmp_path))
    _, program = api.capture(model, ["step"])  # refuses another number of updates
    step, run = at(model, "step"), program.exported.module()
    for batch in (1, 4):
        states = [torch.randn_like(state) for state in zeros(step, batch)]
        ids = torch.randint(0, 30, (batch, 1))
        with torch.no_grad():
            expected = step.module(ids, *states)
        for value, wanted in zip(run(ids, *states).values(), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


def test_a_bundle_of_transformers_with_a_step_verifies(tmp_path: Path) -> None:
    folder = saved("Mamba2", tmp_path / "saved")
    bundle = api.export(folder, tmp_path / "b", programs=["step"], format=["onnx"])
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"], program="step")
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = {(row.runtime, row.program, row.case) for row in report.results}
    assert ("float64", "step", "token by token") in rows
    assert {runtime for runtime, kind, _ in rows if kind == "step"} >= {"eager", "onnxruntime"}


@pytest.mark.parametrize("kind", KINDS)
def test_states_have_the_dtypes_that_transformers_gives_them(kind: str, tmp_path: Path) -> None:
    model = loaded(saved(kind, tmp_path))
    models.convert(model, torch.bfloat16)
    step = at(model, "step")
    assert [spec.dtype for spec in step.inputs] == ["int64", "bfloat16", "float32"]
    with torch.no_grad(), step.fused():
        _, conv, ssm = step.module(torch.zeros(2, 1, dtype=torch.int64), *zeros(step, 2))
    assert (conv.dtype, ssm.dtype) == (torch.bfloat16, torch.float32)


def test_a_step_that_loses_a_state_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(saved("Mamba", tmp_path))
    right = decoding._forward

    def forgetful(self: Any, ids: Tensor, *past: Tensor, **known: Any) -> Any:
        return right(self, ids, past[0], torch.zeros_like(past[1]), **known)

    monkeypatch.setattr(decoding, "_forward", forgetful)
    (row,) = decoded(model, {"step": {}}, 0, lambda _: None)
    assert row.verdict == "fail"


@pytest.mark.parametrize("kind", sorted(test_huggingface.SIZES.keys() - KINDS.keys()))
def test_the_caches_of_attention_and_of_scans_together_are_the_sequence(
    kind: str, tmp_path: Path
) -> None:
    test_huggingface.saved(kind, tmp_path)
    model = loaded(tmp_path)
    names = [spec.name for spec in at(model, "step").inputs]
    assert names[:3] == ["input_ids", "conv_states", "ssm_states"]
    kinds = [name.split("_")[0] for name in names[3:]]
    assert kinds == ["key", "value"] * (len(kinds) // 2) != []
    (row,) = decoded(model, {"step": {}}, 0, lambda _: None)
    assert (row.verdict, row.tensor) == ("pass", "logits")


ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
             "head_dim": 8}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},  # of 16 tokens
    "Qwen3Next": {**LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}


def other(kind: str, folder: Path) -> Path:
    return saved(kind, folder, **{"state_size": 0} | ATTENTION | OTHERS[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_generates_of_transformers_has_a_step(kind: str, tmp_path: Path) -> None:
    (row,) = decoded(loaded(other(kind, tmp_path)), {"step": {}}, 0, lambda _: None)
    assert (row.verdict, row.tensor) == ("pass", "logits")


def test_a_bundle_with_a_cache_that_grows_verifies_from_the_first_token_on(tmp_path: Path) -> None:
    folder = other("Mistral", tmp_path / "saved")
    bundle = api.export(folder, tmp_path / "b", programs=["step"], format=["onnx"])
    program = bundle.manifest["programs"]["step"]
    dims = {spec["name"]: spec["dims"] for spec in [*program["inputs"], *program["outputs"]]}
    assert dims["key_1"] == ["batch", 1, "past", 8]
    assert dims["new_key_1"] == ["batch", 1, "past + 1", 8]
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"], program="step")
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = {(row.runtime, row.case) for row in report.results}
    assert {("float64", "token by token"), ("onnxruntime", "step, first token")} <= rows


def test_a_step_keeps_the_limit_of_time_steps_that_transformers_leaves_out(tmp_path: Path) -> None:
    model = loaded(saved("Mamba2", tmp_path, time_step_limit=(0.3, 0.5)))
    (row,) = decoded(model, {"step": {}}, 0, lambda _: None)
    assert row.verdict == "pass"
    step, states = at(model, "step"), []
    for fused in (False, True):
        with torch.no_grad(), step.fused() if fused else nullcontext():
            found = step.module(torch.full((3, 1), 5), *zeros(step, 3))
        states.append(found[2])
    torch.testing.assert_close(*states)


def test_a_step_of_a_cache_of_another_kind_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(other("Llama", tmp_path))
    kinds = transformers.cache_utils
    monkeypatch.setitem(
        kinds.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", kinds.DynamicIndexedLayer
    )
    with pytest.raises(UsageError, match=r"layer 0 keeps neither .*, but a DynamicIndexedLayer"):
        next(api.capture(model, ["step"]))


# --- the user's own ------------------------------------------------------------------------------

NET = """
import torch
from torch import nn
from fuseport import ops

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(4, 4 + 4 + 2 + 2)
        self.A_log = nn.Parameter(torch.zeros(4, 2))
        self.scale = nn.Parameter(torch.ones(4))

    def split(self, x):
        return self.parts(x).split([4, 4, 2, 2], -1)

    def forward(self, x):
        u, dt, B, C = (part.mT for part in self.split(x))
        y = ops.selective_scan(u, dt, -self.A_log.exp(), B, C, delta_softplus=True)
        return y.mT * self.scale

    def initial_states(self, batch_size):
        return (torch.zeros(batch_size, 4, 2),)

    def step(self, x, state):
        u, dt, B, C = self.split(x[:, 0])
        state = state.clone()
        y = ops.selective_state_update(state, u, dt, -self.A_log.exp(), B, C, dt_softplus=True)
        return (y * self.scale)[:, None], state
"""
INPUTS = user.parse_inputs(["x:[batch,length,4]"])


def written(folder: Path, *changes: tuple[str, str]) -> tuple[Path, str]:
    """Weights, and `--model`, of the code with changes to it."""
    code = NET
    for before, after in changes:
        assert before in code
        code = code.replace(before, after)
    (folder / "net.py").write_text(code)
    torch.manual_seed(0)
    shapes = {"parts.weight": (12, 4), "parts.bias": (12,), "A_log": (4, 2), "scale": (4,)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "w.pth")
    return folder / "w.pth", f"{folder / 'net.py'}:Net"


def test_a_step_of_the_users_own_is_exported_and_verified(tmp_path: Path) -> None:
    weights, code = written(tmp_path)
    bundle = api.export(
        weights, tmp_path / "b", model=code, inputs=INPUTS, programs=["forward", "step"],
        format=["onnx", "exported_program"],
    )  # fmt: skip
    program = bundle.manifest["programs"]["step"]
    named = [(spec["name"], spec["dims"]) for spec in program["inputs"]]
    assert named == [("x", ["batch", 1, 4]), ("state", ["batch", 4, 2])]
    assert [spec["name"] for spec in program["outputs"]] == ["output", "new_state"]
    runtimes = ["eager", "onnxruntime", "exported_program"]
    report = api.verify(bundle.folder, runtime=runtimes, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = {(row.runtime, row.program, row.case) for row in report.results}
    assert ("float64", "step", "token by token") in rows
    assert {runtime for runtime, kind, _ in rows if kind == "step"} == {*runtimes, "float64"}
    assert set(load_file(bundle.weights)) == {"parts.weight", "parts.bias", "A_log", "scale"}


ATTENDS = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.parts(x).split(4, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def initial_states(self, batch_size):
        return torch.zeros(batch_size, 0, 4), torch.zeros(batch_size, 0, 4)

    def step(self, x, keys, values):
        q, k, v = self.parts(x).split(4, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return F.scaled_dot_product_attention(q, keys, values), keys, values
"""


def test_states_of_the_users_own_may_grow(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ATTENDS)
    torch.manual_seed(0)
    torch.save(torch.nn.Linear(4, 12).state_dict(prefix="parts."), tmp_path / "w.pth")
    code = f"{tmp_path / 'net.py'}:Net"
    bundle = api.export(
        tmp_path / "w.pth", tmp_path / "b", model=code, inputs=INPUTS, programs=["step"],
        format=["onnx", "torchscript"],
    )  # fmt: skip
    program = bundle.manifest["programs"]["step"]
    assert [spec["dims"] for spec in program["inputs"][1:]] == 2 * [["batch", "past", 4]]
    assert [spec["dims"] for spec in program["outputs"][1:]] == 2 * [["batch", "past + 1", 4]]
    report = api.verify(bundle.folder, runtime=["onnxruntime", "torchscript"], model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = {(row.runtime, row.case) for row in report.results}
    first = {(runtime, "step, first token") for runtime in ("onnxruntime", "torchscript")}
    assert {("float64", "token by token"), *first} <= rows


def test_a_wrong_step_of_the_users_own_is_found(tmp_path: Path) -> None:
    """It agrees with itself in all runtimes, and is not the forward."""
    weights, code = written(tmp_path, ("return (y * self.scale)", "return (y + self.scale)"))
    bundle = api.export(
        weights, tmp_path / "b", model=code, inputs=INPUTS, programs=["step"], format=["onnx"]
    )
    report = api.verify(bundle.folder, runtime=["onnxruntime"], model=code)
    assert report.exit_code() == 1
    assert {row.case for row in report.results if row.verdict == "fail"} == {"token by token"}


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (("def step(", "def stop("), UsageError, "Net has no method step; it takes step"),
        (("def initial_states(", "def initial("), UsageError, "no method initial_states"),
        (("state = state.clone()", "pass"), ExportFailed, "step writes to state"),
        (("def step(self, x, state)", "def step(self, x, a, b)"), UsageError, "gives 1 states"),
        (("torch.zeros(b", "torch.ones(b"), UsageError, "state is not zero"),
        (("torch.zeros(batch_size, 4", "torch.zeros(2 * batch_size, 4"), UsageError, "not follow"),
        (("(torch.zeros(batch_size, 4, 2),)", "[]"), UsageError, "must return a tuple of tensors"),
        (("torch.zeros(batch_size, 4", "torch.zeros(none, 4"), UsageError, "name 'none' is not"),
    ],
)
def test_a_step_of_another_form_says_what_is_amiss(
    change: tuple[str, str], kind: type[FuseportError], reason: str, tmp_path: Path
) -> None:
    weights, code = written(tmp_path, change)
    with pytest.raises(kind, match=reason) as raised:
        api.export(weights, tmp_path / "b", model=code, inputs=INPUTS, programs=["step"])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "b").exists()


def test_a_step_wants_time_to_be_dynamic(tmp_path: Path) -> None:
    weights, code = written(tmp_path)
    inputs = user.parse_inputs(["x:[batch,8,4]"])
    with pytest.raises(UsageError, match=r"dynamic; it takes x:\['batch', 8, 4\]"):
        api.export(weights, tmp_path / "b", model=code, inputs=inputs, programs=["step"])


def test_states_by_position_get_numbers(tmp_path: Path) -> None:
    weights, code = written(
        tmp_path,
        ("def step(self, x, state):", "def step(self, x, *states):"),
        ("state = state.clone()", "state = states[0].clone()"),
    )
    model, _ = models.from_checkpoint(load(weights), code=code, inputs=INPUTS)
    assert [spec.name for spec in at(model, "step").inputs] == ["x", "state_0"]
    (row,) = decoded(model, {"step": {}}, 0, lambda _: None)
    assert row.verdict == "pass"
