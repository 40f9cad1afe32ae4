"""House rules that linters do not know."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST = 500
# Of torch 2.13's operators, by `torch._C._dispatch_get_all_op_names()`, what others have not.
ABSENT = {
    *("_foreach_clone", "_foreach_mm", "_upsample_lanczos2d_aa", "dim"),  # 2.11
    *("get_device", "is_contiguous", "numel", "storage_offset"),  # 2.11
    *("cholesky", "qr"),  # 2.14
}


def files() -> list[Path]:
    """Every file that is in git or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = {ROOT / name for name in done.stdout.split("\0") if name}
    return sorted(path for path in paths if path.is_file())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = [path for path in files() if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh", ".h")]
PACKAGE = ("__init__.py", "__main__.py", "cli.py", "exporter", "ops")
MODULES = [p for p in SOURCES if p.suffix == ".py" and relative(p).split("/")[0] in PACKAGE]


def test_every_source_is_short_enough_to_be_read_in_one_sitting() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_what_it_is_for_and_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a docstring says what the module is for"
    if path.name.startswith("_") and path.name != "__init__.py":
        return
    defined = {
        node.name: ast.get_docstring(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    public = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert public or not defined, f"__all__ says which of {sorted(defined)} are public"
    silent = [name for names in public for name in names if name in defined and not defined[name]]
    assert silent == [], "what is public has a docstring"


def test_tests_are_no_package() -> None:
    """With an `__init__.py` above them, pytest would import the repository root a second time."""
    assert [relative(path) for path in files() if path.match("tests/**/__init__.py")] == []


def test_no_file_knows_the_machine_it_was_made_on() -> None:
    """Fixtures too: a checkpoint remembers the folder that it was saved in."""
    home = re.compile(rb"/(?:home|root|Users|work)/[\w.-]+")
    found = {relative(path): home.findall(path.read_bytes()) for path in files()}
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_operator_is_taken_for_granted_that_a_supported_torch_has_not(path: Path) -> None:
    source = path.read_text()
    named = re.findall(r"\baten\.(\w+)", source)
    asked = re.findall(r'hasattr\(aten, "(\w+)"\)', source)
    assert ABSENT & {*named} <= {*asked}
