"""The pytest plugin, in suites of its users: fresh processes, as they have them."""

import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from fuseport.exporter import bundle as bundles
from fuseport.ops.build import cache_folder

pytest_plugins = ["pytester"]

HEAVY = ["torch", "numpy", "onnx", "onnxruntime", "fuseport.exporter.api"]
CACHE = str(cache_folder())
INSTALLED = any(e.name == "fuseport" for e in entry_points(group="pytest11"))


def ran(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    plugin = () if INSTALLED else ("-p", "fuseport.exporter.pytest_plugin")
    return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)


@pytest.fixture
def suite(
    pytester: pytest.Pytester, small_bundle: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A folder with a bundle and the code of its model, of the user who exported it.

    `pytester` moves HOME, where the record is of what this user exported.
    """
    monkeypatch.setenv("FUSEPORT_CACHE", CACHE)
    bundle, model = small_bundle
    shutil.copytree(bundle, pytester.path / "bundle")
    shutil.copy(model.rpartition(":")[0], pytester.path / "small_net.py")
    return pytester


MARK = '@pytest.mark.parity("bundle/", runtimes=["torchscript", "onnxruntime"], model={model!r})'
MODEL = "small_net.py:Net"


def test_a_suite_that_does_not_use_it_imports_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_nothing(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("fuseport") or {not INSTALLED}
            assert [m for m in {HEAVY} if m in sys.modules] == []
        """
    )
    result = ran(pytester, "--strict-markers")
    result.assert_outcomes(passed=1)


def test_every_artifact_runtime_and_case_is_an_item_and_verified_once(
    suite: pytest.Pytester,
) -> None:
    suite.makepyfile(
        f"""
        import pytest
        from fuseport.exporter import api

        calls = []
        verify = api.verify
        api.verify = lambda *a, **k: calls.append(a) or verify(*a, **k)

        {MARK.format(model=MODEL)}
        def test_parity(fuseport_case):
            fuseport_case.check()
            assert len(calls) == 1
            found = fuseport_case.run()
            assert set(fuseport_case.inputs) == {{"x"}}
            # Of backward in other forms, there are the plain gradients alone.
            assert ("output" in found) != fuseport_case.way.endswith("forms")
            for name, tensor in found.items():
                assert (tensor - fuseport_case.truth[name]).abs().max() < 1e-5
            assert set(fuseport_case.cotangents) <= {{"output"}}
            gradients = {{n for n in found if n.startswith("grad/")}}
            assert (fuseport_case.program == "gradient") == ("grad/one.weight" in gradients)
            assert bool(fuseport_case.cotangents) == bool(gradients)

        {MARK.format(model=MODEL)}
        def test_the_same_bundle_is_not_verified_again(fuseport_case):
            fuseport_case.check()
            assert len(calls) == 1
        """
    )
    result = ran(suite, "--strict-markers", "-v")
    manifest = json.loads((suite.path / "bundle" / "manifest.json").read_text())
    cases = len(json.loads((suite.path / "bundle" / "samples" / "samples.json").read_text()))
    assert {a["file"] for a in manifest["artifacts"]} == {
        "forward.pt", "forward.onnx", "gradient.pt", "gradient.onnx",
    }  # fmt: skip
    # Four artifacts, one of them through autograd too; and three that give gradients, in all forms.
    result.assert_outcomes(passed=2 * (cases * 5 + 3))
    for line in ("*[[]onnxruntime-gradient.onnx-odd, transposed[]]*",
                 "*[[]torchscript-forward.pt-autograd-export[]]*"):  # fmt: skip
        result.stdout.fnmatch_lines([line])


def test_a_failing_row_is_an_assertion_that_can_be_read(suite: pytest.Pytester) -> None:
    _damaged(suite.path / "bundle")
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.parity("bundle/", runtimes="onnxruntime", programs="gradient",
                            model="small_net.py:Net")
        def test_parity(fuseport_case):
            fuseport_case.check()

        @pytest.mark.parity("bundle/", runtimes="onnxruntime", programs="gradient",
                            model="small_net.py:Net", atol=[1e-4, "grad/other.*:10"])
        def test_tolerated(fuseport_case):
            fuseport_case.check()
        """
    )
    result = ran(suite)
    forms = 2  # which are as wrong as the plain gradient, and no more: other items say so
    assert result.parseoutcomes()["failed"] == result.parseoutcomes()["passed"] - forms
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: gradient.onnx in onnxruntime, case 'export': 1 of 6 rows do not *",
            "*fail: onnxruntime · gradient.onnx · gradient · export · grad/other.bias: off by *",
        ]
    )


def _damaged(bundle: Path) -> None:
    """A gradient that is 1 % off, in a bundle whose manifest knows no better."""
    file = bundle / "gradient.onnx"
    model = onnx.load(file)
    for node in model.graph.node:
        node.output[:] = ["inner" if n == "grad/other.bias" else n for n in node.output]
        node.input[:] = ["inner" if n == "grad/other.bias" else n for n in node.input]
    value = numpy_helper.from_array(__import__("numpy").array(1.01, "float32"), "planted")
    model.graph.initializer.append(value)
    model.graph.node.append(onnx.helper.make_node("Mul", ["inner", "planted"], ["grad/other.bias"]))
    onnx.save(model, file)
    manifest = json.loads((bundle / "manifest.json").read_text())
    entry = {"sha256": bundles.hash_file(file), "bytes": file.stat().st_size}
    manifest["files"]["gradient.onnx"] = entry
    _write(bundle, manifest)


def _write(bundle: Path, manifest: dict[str, Any]) -> None:
    manifest["self_sha256"] = bundles._digest(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_what_is_unsupported_is_skipped_with_the_reason_or_fails_if_strict(
    suite: pytest.Pytester,
) -> None:
    suite.makeconftest(
        """
        from fuseport.exporter.runtimes import onnxruntime

        onnxruntime.missing = lambda: "ONNX Runtime is not installed: pip install it"
        """
    )
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.parity("bundle/", runtimes=["torchscript", "onnxruntime"], programs="forward",
                            model="small_net.py:Net")
        def test_parity(fuseport_case):
            fuseport_case.check()

        @pytest.mark.parity("bundle/", runtimes=["torchscript", "onnxruntime"], programs="forward",
                            model="small_net.py:Net", strict=True)
        def test_strictly(fuseport_case):
            fuseport_case.check()
        """
    )
    result = ran(suite, "-rs")
    counts = result.parseoutcomes()
    assert counts["passed"] == 2 * counts["skipped"] == 2 * counts["failed"]
    result.stdout.fnmatch_lines(["*unsupported: ONNX Runtime is not installed*"])


def test_programs_of_another_user_are_loaded_if_the_marker_trusts_them(
    suite: pytest.Pytester,
) -> None:
    manifest = json.loads((suite.path / "bundle" / "manifest.json").read_text())
    manifest["notes"].append("by another user")
    _write(suite.path / "bundle", manifest)
    sha256 = bundles.hash_file(suite.path / "bundle" / "manifest.json")
    for name, trust in (("test_not", ""), ("test_trusted", f", trust_native={sha256!r}")):
        marker = f'parity("bundle/", runtimes="torchscript", programs="forward"{trust})'
        code = f"import pytest\n\n@pytest.mark.{marker}\ndef test(fuseport_case):"
        suite.makepyfile(**{name: f"{code}\n    fuseport_case.check()"})
    counts = ran(suite).parseoutcomes()
    assert counts["passed"] == counts["errors"] > 0


WRONG = {
    '@pytest.mark.parity("nowhere/")': "no such folder",
    '@pytest.mark.parity("bundle/", runtimes="ort")': "ort is not a runtime; there are: aot",
    '@pytest.mark.parity("bundle/", programs="back")': "back is not a program; there are: forward",
    '@pytest.mark.parity("bundle/", runtime="x")': "unexpected keyword argument 'runtime'",
    '@pytest.mark.parity("bundle/", atol="much")': "--atol much: give a number",
    "": "is for tests marked @pytest.mark.parity",
}


def test_a_wrong_use_says_what_is_wrong(suite: pytest.Pytester) -> None:
    for i, marker in enumerate(WRONG):
        code = f"import pytest\n\n{marker}\ndef test_a(fuseport_case): pass\n"
        suite.makepyfile(**{f"test_wrong_{i}": code})
    code = '@pytest.mark.parity("bundle/")\ndef test_a(): pass'
    suite.makepyfile(test_without=f"import pytest\n\n{code}\n")
    result = ran(suite, "--continue-on-collection-errors")
    outcomes = result.parseoutcomes()
    assert outcomes["errors"] == len(WRONG) + 1
    assert "passed" not in outcomes
    for said in [*WRONG.values(), "does not take fuseport_case"]:
        result.stdout.fnmatch_lines_random([f"*{said}*"])
