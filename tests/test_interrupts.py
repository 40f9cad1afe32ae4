"""A signal while a context manager is entered or left, which would not be undone."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from contextlib import contextmanager
from fuseport.exporter.interrupts import Interrupted, raised

inside = 0

def interrupt(when):
    if when == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100_000):  # where a handler of Python runs
            pass

class Mode:
    def __enter__(self):
        global inside
        inside += 1
        interrupt("entered")

    def __exit__(self, *error):
        global inside
        interrupt("left")
        inside -= 1

@contextmanager
def mode():
    global inside
    inside += 1
    interrupt("entered by a generator")
    try:
        yield
    finally:
        interrupt("left by a generator")
        inside -= 1

class Waiting:
    def __enter__(self):
        while sys.argv[1] == "for ever":
            interrupt("for ever")

    def __exit__(self, *error):
        pass

with raised():
    try:
        for _ in range(2):
            with Mode():
                pass
            with mode():
                pass
            with Waiting():
                pass
        while True:
            pass
    except Interrupted as end:
        print(end.code, inside)
"""


@pytest.mark.parametrize(
    "when", ["entered", "left", "entered by a generator", "left by a generator", "for ever"]
)
def test_what_a_context_manager_has_done_is_undone(when: str) -> None:
    command = [sys.executable, "-c", SCRIPT, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "143 0\n", done.stderr
