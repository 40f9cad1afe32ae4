"""README: its contents lead somewhere, and its first steps print what it says."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import runtimes

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_contents_have_every_section_and_every_link_leads_to_one() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    contents = prose[prose.index("## Contents\n") + 1 :]
    sections = [anchor(heading) for heading in re.findall(r"^#{2,} (.+)$", contents, re.MULTILINE)]
    listed = re.findall(r"\]\(#([^)]+)\)", contents[: contents.index("\n## ")])
    assert listed == sections
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= set(sections)


@pytest.mark.parametrize("name", ["README.md", "MODELS.md"])
def test_links_from_file_to_file_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    for path, place in links:
        assert (ROOT / path).exists(), path
        if place:
            headings = re.findall(r"^#{1,} (.+)$", (ROOT / path).read_text(), re.MULTILINE)
            assert place in map(anchor, headings), (path, place)


@pytest.mark.skipif(
    any(runtimes.get(name).missing() for name in runtimes.RUNTIMES),
    reason="the first steps are of a machine that has all runtimes",
)
def test_the_first_steps_print_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    [steps] = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    asked = re.findall(r"^\$ fuseport (.*)\n((?:[^$].*\n)*)", steps, re.MULTILINE)
    assert [command.split()[0] for command, _ in asked] == ["inspect", "export", "verify"]
    for command, said in asked:
        done = CliRunner().invoke(main, shlex.split(command))
        assert done.exit_code == 0, done.output
        printed = map(of_every_machine, done.stdout.splitlines())
        for line in map(of_every_machine, said.splitlines()):
            begin, cut, _ = line.partition("…")
            assert any(p.startswith(begin) if cut else p == line for p in printed), line


def of_every_machine(line: str) -> str:
    """Without figures and what follows from them: the first three columns, however wide."""
    return "  ".join(re.split(r" {2,}", re.sub(r"\d+(\.\d+)?", "0", line.strip()))[:3])
