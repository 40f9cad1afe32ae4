"""What is slow takes turns, all of it, and is what is listed."""

import subprocess
import sys
from pathlib import Path

from fuseport.tests import slow

ROOT = Path(__file__).parent.parent


def collected(*arguments: str) -> tuple[list[str], str]:
    """The ids of tests that pytest finds, in order, and all that it prints."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line], done.stdout


def test_a_file_is_slow_as_a_whole_or_some_of_its_tests_are() -> None:
    took = {
        "a.py::one": 9.0,
        "a.py::two": 1.5,
        "b.py::one": 4.0,
        "b.py::two[x::y]": 1.9,
        "c.py::one": 3.0,
        "c.py::two": 4.0,
        **{f"c.py::{n}": 1.0 for n in range(8)},
    }
    found = slow.found_slow(took)
    assert found == {"a.py": 10.5, "b.py::one": 4.0, "c.py::one": 3.0, "c.py::two": 4.0}


def test_shares_are_all_of_it_and_take_as_long_as_each_other() -> None:
    units = slow.slow_units()
    assert len(units) > 100
    shares = slow.shares_of(units)
    assert sum(map(len, shares)) == len(units)
    assert set().union(*shares) == units.keys()
    seconds = [sum(units[unit] for unit in share) for share in shares]
    assert max(seconds) < 1.1 * min(seconds)
    assert slow.turn() in range(slow.SHARES)


def test_what_is_listed_is_there() -> None:
    units = slow.slow_units()
    files = {slow.file_of(unit) for unit in units}
    assert [file for file in files if not (ROOT / file).is_file()] == []
    found, _ = collected(*sorted({slow.file_of(unit) for unit in units if "::" in unit}))
    gone = {unit for unit in units if "::" in unit} - set(found)
    assert gone == set(), "rename them in slow.json, or measure anew: make slow"


def test_a_run_takes_what_has_its_turn() -> None:
    units = slow.slow_units()
    turn = slow.shares_of(units)[slow.turn()]
    waiting = units.keys() - turn
    whole = next(unit for unit in sorted(waiting) if "::" not in unit)
    test = next(unit for unit in sorted(waiting) if "::" in unit)
    has_turn = next(unit for unit in sorted(turn) if "::" not in unit)
    files = (whole, slow.file_of(test), has_turn)
    every, _ = collected(*files)
    some, printed = collected(*files, "--slow", "share")
    assert {test for test in every if slow.file_of(test) == whole}
    assert some == [t for t in every if t not in waiting and slow.file_of(t) not in waiting]
    assert {test for test in some if slow.file_of(test) == has_turn}
    assert test in every
    assert test not in some
    assert f"{len(every) - len(some)} deselected" in printed
