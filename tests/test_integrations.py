"""The GitHub Action and the pre-commit hooks that other repositories use."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fuseport.cli import main

ROOT = Path(__file__).parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = {h["id"]: h for h in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
CHECKPOINT = ROOT / "fixtures" / "lightning" / "mamba-kjv.ckpt"


class TestAction:
    def test_every_input_is_used_and_every_one_used_is_an_input(self) -> None:
        text = (ROOT / "action.yml").read_text(encoding="utf-8")
        assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
        assert all("description" in entry for entry in ACTION["inputs"].values())

    def test_no_input_is_pasted_into_a_script(self) -> None:
        """Through the environment only: what a workflow passes on may come from anybody."""
        scripts = [step["run"] for step in STEPS.values() if "run" in step]
        assert scripts
        assert not [script for script in scripts if "${{" in script]

    @pytest.mark.parametrize("name", [n for n, s in STEPS.items() if "run" in s])
    def test_scripts_are_of_bash(self, name: str) -> None:
        assert STEPS[name]["shell"] == "bash"
        subprocess.run(["bash", "-n", "-c", STEPS[name]["run"]], check=True)

    @pytest.mark.parametrize(("arguments", "code"), [("--only nobody", 2), ("", 4)])
    def test_the_exit_code_is_that_of_ci_and_an_output(
        self, arguments: str, code: int, tmp_path: Path
    ) -> None:
        command = tmp_path / "bin" / "fuseport"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fuseport.cli "$@"\n')
        command.chmod(0o755)
        (tmp_path / "a b.pt").write_bytes(b"no checkpoint")
        (tmp_path / "fuse port.toml").write_text('[[checkpoint]]\npath = "a b.pt"\n')
        environment = {
            **os.environ,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "CONFIG": "fuse port.toml",
            "REPORT": "the report",
            "ARGS": arguments,
        }
        script = STEPS["Export and verify"]["run"]
        shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, check=False, timeout=120)
        assert done.returncode == code
        assert (tmp_path / "output").read_text() == f"exit-code={code}\n"
        assert (tmp_path / "the report" / "summary.json").exists() == (code == 4)


class TestHooks:
    @pytest.mark.parametrize("name", HOOKS)
    def test_an_entry_is_a_command_of_ours(self, name: str) -> None:
        program, command, *_ = shlex.split(HOOKS[name]["entry"])
        assert program == "fuseport"
        assert command in main.commands

    def test_the_hook_of_checkpoints_takes_many_and_fails_for_one(self, tmp_path: Path) -> None:
        pattern, entry = HOOKS["fuseport-inspect"]["files"], HOOKS["fuseport-inspect"]["entry"]
        garbage = tmp_path / "garbage.ckpt"
        garbage.write_bytes(bytes(range(256)))
        assert re.search(pattern, CHECKPOINT.name)
        arguments = shlex.split(entry)[1:]
        good = CliRunner().invoke(main, [*arguments, str(CHECKPOINT), str(CHECKPOINT)])
        assert good.exit_code == 0
        bad = CliRunner().invoke(main, [*arguments, str(garbage), str(CHECKPOINT)])
        assert bad.exit_code == 4
        assert "garbage.ckpt" in bad.output
        assert "mamba-kjv.ckpt: a checkpoint" in bad.output
