"""2,000 mutated files of each kind are refused, or read, in children that none of them kills.

`make fuzz` is the long run, of 100,000 checkpoints; its figures are in `benchmarks/results`.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from fuseport.tests.corpus import fuzz

COUNT = 2000
# Reading them runs nothing, so that these are all that may come of a file.
CODES = {"0", "2", "3", "4", "5"}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_files(kind: str) -> None:
    """Faults 2, 6 to 9, 11 and 12: no death, no bug, no other numbers under a right checksum."""
    found = fuzz.fuzz(kind, 0, COUNT)
    assert found["died"] == []
    assert found["bugs"] == []
    assert found["wrong"] == []
    assert found["codes"].keys() <= CODES
    assert sum(found["codes"].values()) == COUNT
    assert found["codes"]["4"] > COUNT / 10, "mutations do damage"


def test_a_death_and_a_bug_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fuzz.judged

    def worse(reader: str, path: str) -> dict[str, Any]:
        if b"lr" not in Path(path).read_bytes():
            os.kill(os.getpid(), signal.SIGSEGV)
        return {**own(reader, path), "code": 0, "tensors": Path(path).read_bytes().hex()}

    monkeypatch.setattr(fuzz, "judged", worse)
    found = fuzz.fuzz("archive", 0, 5)
    assert len(found["wrong"]) > 1, "a mutation may leave a file as it was"
    found = fuzz.fuzz("safetensors", 0, 2)
    assert found["died"] == ["SIGSEGV among safetensors 0 to 2"]


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_number_names_a_file(kind: str) -> None:
    made = fuzz.KINDS[kind]
    right = made.seed()
    assert made.mutate(right, random.Random("1")) == made.mutate(right, random.Random("1"))
