"""What is installed: the files, the metadata, and what importing them imports."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fuseport

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ["lightning", "numpy", "onnx", "onnxruntime", "onnxscript", "torch", "transformers"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the sdist, as a package index would get it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def run(code: str) -> list[str]:
    """The words that `code` prints, run by itself where the repository's folders shadow names."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_wheel_has_the_package_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = [
        path.relative_to(ROOT).as_posix()
        for root in ("exporter", "ops")
        for path in (ROOT / root).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    info = f"fuseport-{fuseport.__version__}.dist-info/"
    packed = {name for name in wheel.namelist() if not name.startswith(info)}
    root = ["__init__.py", "__main__.py", "cli.py", "py.typed"]
    assert packed == {f"fuseport/{name}" for name in [*sources, *root]}
    assert f"{info}licenses/LICENSE" in wheel.namelist()


def test_the_version_is_stated_the_same_everywhere(wheel: zipfile.ZipFile) -> None:
    info = f"fuseport-{fuseport.__version__}.dist-info"
    built = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert built["Version"] == PROJECT["version"] == fuseport.__version__
    assert f"[{fuseport.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("system", "machine", "package"),
    [
        ("linux", "x86_64", "onnxruntime-gpu"),
        ("win32", "AMD64", "onnxruntime-gpu"),
        ("linux", "aarch64", "onnxruntime"),
        ("darwin", "arm64", "onnxruntime"),
        ("win32", "ARM64", "onnxruntime"),
    ],
)
def test_every_machine_gets_the_one_onnxruntime_that_has_wheels_for_it(
    system: str, machine: str, package: str
) -> None:
    environment = {"sys_platform": system, "platform_machine": machine}
    wanted = [
        requirement.name
        for requirement in map(Requirement, PROJECT["dependencies"])
        if requirement.name.startswith("onnxruntime")
        and (requirement.marker is None or requirement.marker.evaluate(environment))
    ]
    assert wanted == [package]


def test_the_known_good_versions_are_within_what_the_package_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(pin.name): pin.specifier
        for pin in map(Requirement, (line for line in lines if not line.startswith("#")))
    }
    extras = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        if requirement.name == "fuseport":
            continue
        [pin] = pins[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert pin.version in requirement.specifier, f"{requirement.name} {pin}"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "fuseport", "--version"]
    said = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == fuseport.__version__


def test_importing_fuseport_imports_nothing_heavy() -> None:
    code = f"import sys, fuseport; print(*(m for m in {HEAVY} if m in sys.modules))"
    assert run(code) == []


def test_no_module_is_imported_under_a_bare_name() -> None:
    modules = "fuseport.cli, fuseport.ops, fuseport.exporter.api, fuseport.exporter.doctor"
    names = ["cli", "exporter", "ops"]
    assert run(f"import sys, {modules}; print(*(m for m in {names} if m in sys.modules))") == []


def test_help_of_no_command_imports_anything_heavy() -> None:
    code = f"""
import sys
from click.testing import CliRunner
from fuseport.cli import main
for arguments in ["--help"], *([name, "--help"] for name in main.commands):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    print(*(f"{{arguments[0]}}:{{m}}" for m in {HEAVY} if m in sys.modules))
"""
    assert run(code) == []


def test_ops_and_shims_are_there_without_an_import_of_their_own() -> None:
    code = (
        "import sys, fuseport\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(fuseport.ops.selective_scan)\n"
        "assert callable(fuseport.shims.installed)\n"
        "assert callable(fuseport.verify)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
