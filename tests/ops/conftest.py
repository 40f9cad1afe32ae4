"""What the tests of ops share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from fuseport.ops import OPS, register
from fuseport.ops.spec import OpSpec


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "in_turn(cases, dtypes, in_all): each case in one dtype")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where a test is marked so: each case in one of the dtypes, which take turns.

    Cases named in `in_all` are in all of them. `fuseport ops check` has all pairs of all cases, and
    a sample of those in `make test`.
    """
    for mark in metafunc.definition.iter_markers("in_turn"):
        cases, dtypes, in_all = mark.args
        pairs = [
            (case, dtype)
            for i, case in enumerate(cases)
            for dtype in (dtypes if case.name in in_all else [dtypes[i % len(dtypes)]])
        ]
        ids = [f"{case.operator}-{case.name}-{dtype}" for case, dtype in pairs]
        metafunc.parametrize(("case", "dtype"), pairs, ids=ids)


@pytest.fixture(scope="session")
def spec() -> OpSpec:
    """The selective scan, registered from its native library."""
    assert register()["selective_scan"] == "native"
    return OPS["selective_scan"]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Makes `torch.empty` return NaN, so that an element that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_python() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs code in a fresh interpreter, with environment variables set or, for None, unset."""

    def run(code: str, **variables: str | None) -> "subprocess.CompletedProcess[str]":
        env = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )

    return run
