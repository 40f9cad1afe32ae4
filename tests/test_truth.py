"""Truth is float64 throughout, whatever the model's code casts to; the baseline is several ways."""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import CorruptInput, ExportFailed
from fuseport.exporter.models.model import Model
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.float64 import Float64
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.verify import modes, plan, truth
from fuseport.exporter.verify.doubts import require_some
from fuseport.exporter.verify.plan import Case
from fuseport.exporter.verify.sample import INDEX, Sample, opened, read_all
from fuseport.ops import OPS, register

FIXTURES = Path(__file__).parent.parent / "fixtures"
CASE = Case("export", {"batch": 2, "length": 5}, "contiguous", 0)
# Not representable in float32: a cast on the way shows in the result.
THIRD = 1.0 / 3.0


LINEAR = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)
"""


class Net(nn.Module):
    """Calls `function` on its input, scaled by a parameter, and on itself."""

    def __init__(self, function: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4))
        self.constant = torch.full((4,), THIRD)  # neither parameter nor buffer
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x * self.w)


def model_of(function: Callable[[Net, Tensor], Any], **changes: Any) -> Model:
    spec = TensorSpec("x", "float32", ("batch", "length", 4))
    return replace(Model(Net(function).eval(), "user", {}, (spec,), CASE.sizes), **changes)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float() * THIRD

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.float() * THIRD


def autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ torch.full((4, 4), THIRD)


CASTS: Mapping[str, Callable[[Net, Tensor], Tensor]] = {
    "float": lambda net, x: x.float() * THIRD,
    "half": lambda net, x: x.half() * THIRD,
    "bfloat16": lambda net, x: x.bfloat16() * THIRD,
    "to dtype": lambda net, x: x.to(torch.float32) * THIRD,
    "to device and dtype": lambda net, x: x.to("cpu", torch.float16) * THIRD,
    "to keyword": lambda net, x: x.to(dtype=torch.bfloat16) * THIRD,
    "to another tensor": lambda net, x: x.to(net.constant) * THIRD,
    "type of dtype": lambda net, x: x.type(torch.float32) * THIRD,
    "type of string": lambda net, x: x.type("torch.HalfTensor") * THIRD,
    "type of class": lambda net, x: x.type(torch.FloatTensor) * THIRD,
    "type_as": lambda net, x: x.type_as(net.constant) * THIRD,
    "softmax dtype": lambda net, x: F.softmax(x, -1, dtype=torch.float32),
    "sum dtype": lambda net, x: x.sum(-1, dtype=torch.float16)[..., None] * x,
    "zeros without dtype": lambda net, x: torch.zeros(4).add(THIRD) * x,
    "zeros of dtype": lambda net, x: torch.zeros(4, dtype=torch.float16).add(THIRD) * x,
    "full": lambda net, x: torch.full((4,), THIRD) * x,
    "tensor": lambda net, x: torch.tensor([THIRD] * 4) * x,
    "new_tensor": lambda net, x: x.new_tensor([THIRD] * 4, dtype=torch.float32) * x,
    "arange": lambda net, x: torch.arange(0, 1, 0.25, dtype=torch.float32).exp() * x,
    "linspace": lambda net, x: torch.linspace(0, THIRD, 4) @ torch.full((4, 4), THIRD) * x,
    "default dtype": lambda net, x: x.to(torch.get_default_dtype()) * THIRD,
    "integer to float": lambda net, x: torch.arange(4).float().div(3) * x,
    "in a list": lambda net, x: torch.stack([x.float(), x.half()]).mean(0) * THIRD,
    "constant": lambda net, x: x @ net.constant.diag(),
    "autocast": autocast,
    "einsum": lambda net, x: torch.einsum("bli,ij->blj", x.float(), net.constant.diag().float()),
    "own backward": lambda net, x: Backward.apply(x),  # type: ignore[no-any-return]
}


def differentiated(net: nn.Module, x: Tensor, seed: Tensor) -> dict[str, Tensor | None]:
    session = ModuleSession(net, net.named_parameters(), lambda result: {"y": result})
    return session.differentiate({"x": x}, {"y": seed})


@pytest.mark.parametrize("what", CASTS)
def test_casts_are_raised_to_float64(what: str) -> None:
    """Held against the same code, run where float32 is float64: in a process-wide substitute."""
    net = Net(CASTS[what]).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(2, 3, 4, dtype=torch.float64)
    with modes.References(), Float64():
        found = differentiated(net, x, seed)
    for value in found.values():
        assert value is not None
        assert value.dtype == torch.float64
    # Central differences of a float64 function agree to 1e-8; of one rounded to float32, to 1e-2.
    step = 1e-6 * torch.randn(2, 3, 4, dtype=torch.float64)
    values = []
    for sign in (1, -1):
        with modes.References(), Float64(), torch.no_grad():
            values.append((net(x + sign * step) * seed).sum())
    gradient = found["grad/x"]
    assert gradient is not None
    expected = (2 * step * gradient).sum()
    assert math.isclose(values[0] - values[1], expected, rel_tol=1e-6, abs_tol=1e-14)


def test_the_mode_leaves_nothing_behind() -> None:
    with Float64():
        assert torch.get_default_dtype() == torch.float64
    with pytest.raises(RuntimeError), Float64():
        torch.ones(2) @ torch.ones(3)
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32


def test_integers_and_booleans_stay() -> None:
    with Float64():
        assert torch.arange(3).dtype == torch.int64
        assert (torch.ones(2) > 0).dtype == torch.bool
        assert torch.ones(2).to(torch.int32).dtype == torch.int32
        assert torch.ones(2, dtype=torch.complex64).dtype == torch.complex128


def insists(net: Net, x: Tensor) -> Tensor:
    assert x.dtype == torch.float32, "float32 only"
    return x


def test_a_model_that_insists_on_float32_is_told_that_it_has_it(tmp_path: Path) -> None:
    def checked(net: Net, x: Tensor) -> Tensor:
        assert (net.w * x).dtype == torch.float32
        return (net.w * x).exp()

    torch.manual_seed(3)
    (plain,) = truth.compute(model_of(lambda net, x: (net.w * x).exp()), [CASE], tmp_path)
    exact = opened_values(plain)
    torch.manual_seed(3)
    (told,) = truth.compute(model_of(checked), [CASE], tmp_path)
    found = opened_values(told)
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], t) for name, t in exact.items())
    assert {t.dtype for t in found.values()} == {torch.float64}


def test_what_model_code_keeps_from_its_first_call_is_of_the_working_dtype(tmp_path: Path) -> None:
    kept: dict[str, Tensor] = {}

    def keeps(net: Net, x: Tensor) -> Tensor:
        grid = kept.setdefault("grid", torch.linspace(0.0, 1.0, 4))
        return torch.lerp(x, grid.expand(x.shape), 0.5)  # refuses mixed dtypes

    model = model_of(keeps)
    (first,) = truth.compute(model, [CASE], tmp_path)
    folder = tmp_path / "again"
    folder.mkdir()
    kept.clear()  # as in another process
    (again,) = truth.compute(model, [CASE], folder, given={CASE.name: first.file})
    assert kept["grid"].dtype == torch.float32
    assert again.expected.keys() == first.expected.keys()


def opened_values(sample: Sample) -> dict[str, Tensor]:
    with safe_open(sample.file, "pt") as file:
        names = [name for name in file.keys() if name.startswith("truth/")]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def test_a_model_that_does_not_run_in_float64_is_a_clear_error(tmp_path: Path) -> None:
    def insists(net: Net, x: Tensor) -> Tensor:
        assert x.element_size() == 4, "float32 only"
        return x

    with pytest.raises(ExportFailed, match=r"does not run in float64.*float32 only"):
        truth.compute(model_of(insists), [CASE], tmp_path)


def test_the_model_is_the_same_afterwards(tmp_path: Path) -> None:
    model = model_of(lambda net, x: x.exp())
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    threads = torch.get_num_threads()
    mkldnn = torch._C._get_mkldnn_enabled()
    truth.compute(model, [CASE], tmp_path)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert torch.get_num_threads() == threads
    assert torch._C._get_mkldnn_enabled() == mkldnn


def test_nothing_is_printed_or_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        truth.compute(model_of(lambda net, x: x.exp()), [CASE], tmp_path)


class TestSample:
    def test_it_holds_inputs_cotangents_and_truth(self, tmp_path: Path) -> None:
        (sample,) = truth.compute(model_of(lambda net, x: {"y": x.exp()}), [CASE], tmp_path)
        with safe_open(sample.file, "pt") as file:
            assert set(file.keys()) == {
                *("input/x", "cotangent/y", "truth/y", "truth/grad/x", "truth/grad/w")
            }
            x, seed = file.get_tensor("input/x").double(), file.get_tensor("cotangent/y").double()
        with opened(sample) as exact:
            y, gradient = exact("y"), exact("grad/x")
        w = Net(insists).w.detach().double()
        assert torch.allclose(y, (x * w).exp(), rtol=1e-14, atol=0.0)
        assert torch.allclose(gradient, seed * (x * w).exp() * w, rtol=1e-14, atol=0.0)
        known = sample.expected["y"]
        assert known.dtype == "float32"
        assert known.scale.max_abs == float(y.max())
        assert 0 < known.baseline.max_abs < 1e-5 * known.scale.max_abs

    def test_it_is_read_back_as_it_was(self, tmp_path: Path) -> None:
        computed = truth.compute(model_of(lambda net, x: x.exp()), [CASE], tmp_path)
        assert read_all(tmp_path) == computed

    @pytest.mark.parametrize("text", ["", "{}", "[{}]", "[1]", None])
    def test_an_index_of_another_kind_is_corrupt(self, text: str | None, tmp_path: Path) -> None:
        if text is not None:
            (tmp_path / INDEX).write_text(text)
        with pytest.raises(CorruptInput):
            read_all(tmp_path)

    def test_what_is_too_large_is_omitted_but_has_its_figures(self, tmp_path: Path) -> None:
        model = model_of(lambda net, x: x.exp())
        (whole,) = truth.compute(model, [CASE], tmp_path)
        (sample,) = truth.compute(model, [CASE], tmp_path, limit=100)
        assert set(sample.omitted) == {"output", "grad/x"}
        assert sample.expected == whole.expected
        with safe_open(sample.file, "pt") as file:
            assert set(file.keys()) == {"input/x", "cotangent/output", "truth/grad/w"}

    def test_given_inputs_are_taken(self, tmp_path: Path) -> None:
        model = model_of(lambda net, x: x.exp())
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        (first,) = truth.compute(model, [CASE], tmp_path / "a")
        other = replace(CASE, seed=5)
        (again,) = truth.compute(model, [other], tmp_path / "b", given={"export": first.file})
        with opened(first) as one, opened(again) as two:
            assert torch.equal(one("output"), two("output"))

    def test_a_refused_case_says_why(self, tmp_path: Path) -> None:
        def refuse(net: Net, x: Tensor) -> Tensor:
            if x.shape[1] == 1:
                raise ValueError("length 1 is too short")
            return x

        samples = truth.compute(model_of(refuse), plan.cases(CASE.sizes, 0), tmp_path)
        for sample in samples:
            why = "ValueError: length 1 is too short" if sample.case.sizes["length"] == 1 else None
            assert sample.refused == why
        assert read_all(tmp_path) == samples
        require_some(samples)

    def test_a_model_of_which_nothing_could_be_compared_is_not_exported(
        self, saved_with: Callable[..., tuple[Path, str]], tmp_path: Path, monkeypatch: Any
    ) -> None:
        def refused(*args: Any, **options: Any) -> tuple[Sample, ...]:
            return tuple(replace(s, refused="ValueError: no") for s in compute(*args, **options))

        compute = truth.compute
        monkeypatch.setattr(truth, "compute", refused)
        checkpoint, model = saved_with(LINEAR, layer=nn.Linear(3, 3))
        with pytest.raises(ExportFailed, match=r"^forward: .* all \d+ cases .*: ValueError: no"):
            api.export(checkpoint, tmp_path / "bundle", model=model, inputs="x:[batch,3]")
        assert not (tmp_path / "bundle").exists()

    def test_gradients_that_do_not_exist_are_named(self, tmp_path: Path) -> None:
        def constant(net: Net, x: Tensor) -> Tensor:
            return torch.ones(2) + 0 * net.w.sum()

        (sample,) = truth.compute(model_of(constant), [CASE], tmp_path)
        assert sample.none == ("grad/x",)
        assert sample.expected["grad/w"].scale.max_abs == 0.0
        assert sample.expected["grad/w"].zero

    def test_a_model_without_gradients_at_all(self, tmp_path: Path) -> None:
        model = model_of(lambda net, x: x.detach() > 0)
        (sample,) = truth.compute(model, [CASE], tmp_path)
        assert set(sample.none) == {"grad/x", "grad/w"}
        assert sample.expected["output"].dtype == "bool"

    def test_a_model_that_writes_into_what_the_gradient_of_an_input_needs(
        self, tmp_path: Path
    ) -> None:
        """It is trained by its parameters; what a program of it gives is the truth all the same."""

        def normalised(net: Net, x: Tensor) -> Tensor:
            x = x - x.mean()
            scale = torch.sqrt(torch.var(x, unbiased=False) + 1e-5)
            if net.training:
                x /= scale
            else:
                x = x / scale
            return x * net.w.sum()

        files = []
        for training in (True, False):
            model = model_of(normalised)
            model.module.train(training)
            folder = tmp_path / str(training)
            folder.mkdir()
            (sample,) = truth.compute(model, [CASE], folder)
            assert not sample.unstable
            files.append(load_file(sample.file))
        written, plain = files
        assert written.keys() == plain.keys() >= {"truth/grad/x", "truth/grad/w"}
        for name, tensor in written.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-14, atol=1e-14)

    def test_outputs_that_are_empty_or_scalar(self, tmp_path: Path) -> None:
        def shapes(net: Net, x: Tensor) -> dict[str, Tensor]:
            return {"scalar": x.sum(), "empty": x[:0], "token": x.argmax(-1)}

        (sample,) = truth.compute(model_of(shapes), [CASE], tmp_path)
        assert {n: e.dtype for n, e in sample.expected.items() if "/" not in n} == {
            "scalar": "float32",
            "empty": "float32",
            "token": "int64",
        }

    def test_expanded_cotangents_are_the_same_in_every_row(self, tmp_path: Path) -> None:
        case = replace(CASE, layout="expanded")
        (sample,) = truth.compute(model_of(lambda net, x: x.exp()), [case], tmp_path)
        with safe_open(sample.file, "pt") as file:
            seed = file.get_tensor("cotangent/output")
        assert torch.equal(seed, seed[0, 0].expand(seed.shape))


RANDOM = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.gumbel_softmax(self.a(x))
"""


DOUBTFUL = {
    "gumbel_softmax(self.a(x))": "two runs .* another output, and 3 tensors more: it",
    "relu(self.a(x)) / (x == 9).sum()": "past a chunk, sliced: the model itself gives nothing fin",
}


@pytest.mark.parametrize("returned", DOUBTFUL)
def test_an_export_says_what_nothing_is_held_against(
    returned: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = RANDOM.replace(next(iter(DOUBTFUL)), returned)
    checkpoint, model = saved_with(code, a=nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    options: dict[str, Any] = {"model": model, "inputs": inputs, "format": ["torchscript"]}
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    assert any(re.search(DOUBTFUL[returned], note) for note in bundle.manifest["notes"])


def test_of_a_fused_op_every_input_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference may not use an input at all, as a decay where there is one step: it is 0 then."""
    forward = OPS["swiglu"].operators[0]
    alone = replace(forward, reference=lambda gate, up: gate * 2)
    spec = replace(OPS["swiglu"], operators=(alone, *OPS["swiglu"].operators[1:]))
    monkeypatch.setitem(OPS, "swiglu", spec)
    register("swiglu")
    gate, up = (torch.tensor([1.0, torch.inf], requires_grad=True) for _ in range(2))
    with modes.References():
        out = forward(gate, up)[0]
    assert torch.equal(out, gate * 2)
    d_gate, d_up = torch.autograd.grad(out.sum(), (gate, up))
    assert torch.equal(d_gate, torch.full((2,), 2.0))
    assert torch.equal(d_up, torch.zeros(2))


class Calls(TorchDispatchMode):
    """Counts the fused ops that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += str(func).startswith("fuseport")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fixture", ["state_spaces", "huggingface"])
def test_truth_never_runs_a_fused_op(
    fixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a kernel's error would be its own truth."""
    model, _ = models.from_checkpoint(checkpoint.load(FIXTURES / fixture))
    own = 0
    if fixture == "huggingface":
        # Truth of transformers' model is transformers' own path.
        from transformers.models.mamba import modeling_mamba

        scan = modeling_mamba.mamba_selective_scan

        def counted(*arguments: Any, **choices: Any) -> Any:
            nonlocal own
            own += 1
            return scan(*arguments, **choices)

        monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", counted)
    with Calls() as calls:
        truth.compute(model, [CASE], tmp_path)
    assert calls.count == 0
    if fixture == "huggingface":
        assert own > 0
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.int64)}
    with Calls() as calls, model.fused(), torch.no_grad():
        model.module(*inputs.values())
    assert calls.count > 0


def test_samples_json_is_plain(tmp_path: Path) -> None:
    truth.compute(model_of(lambda net, x: x.exp()), [CASE], tmp_path)
    (entry,) = json.loads((tmp_path / INDEX).read_text())
    assert entry["file"] == "case0.safetensors"
    assert entry["expected"]["output"]["dtype"] == "float32"
