"""What is handed to a runtime to look into an artifact."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Written"]


@dataclass(frozen=True)
class Written:
    """A file to run.

    Attributes:
        file: it.
        inputs: node of the program → the input of the file that takes its value; None where the
            file takes the inputs of the program.
        outputs: node of the program → the output of the file that has its value.
    """

    file: Path
    inputs: Mapping[str, str] | None
    outputs: Mapping[str, str]
