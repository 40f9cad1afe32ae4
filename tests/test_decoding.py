"""The step program: one token of a language model, with its states as inputs and outputs."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter import api, formats, models
from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models import mamba, mamba2
from fuseport.exporter.models.given import Given
from fuseport.exporter.models.model import Model, at
from fuseport.exporter.program import KINDS, named_outputs
from fuseport.exporter.verify.decoding import decoded
from fuseport.exporter.verify.plan import GIVEN
from fuseport.exporter.verify.sample import read_all

FIXTURES = Path(__file__).parent.parent / "fixtures"
SIZES: dict[str, Any] = {"d_model": 16, "n_layer": 2, "vocab_size": 30, "d_state": 4, "d_conv": 4}
MAMBA = mamba.MambaConfig(**SIZES, d_inner=32, dt_rank=2)
MAMBA2 = mamba2.Mamba2Config(**SIZES, n_heads=4, d_ssm=32, n_groups=2)
CONFIGS = [
    (mamba, MAMBA),
    (mamba, dataclasses.replace(MAMBA, conv_bias=False, d_conv=2, rms_norm=False)),
    (mamba2, MAMBA2),
    (mamba2, dataclasses.replace(MAMBA2, d_mlp=8, D_has_hdim=True, conv_bias=False)),
    (mamba2, dataclasses.replace(MAMBA2, mixer_norm=False, dt_min=0.01, dt_max=0.1)),
]
PROMPT = b"In the beginning"
TOKENS = 200


def built(architecture: Any, config: Any, dtype: torch.dtype) -> Model:
    """A model with random weights, none at a special value."""
    torch.manual_seed(0)
    model: Model = architecture.model(dataclasses.asdict(config))
    module = model.module.to_empty(device="cpu").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model


def zeros(model: Model, batch: int) -> list[Tensor]:
    return [
        torch.zeros([batch if d == "batch" else int(d) for d in spec.dims], dtype=spec.torch_dtype)
        for spec in model.inputs[1:]
    ]


def token_by_token(step: Callable[..., Any], ids: Tensor, states: list[Tensor]) -> Tensor:
    logits = []
    for token in ids.split(1, dim=1):
        first, *states = step(token, *states)
        logits.append(first)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("architecture", "config"), CONFIGS)
def test_token_by_token_is_the_whole_sequence(architecture: Any, config: Any) -> None:
    model = built(architecture, config, torch.float64)
    step = at(model, "step")
    ids = torch.randint(0, 30, (3, 11))
    with torch.no_grad():
        found = token_by_token(step.module, ids, zeros(step, 3))
        torch.testing.assert_close(found, model.module(ids), rtol=1e-9, atol=1e-10)
    assert {id(p) for p in step.module.parameters()} == {id(p) for p in model.module.parameters()}
    assert step.module.state_dict().keys() == model.module.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("architecture", "config"), [CONFIGS[0], CONFIGS[2]])
def test_states_have_the_dtypes_of_the_activations(
    architecture: Any, config: Any, dtype: torch.dtype
) -> None:
    model = built(architecture, config, torch.float32)
    models.convert(model, dtype)
    step = at(model, "step")
    name = str(dtype).removeprefix("torch.")
    assert [spec.dtype for spec in step.inputs] == ["int64", name, "float32"]
    with torch.no_grad():
        logits, *states = step.module(torch.zeros(2, 1, dtype=torch.int64), *zeros(step, 2))
    assert [t.dtype for t in (logits, *states)] == [dtype, dtype, torch.float32]


def test_the_program_writes_no_state_and_takes_any_batch() -> None:
    model = built(*CONFIGS[2], torch.float32)
    forward, program = api.capture(model, ["step"])
    assert (forward.kind, program.kind) == ("forward", "step")
    assert [spec.name for spec in program.outputs] == [
        "logits", "new_conv_states", "new_ssm_states"]  # fmt: skip
    step, run = at(model, "step"), program.exported.module()
    for batch in (1, 5):
        ids, states = torch.randint(0, 30, (batch, 1)), zeros(step, batch)
        found = run(ids, *states)
        assert not any(state.any() for state in states)
        with torch.no_grad():
            for value, expected in zip(found.values(), step.module(ids, *states), strict=True):
                torch.testing.assert_close(value, expected)


def test_a_model_without_a_step_says_so() -> None:
    model = dataclasses.replace(built(*CONFIGS[0], torch.float32), step=None)
    with pytest.raises(UsageError, match=r"program step: .* mamba has no decoding step"):
        next(api.capture(model, ["step"]))


def test_a_bundle_with_a_step_verifies_beside_inputs_of_the_users_own(tmp_path: Path) -> None:
    weights = built(*CONFIGS[0], torch.float32).module.state_dict()
    torch.save(weights, tmp_path / "mamba.pt")
    given = Given("ids", {"input_ids": torch.randint(0, 30, (2, 9))})
    bundle = api.export(
        tmp_path / "mamba.pt", tmp_path / "b", given=given, dtype="bfloat16",
        programs=["forward", "step"], format=["exported_program", "torchscript"],
    )  # fmt: skip
    cases = [sample.case for sample in read_all(bundle.folder / "samples")]
    assert [case.name for case in cases if case.entry == "forward"][-1] == GIVEN
    assert all(case.sizes.keys() == {"batch"} for case in cases if case.entry == "step")
    report = api.verify(bundle.folder, runtime=["eager", "exported_program", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}
    found = {(row.runtime, row.program, row.way, row.case) for row in report.results}
    for runtime in ("eager", "exported_program", "torchscript"):
        for case in cases:
            assert (runtime, case.entry, "run", case.name) in found
            autograd = (runtime, "gradient", "autograd", case.name)
            assert (autograd in found) == (case.entry == "forward")
    assert ("float64", "step", "run", "token by token") in found


def test_a_step_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right on zero states, and agrees with itself in every runtime."""
    model = built(*CONFIGS[0], torch.float32)
    programs: dict[str, Any] = dict.fromkeys(KINDS)
    (row,) = decoded(model, programs, 0, lambda _: None)
    assert (row.program, row.tensor, row.verdict) == ("step", "logits", "pass")
    kept = mamba.advanced

    def forgetful(state: Tensor, *others: Any) -> Any:
        return kept(torch.zeros_like(state), *others)

    monkeypatch.setattr(mamba, "advanced", forgetful)
    (row,) = decoded(model, programs, 0, lambda _: None)
    assert row.verdict == "fail"
    assert not list(decoded(model, {"forward": {}}, 0, lambda _: None))


def of_transformers(folder: Path) -> Path:
    """The trained fixture as transformers saves it: its names, its config."""
    loaded = load(FIXTURES / "lightning" / "mamba-kjv.ckpt")
    found = mamba.recognise(loaded)
    assert found is not None
    config = transformers.MambaConfig(
        vocab_size=found["vocab_size"], hidden_size=found["d_model"], state_size=found["d_state"],
        num_hidden_layers=found["n_layer"], conv_kernel=found["d_conv"],
        expand=found["d_inner"] // found["d_model"], time_step_rank=found["dt_rank"],
        layer_norm_epsilon=found["norm_epsilon"], tie_word_embeddings=found["tie_embeddings"],
        residual_in_fp32=found["residual_in_fp32"],
    )  # fmt: skip
    module = transformers.MambaForCausalLM(config)
    own, _ = models.from_checkpoint(loaded)
    tensors = own.module.state_dict()
    module.load_state_dict({n.replace("embedding.", "embeddings."): tensors[n] for n in tensors})
    module.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("source", ["lightning", "transformers"])
def test_onnx_runtime_generates_what_eager_does(source: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    if source == "transformers":
        path = of_transformers(tmp_path / "saved")
    model, _ = models.from_checkpoint(load(path))
    _, program = api.capture(model, ["step"])
    weights = tmp_path / "weights.safetensors"
    save_file({n: t.contiguous() for n, t in program.state(requires_grad=False).items()}, weights)
    file = tmp_path / "step.onnx"
    formats.get("onnx").write(program, file, formats.Options(weights, formats.DEFAULT_OPSET))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    states = {spec.name: state.numpy() for spec, state in zip(
        program.inputs[1:], zeros(at(model, "step"), 1), strict=True)}  # fmt: skip

    tokens = list(PROMPT)
    for at_ in itertools.count():
        token = np.array([[tokens[at_]]])
        logits, *new = session.run(None, {"input_ids": token, **states})
        states = dict(zip(states, new, strict=True))
        if at_ == len(tokens) - 1:
            if len(tokens) == len(PROMPT) + TOKENS:
                break
            tokens.append(int(logits[0, -1].argmax()))

    expected = torch.tensor([list(PROMPT)])
    with torch.no_grad(), model.fused():
        for _ in range(TOKENS):
            logits = named_outputs(model.module(expected), model.outputs)["logits"]
            chosen = logits[:, -1:].argmax(-1)
            expected = torch.cat([expected, chosen], dim=1)
    assert bytes(tokens) == bytes(expected[0].tolist())
    assert len(set(tokens[len(PROMPT) :])) > 5  # it does not stand still
