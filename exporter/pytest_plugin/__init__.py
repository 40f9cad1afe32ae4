"""The pytest plugin: parity tests in users' own suites.

    @pytest.mark.parity("bundle/", runtimes=["onnxruntime"])
    def test_parity(fuseport_case):
        fuseport_case.check()

One item is one artifact in one runtime on one case, run as a program or through autograd. A bundle
is verified once, when the first item asks for it. Where no test has the marker, nothing is imported
but this file.
"""

from typing import Any

import pytest

__all__ = ["fuseport_case", "pytest_configure", "pytest_generate_tests"]

_MARKER = (
    "parity(bundle, *, runtimes=None, programs=None, model=None, ops=None, atol=None, rtol=None, "
    "strict=False, timeout=900, trust_native=None): run the test for every artifact of a bundle "
    "that fuseport exported, in every runtime, on every case; the fixture fuseport_case is the one "
    "at hand."
)
_FIXTURE = "fuseport_case"
_SESSIONS = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An item for each artifact, runtime, case and way of a marked test's bundle."""
    marker = metafunc.definition.get_closest_marker("parity")
    if marker is None:
        return
    if _FIXTURE not in metafunc.fixturenames:
        pytest.fail(f"{metafunc.definition.nodeid}: marked parity, and it does not take {_FIXTURE}")
    from fuseport.exporter.errors import FuseportError
    from fuseport.exporter.pytest_plugin import cases

    try:
        wanted = cases.wanted(*marker.args, **marker.kwargs)
        jobs = cases.jobs(wanted, metafunc.config.rootpath)
    except (FuseportError, TypeError) as error:
        pytest.fail(f"{metafunc.definition.nodeid}: parity: {error}", pytrace=False)
    marks = []
    if metafunc.config.pluginmanager.hasplugin("xdist"):
        # With --dist loadgroup, one worker does a bundle, so that it is verified once.
        marks = [pytest.mark.xdist_group(f"fuseport {wanted.bundle}")]
    metafunc.parametrize(
        _FIXTURE,
        [pytest.param((wanted, job), id=cases.name(job), marks=marks) for job in jobs],
        indirect=True,
    )


@pytest.fixture
def fuseport_case(request: pytest.FixtureRequest) -> Any:
    """What the item is of: `inputs`, `cotangents`, `truth`, `run()` and `check()`.

    See `ParityCase` of `cases.py`. An item that is unsupported is skipped, with
    the reason, unless the marker says `strict`.
    """
    if not hasattr(request, "param"):
        pytest.fail(f"{_FIXTURE} is for tests marked @pytest.mark.parity(bundle)", pytrace=False)
    from fuseport.exporter.errors import FuseportError
    from fuseport.exporter.pytest_plugin import cases

    wanted, job = request.param
    stash = request.config.stash
    if _SESSIONS not in stash:
        factory = request.getfixturevalue("tmp_path_factory")
        stash[_SESSIONS] = cases.Verified(lambda: factory.mktemp("fuseport"))
    try:
        case = stash[_SESSIONS].case(wanted, job, request.config.rootpath)
    except FuseportError as error:
        pytest.fail(f"{wanted.bundle}: {error}", pytrace=False)
    if case.unsupported is not None and not wanted.strict:
        pytest.skip(f"unsupported: {case.unsupported}")
    return case
