"""Weights meet a module strictly, under whatever prefix, and leave it with memory of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import Missing
from fuseport.exporter.models.weights import fit


class Small(nn.Module):
    """Two layers, a buffer, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in Small().state_dict().items()}


def empty() -> Small:
    with torch.device("meta"):
        return Small()


def assert_loaded(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "net.", "module.", "_orig_mod.", "module.model._orig_mod.", "a.b.embedding."],
)
def test_any_prefix_is_found(tensors: dict[str, Tensor], prefix: str) -> None:
    module = empty()
    report = fit(module, {prefix + name: tensor for name, tensor in tensors.items()}, "f")
    assert_loaded(module, tensors)
    assert report.prefix == prefix.replace("_orig_mod.", "")


def test_a_prefix_that_the_file_lacks_is_put_before(tensors: dict[str, Tensor]) -> None:
    module = empty()
    around = nn.Module()
    around.net = nn.Module()
    around.net.m = module
    report = fit(around, tensors, "f")
    assert_loaded(module, tensors)
    assert (report.prefix, report.added) == ("", "net.m.")
    assert report.notes()[0] == "net.m. was put before the weights' names"
    with pytest.raises(Missing, match="missing"):
        fit(around, {**tensors, "another": torch.ones(1)}, "f")


def test_a_compiled_submodule_inserts_a_segment(tensors: dict[str, Tensor]) -> None:
    renamed = {n.replace("layer.", "layer._orig_mod."): t for n, t in tensors.items()}
    module = empty()
    fit(module, renamed, "f")
    assert_loaded(module, tensors)


def test_data_parallelism_around_a_part_inserts_a_segment(tensors: dict[str, Tensor]) -> None:
    renamed = {f"net.{n}".replace("layer.", "layer.module."): t for n, t in tensors.items()}
    module = empty()
    assert fit(module, renamed, "f").prefix == "net."
    assert_loaded(module, tensors)


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    own = nn.ModuleDict({"part": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    tensors = {f"module.{name}": tensor.clone() for name, tensor in own.state_dict().items()}
    assert fit(own, tensors, "f").prefix == "module."


def test_a_tied_parameter_stays_one(tensors: dict[str, Tensor]) -> None:
    module = empty()
    fit(module, tensors, "f")
    assert module.head.weight is module.embedding.weight
    assert [n for n, _ in module.named_parameters()].count("embedding.weight") == 1


@pytest.mark.parametrize("absent", ["head.weight", "embedding.weight"])
def test_a_tied_parameter_is_restored(tensors: dict[str, Tensor], absent: str) -> None:
    whole = dict(tensors)
    del tensors[absent]
    module = empty()
    report = fit(module, tensors, "f")
    assert_loaded(module, whole)
    assert report.restored == (absent,)
    assert any(absent in note for note in report.notes())


def test_what_lies_beside_the_model_is_reported(tensors: dict[str, Tensor]) -> None:
    given = {f"net.{name}": tensor for name, tensor in tensors.items()}
    report = fit(empty(), given | {"loss.weight": torch.ones(2)}, "f")
    assert report.left_out == ("loss.weight",)
    assert any("loss.weight" in note for note in report.notes())


def test_all_that_does_not_fit_is_in_one_error(tensors: dict[str, Tensor]) -> None:
    del tensors["layer.bias"]
    tensors["layer.weight"] = torch.ones(4, 3)
    tensors["more"] = torch.ones(1)
    tensors["norm.weight"] = torch.ones(3, dtype=torch.int8)
    tensors["head.weight"] = tensors["head.weight"] + 1
    with pytest.raises(Missing) as caught:
        fit(empty(), tensors, "folder/file.pt")
    message = str(caught.value)
    assert message.isprintable()
    for part in (
        "folder/file.pt",
        "missing: layer.bias",
        "unexpected: more",
        "layer.weight is (4, 3), expected (3, 3)",
        "norm.weight is int8, expected float32",
        "tied in the model but not in the file: embedding.weight and head.weight",
    ):
        assert part in message


class Counting(nn.Linear):
    """A layer that keeps more than its parameters in a state dict."""

    kept = torch.arange(2)

    def get_extra_state(self) -> Tensor:
        return self.kept

    def set_extra_state(self, state: Tensor) -> None:
        self.kept = state


@pytest.mark.parametrize("prefix", ["", "net."])
def test_what_a_layer_takes_beside_parameters_it_is_given(prefix: str) -> None:
    module = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    given = {f"{prefix}{name}": t.clone() + 1 for name, t in module.state_dict().items()}
    given[f"{prefix}0._extra_state"] = torch.arange(5)
    report = fit(module, given, "f")
    assert torch.equal(module[0].kept, torch.arange(5))
    assert report.dtypes == {"float32": 4}
    with pytest.raises(Missing, match=r"unexpected: 1\._extra_state;"):
        fit(module, given | {f"{prefix}1._extra_state": torch.ones(1)}, "f")
    whole = nn.Sequential(module)
    fit(whole, {f"0.{name}": t for name, t in module.state_dict().items()}, "f")
    report = fit(whole, module.state_dict(), "f")
    assert report.added == "0."


def test_a_long_list_is_cut_and_counted(tensors: dict[str, Tensor]) -> None:
    extra = {f"extra.{i}": torch.ones(1) for i in range(100)}
    with pytest.raises(Missing, match="and 94 more"):
        fit(empty(), tensors | extra, "f")


def test_nothing_in_common(tensors: dict[str, Tensor]) -> None:
    del tensors
    with pytest.raises(Missing, match=r"missing: .*unexpected: conv"):
        fit(empty(), {"conv": torch.ones(1)}, "f")


def test_two_copies_of_the_model_are_not_chosen_between(tensors: dict[str, Tensor]) -> None:
    both = {f"{p}.{name}": tensor for p in ("net", "ema") for name, tensor in tensors.items()}
    with pytest.raises(Missing, match=r"more than once, under ema\., net\."):
        fit(empty(), both, "f")


def test_the_error_leaves_the_module_as_it_was(tensors: dict[str, Tensor]) -> None:
    module = Small()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    del tensors["layer.bias"]
    with pytest.raises(Missing):
        fit(module, tensors, "f")
    assert_loaded(module, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_file_is_kept(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    tensors["layer.weight"] = tensors["layer.weight"].to(dtype)
    module = empty()
    report = fit(module, tensors, "f")
    assert module.layer.weight.dtype == dtype
    name = str(dtype).removeprefix("torch.")
    assert report.dtypes == {"float32": 6, name: 1, "int64": 1}
    assert any(name in note for note in report.notes())
    assert not any("int64" in note for note in report.notes())  # a counter of batches


def test_eight_bit_floats_are_no_weights_to_compute_with(tensors: dict[str, Tensor]) -> None:
    tensors["layer.weight"] = tensors["layer.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(Missing, match="float8_e4m3fn"):
        fit(empty(), tensors, "f")


def test_parameters_own_writable_memory(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / "w.pt")
    before = (tmp_path / "w.pt").read_bytes()
    checkpoint = load(tmp_path / "w.pt")
    module = empty()
    fit(module, checkpoint.tensors, "w.pt")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert (tmp_path / "w.pt").read_bytes() == before
    assert torch.equal(checkpoint.tensors["layer.weight"], tensors["layer.weight"])
    (tmp_path / "w.pt").write_bytes(b"")  # a map of it would now end the process
    assert torch.equal(module.layer.weight, tensors["layer.weight"] + 1)


def test_requires_grad_is_the_modules(tensors: dict[str, Tensor]) -> None:
    module = empty()
    module.layer.requires_grad_(False)
    fit(module, tensors, "f")
    assert not module.layer.weight.requires_grad
    assert module.embedding.weight.requires_grad


def test_transposed_weights_become_contiguous(tensors: dict[str, Tensor]) -> None:
    tensors["layer.weight"] = tensors["layer.weight"].t().contiguous().t()
    module = empty()
    fit(module, tensors, "f")
    assert module.layer.weight.is_contiguous()
    assert_loaded(module, tensors)


def test_memory_that_others_hold_is_kept_where_it_can_be() -> None:
    """Not that of an expanded buffer, which is one number, nor of what another dtype replaces."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Parameter(torch.zeros(3, 4))
            self.turned = nn.Parameter(torch.zeros(3, 4).t())
            self.narrow = nn.Parameter(torch.zeros(3))
            self.register_buffer("expanded", torch.zeros(1).expand(3))

    tensors = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(4, 3),
        "narrow": torch.randn(3).bfloat16(),
        "expanded": torch.randn(3),
    }
    module = Shared()
    before, view = dict(module.named_parameters()), module.plain.detach().t()
    fit(module, tensors, "x.pt")
    assert_loaded(module, tensors)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    assert torch.equal(view, tensors["plain"].t())
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())


def test_a_module_may_load_by_a_method_of_before_assign(tensors: dict[str, Tensor]) -> None:
    class Renaming(Small):
        """As Demucs, which gives names of its first versions their new ones."""

        def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
            super().load_state_dict(state, strict=strict)

    class Noting(Small):
        noted = False

        def load_state_dict(self, *args: Any, **by: Any) -> Any:
            self.noted = True
            return super().load_state_dict(*args, **by)

    with torch.device("meta"):
        modules = [Renaming(), Noting()]
    for module in modules:
        fit(module, tensors, "f")
        assert_loaded(module, tensors)
    assert modules[1].noted
