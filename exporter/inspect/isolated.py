"""Questions that a child process answers: parsers of hostile files may crash or never end."""

import json
import tempfile
from pathlib import Path
from typing import Any

from fuseport.exporter import errors
from fuseport.exporter.child import Child, Limits, pauses
from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.errors import RuntimeCrash

__all__ = ["ask"]

_WORKER = "fuseport.exporter.inspect._worker"
_LIMITS = Limits(seconds=180.0, memory=8 * 2**30)


def ask(question: str, **arguments: Any) -> dict[str, Any]:
    """The answer of `_worker` to a question, as JSON data.

    Raises:
        FuseportError: what the answer was, of its class; RuntimeCrash where there is none.
    """
    with tempfile.TemporaryDirectory(prefix="fuseport-") as folder:
        answer = Path(folder) / "answer.json"
        with Child([_WORKER], Path(folder) / "errors", _LIMITS, Bounds((Path(folder),))) as child:
            child.expect(True)
            asked = {"question": question, "answer": str(answer), **arguments}
            child.tell(json.dumps(asked) + "\n")
            pause = pauses()
            while not answer.exists():
                if child.ended() and not answer.exists():
                    about = arguments.get("path", question)
                    raise RuntimeCrash(f"{about}: reading it failed: {child.last_words()}")
                next(pause)
            content = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in content:
        raise getattr(errors, content["error"])(content["message"])
    result: dict[str, Any] = content["result"]
    return result
