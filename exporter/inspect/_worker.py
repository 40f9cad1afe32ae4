"""The child of `isolated`: one question from standard input, one answer into a file."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from fuseport.exporter.child.confined import work_in
from fuseport.exporter.errors import FuseportError

# Each has `found`, of the question's arguments.
_MODULES = {
    "torchscript": "torchscript",
    "exported_program": "exported_program",
    "aot_inductor": "exported_program",
    "onnx": "onnx",
    "admissible": "admissible",
    "needs": "needs",
}


def _main() -> None:
    asked = json.loads(sys.stdin.readline())
    # Ops are asked for their fakes alone: nothing is compiled for that.
    os.environ["FUSEPORT_NATIVE"] = "0"
    answer, question = Path(asked.pop("answer")), asked.pop("question")
    work_in(answer.parent)
    content: dict[str, Any]
    try:
        module = importlib.import_module(f"fuseport.exporter.inspect.{_MODULES[question]}")
        content = {"result": module.found(**asked)}
    except FuseportError as error:
        content = {"error": type(error).__name__, "message": str(error)}
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.rename(answer)


if __name__ == "__main__":
    _main()
