"""Faults at every system call of every writer: what is there is the old or the new, whole.

Here a sample of the places; `make faults` takes them all.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "benchmarks" / "faults.py"
MISSING = 5  # its exit code where there is no strace
# Writers, and of each call and kind of fault, how many places. They share a process, and torch.
SAMPLES = {
    ("bundle", "report"): 2,
    (
        "temporary folder", "trust record", "resume state", "saved outputs", "library", "export",
    ): 1,
}  # fmt: skip


@pytest.mark.parametrize("writers", SAMPLES, ids=", ".join)
def test_writers_survive_kills_and_full_disks(writers: tuple[str, ...]) -> None:
    """Fault 19. Fault 20. At every call that changes something, or at some of them here."""
    command = [sys.executable, str(TOOL), *writers, "--sample", str(SAMPLES[writers])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode == MISSING:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" points, 0 not survived") == len(writers)
