"""Bundles that many tests read, each exported once in a session, and what may not be here."""

from pathlib import Path

import pytest

from fuseport.exporter import api
from fuseport.ops import onnxruntime_library, ort
from fuseport.ops.build import BuildError

FIXTURES = Path(__file__).parent.parent / "fixtures"


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
def fused_library() -> Path:
    """The kernels for ONNX Runtime; skips where headers for them are not: make ort-headers."""
    try:
        ort.headers()
    except BuildError as error:
        pytest.skip(str(error))
    return onnxruntime_library()


def _exported(checkpoint: str, factory: pytest.TempPathFactory) -> Path:
    output = factory.mktemp("bundles") / "bundle"
    return api.export(FIXTURES / checkpoint, output).folder
