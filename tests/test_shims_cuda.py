"""What model code moves to CUDA stays on the CPU, under a stand-in for the device."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import shims
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.shims import _cuda
from fuseport.exporter.user_code import hint

MADE: dict[str, Callable[[], Tensor]] = {
    "cuda": lambda: torch.ones(2).cuda(),
    "cuda of a number": lambda: torch.ones(2).cuda(0),
    "to a name": lambda: torch.ones(2).to("cuda"),
    "to a device": lambda: torch.ones(2).to(torch.device("cuda:1")),
    "to a number": lambda: torch.ones(2).to(0),
    "to, by keyword": lambda: torch.ones(2).to(device="cuda", dtype=torch.float64),
    "made there": lambda: torch.ones(2, device="cuda"),
    "made there by number": lambda: torch.arange(1, 3, device=0),
    "made like another": lambda: torch.zeros_like(torch.ones(2), device="cuda") + 1,
    "a tensor to write to": lambda: torch.cuda.FloatTensor(2).fill_(1),
    "a tensor of such a size": lambda: torch.cuda.IntTensor(torch.Size([2]), device=0).zero_(),
    "a tensor of values": lambda: torch.cuda.LongTensor([3, 4]),
    "of a parameter's kind": lambda: torch.ones(2).new_zeros(2, device=torch.device("cuda")),
}


@pytest.mark.parametrize("way", MADE)
def test_what_is_moved_or_made_there_is_on_the_cpu(way: str) -> None:
    with shims.installed("torch.cuda") as used:
        assert not used
        found = MADE[way]()
    assert found.device.type == "cpu"
    assert found.shape == (2,)
    assert used == ["torch.cuda"]


def test_constructors_make_their_dtypes_and_are_torchs_again() -> None:
    before = torch.cuda.HalfTensor
    with shims.installed("torch.cuda"):
        assert torch.cuda.HalfTensor(2, 3).dtype == torch.float16
        assert torch.cuda.BoolTensor([0, 1]).tolist() == [False, True]
        assert torch.cuda.DoubleTensor(torch.ones(2)).dtype == torch.float64
        assert not isinstance(torch.cuda.FloatTensor(2), torch.cuda.FloatTensor)  # on the CPU
    assert torch.cuda.HalfTensor is before


def test_torchs_associative_scan_of_element_by_element_is_on_the_cpu() -> None:
    before = torch._higher_order_ops.associative_scan
    with shims.installed("torch.cuda") as used:
        from torch._higher_order_ops.associative_scan import associative_scan

        x = torch.arange(1.0, 6.0)
        found = associative_scan(torch.mul, x, 0), associative_scan(torch.mul, x, 0, True)
        assert used == ["torch.cuda"]
    assert found[0].equal(x.cumprod(0))
    assert found[1].equal(x.flip(0).cumprod(0).flip(0))
    assert torch._higher_order_ops.associative_scan is before
    if torch.__version__ < (2, 14):  # which takes it on the CPU itself
        with pytest.raises(ValueError, match="on CUDA") as refused:
            before(torch.mul, x, 0)
        assert "--shim auto" in hint(refused.value)


def test_modules_stay_and_keep_the_dtype_that_is_asked_for() -> None:
    net = nn.Linear(2, 2)
    with shims.installed("torch.cuda"):
        assert net.cuda().weight.device.type == "cpu"
        assert net.to("cuda", torch.float64).weight.dtype == torch.float64
        assert net(torch.ones(1, 2, dtype=torch.float64).cuda()).device.type == "cpu"


def test_what_stays_by_itself_is_left_alone() -> None:
    x = torch.ones(2)
    with shims.installed("torch.cuda") as used:
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to("meta").device.type == "meta"
        assert x.to(x.double()).dtype == torch.float64
        assert torch.ones(2, device="cpu").sum() == 2
        assert x.new_full((2,), True, device=None).sum() == 2
    assert not used


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_for_machines_without_a_gpu(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    with shims.installed("auto") as used, suppress(AssertionError, RuntimeError):
        torch.empty(2, device="cuda")  # as torch has it: with no GPU here, it raises
    assert used == ([] if there else ["torch.cuda"])


CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        pairs = torch.empty(*x.shape[:2], 2 * x.shape[2]).cuda()
        pairs[..., ::2] = self.proj(x)
        pairs[..., 1::2] = x
        return pairs * torch.arange(2 * x.shape[2], device="cuda")
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that exports code with such moves, but for the option."""
    folder = tmp_path_factory.mktemp("moves")
    (folder / "net.py").write_text(CODE)
    torch.save({k: torch.randn(v) for k, v in SHAPES.items()}, folder / "net.pth")
    return [
        "export", str(folder / "net.pth"), "-o", str(folder / "bundle"), "--force",
        "--model", f"{folder}/net.py:Net", "--input-shapes", "x:[batch,length,4]",
    ]  # fmt: skip


SHAPES = {"proj.weight": (4, 4), "proj.bias": (4,)}


def test_code_with_moves_in_its_forward_is_exported_and_verified(theirs: list[str]) -> None:
    done = CliRunner().invoke(main, [*theirs, "--shim", "auto"])
    assert done.exit_code == 0, done.output
    assert "stand-ins take the place of torch.cuda where the model is called" in done.output
    folder = Path(theirs[3])
    assert open_bundle(folder).manifest["architecture"]["config"]["shims"] == ["torch.cuda"]
    runtimes = "eager,torchscript,onnxruntime"
    done = CliRunner().invoke(
        main, ["verify", str(folder), "--model", theirs[6], "--runtime", runtimes]
    )
    assert done.exit_code == 0, done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and moves succeed")
def test_without_the_option_it_is_named(theirs: list[str]) -> None:
    done = CliRunner().invoke(main, theirs)
    assert done.exit_code == 8, done.output
    assert "net.py:11" in done.output
    assert "--shim auto leaves on the CPU what code moves to CUDA" in done.output


def test_what_is_replaced_is_as_it_was_afterwards() -> None:
    class Owner:
        own = 1

    class Heir(Owner):
        heirs = 2

    with _cuda.replaced(Heir, own=3, heirs=4):
        assert (Heir.own, Heir.heirs, Owner.own) == (3, 4, 1)
    assert (Heir.own, Heir.heirs) == (1, 2)
    assert "own" not in vars(Heir)


@pytest.mark.parametrize("package", ["triton", "cupy"])
def test_what_is_inside_of_a_placeholder_is_called_by_its_name(package: str) -> None:
    with shims.installed(package):
        inside = importlib.import_module(package).some.thing
        assert repr(inside) == f"<stand-in of {package}.some.thing>"
        with pytest.raises(RuntimeError, match=rf"^{package}\.some\.thing was called, but"):
            inside(1)
