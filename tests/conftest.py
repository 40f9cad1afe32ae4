"""Bundles that many tests read, each exported once in a session, and what may not be here."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fuseport.exporter import api
from fuseport.exporter.garbage import importing
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.run import quick_starts
from fuseport.ops import onnxruntime_library, ort
from fuseport.ops.build import BuildError
from fuseport.tests.slow import (
    deselect_slow,
    file_of,
    pytest_addoption,
    pytest_report_header,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    seconds_of_files,
)

__all__ = [
    "pytest_addoption",
    "pytest_report_header",
    "pytest_runtest_logreport",
    "pytest_sessionfinish",
]

TESTS = Path(__file__).parent
FIXTURES = TESTS.parent / "fixtures"
PATHS = list(sys.path)

COLLECTING = ExitStack()
COLLECTING.enter_context(importing())  # all that test files import, too

SMALL_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(6, 5)
        self.other = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.other(torch.tanh(self.one(x)))
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest first: else a worker has the last of them alone."""
    seconds = seconds_of_files()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))
    deselect_slow(config, items)


def pytest_collection_finish() -> None:
    """All is imported, and leaves collections of garbage in peace."""
    COLLECTING.close()


@pytest.fixture(autouse=True, scope="session")
def _children_are_forked_from_one_server() -> Iterator[None]:
    """As within one command: what each of many verifications would start by itself."""
    with quick_starts():
        yield


@pytest.fixture(autouse=True, scope="module")
def _code_of_users_stays_in_its_file() -> Iterator[None]:
    """Models and extensions that a test file imports are not what the next one finds.

    A command imports its user's code for the life of its process; here, one process is many
    commands, and which files it runs is up to the scheduler.
    """
    yield
    sys.path[:] = PATHS
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")]
    ours = [*installed, *(TESTS.parent / name for name in ("exporter", "ops", "tests"))]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            file
            and not Path(file).match("fixtures/*/*_ops.py")
            and Path(file).parent != TESTS.parent
            and not any(Path(file).is_relative_to(folder) for folder in ours)
        ):
            del sys.modules[name]


@pytest.fixture(scope="session")
def lightning_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Lightning checkpoint's bundle. Read-only: copy it to change it."""
    return _exported("lightning/mamba-kjv.ckpt", tmp_path_factory)


@pytest.fixture(scope="session")
def state_spaces_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a folder as state-spaces publishes it. Read-only: copy it to change it."""
    return _exported("state_spaces", tmp_path_factory)


@pytest.fixture(scope="session")
def huggingface_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a folder as transformers saves it. Read-only: copy it to change it."""
    return _exported("huggingface", tmp_path_factory)


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle of a small net of one's own, and its code for `model`. Read-only."""
    folder = tmp_path_factory.mktemp("small")
    code = folder / "small_net.py"
    code.write_text(SMALL_NET)
    namespace: dict[str, Any] = {}
    exec(SMALL_NET, namespace)
    torch.manual_seed(0)
    torch.save(namespace["Net"]().state_dict(), folder / "small.pt")
    model = f"{code}:Net"
    bundle = api.export(
        folder / "small.pt",
        folder / "bundle",
        model=model,
        inputs=parse_inputs(["x:[batch,6]"]),
        format=["torchscript", "onnx"],
    )
    return bundle.folder, model


@pytest.fixture
def saved_with(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """Saves code with a class `Net`, and a checkpoint of its layers: that, and what --model is."""

    def save(code: str, **layers: torch.nn.Module) -> tuple[Path, str]:
        file, checkpoint = tmp_path / "net.py", tmp_path / "net.pt"
        file.write_text(code)
        state = {
            f"{n}.{k}": t for n, layer in layers.items() for k, t in layer.state_dict().items()
        }
        torch.save(state, checkpoint)
        return checkpoint, f"{file}:Net"

    return save


@pytest.fixture
def saved_net(
    saved_with: Callable[..., tuple[Path, str]],
) -> Callable[[str], tuple[torch.nn.Module, Path, str]]:
    """Saves code with a class `Net`, and weights drawn at random: that net, and as `saved_with`."""

    def save(code: str) -> tuple[torch.nn.Module, Path, str]:
        checkpoint, model = saved_with(code)
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        torch.manual_seed(0)
        net: torch.nn.Module = namespace["Net"]()
        torch.save(net.state_dict(), checkpoint)
        return net, checkpoint, model

    return save


@pytest.fixture(scope="session")
def fused_library() -> Path:
    """The kernels for ONNX Runtime; skips where headers for them are not: make ort-headers."""
    try:
        ort.headers()
    except BuildError as error:
        pytest.skip(str(error))
    return onnxruntime_library()


def _exported(checkpoint: str, factory: pytest.TempPathFactory) -> Path:
    """What the first of pytest's workers to ask for it exports, for all of them."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    output = folder / f"{Path(checkpoint).parts[0]}-bundle"
    with FileLock(f"{output}.lock"):
        if not output.exists():
            api.export(FIXTURES / checkpoint, output)
    return output
