"""What is slow takes turns: a run may take a share of it, and which one, the commit says.

`slow.json` has the seconds of each file of tests that is slow as a whole, and those of other tests
that are. With `--slow share`, as in `make test`, pytest runs all that is not slow, and one share of
what is: a commit always has the same, and commits go through all of them. `--slow all`, which is
the default, takes all; `--slow measure` does, too, and writes slow.json anew.
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).with_suffix(".json")
SHARES = 8
# A test is slow that takes so many seconds. What a file sets up for all its tests, the first of
# them takes, and without that the next: so a file is slow that takes longer than the other number,
# and half of it in such tests.
TEST, FILE = 2.0, 10.0

OPTION = "--slow"
_took: defaultdict[str, float] = defaultdict(float)


def file_of(test: str) -> str:
    """The file of a test, by its id."""
    return test.split("::")[0]


def slow_units() -> dict[str, float]:
    """Seconds, by ids: of a file, or of one test."""
    table: dict[str, float] = json.loads(TABLE.read_text())
    return table


def seconds_of_files() -> dict[str, float]:
    """What is slow in each file that has any, in seconds."""
    files: defaultdict[str, float] = defaultdict(float)
    for unit, seconds in slow_units().items():
        files[file_of(unit)] += seconds
    return files


def found_slow(took: Mapping[str, float]) -> dict[str, float]:
    """What of all tests is slow, of the seconds that each of them took."""
    files: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for test, seconds in took.items():
        files[file_of(test)][test] = seconds
    slow: dict[str, float] = {}
    for file, tests in files.items():
        those = {test: seconds for test, seconds in tests.items() if seconds >= TEST}
        whole = sum(tests.values())
        slow |= {file: whole} if whole >= FILE and sum(those.values()) >= whole / 2 else those
    return {unit: round(slow[unit], 1) for unit in sorted(slow)}


def shares_of(units: Mapping[str, float]) -> list[set[str]]:
    """SHARES shares that take about as long as each other: each unit goes to the least as yet."""
    shares: list[set[str]] = [set() for _ in range(SHARES)]
    taken = [0.0] * SHARES
    for unit in sorted(units, key=lambda unit: (-units[unit], unit)):
        least = taken.index(min(taken))
        shares[least].add(unit)
        taken[least] += units[unit]
    return shares


def turn() -> int:
    """Which share is that of HEAD; the first where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=TABLE.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout, 16) % SHARES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, choices=("all", "share", "measure"), default="all")


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption(OPTION) != "share":
        return None
    return f"what is slow: share {turn() + 1} of {SHARES}, by the commit"


def deselect_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is slow but has not its turn, where `--slow share` was asked for."""
    if config.getoption(OPTION) != "share":
        return
    units = slow_units()
    left_out = units.keys() - shares_of(units)[turn()]
    taken, others = [], []
    for item in items:
        waits = item.nodeid in left_out or file_of(item.nodeid) in left_out
        (others if waits else taken).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = taken


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption(OPTION) != "measure" or hasattr(session.config, "workerinput"):
        return
    TABLE.write_text(json.dumps(found_slow(_took), indent=1, ensure_ascii=False) + "\n")
