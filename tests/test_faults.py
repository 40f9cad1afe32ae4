"""Faults at every system call of every writer: what is there is the old or the new, whole.

Here a sample of the places; `make faults` takes them all.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "benchmarks" / "faults.py"
# Of each call and kind of fault, so many places.
SAMPLES = {
    "bundle": 2,
    "report": 2,
    "temporary folder": 1,
    "trust record": 1,
    "resume state": 1,
    "saved outputs": 1,
    "library": 1,
    "export": 1,
}


def faults(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("writer", SAMPLES)
def test_a_writer_survives_kills_and_full_disks(writer: str) -> None:
    """Fault 19. Fault 20. At every call that changes something, or at some of them here."""
    done = faults(writer, "--sample", str(SAMPLES[writer]))
    if "strace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " points, 0 not survived" in done.stdout
