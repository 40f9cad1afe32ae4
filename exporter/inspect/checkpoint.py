"""A checkpoint: layout, weights to choose from, architecture, sizes, the ops it needs."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter import checkpoint as checkpoints
from fuseport.exporter import models
from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.choice import choose
from fuseport.exporter.checkpoint.content import Candidate, show
from fuseport.exporter.errors import FuseportError, Missing, UsageError
from fuseport.exporter.inspect import guess, known
from fuseport.exporter.inspect.isolated import ask
from fuseport.exporter.models.weights import unwrap

__all__ = ["found"]


def found(path: Path, weights: str | None, listed: bool) -> dict[str, Any]:
    """What a checkpoint is. Of the tensors, headers are read; of a zip also the checksums.

    Raises:
        FuseportError: as `checkpoint.load`, but for several sets of weights: they are listed.
    """
    content, files = checkpoints.read(path)
    held = sum(file.stat().st_size for file in files)
    ambiguous = None
    try:
        name, tensors, notes = choose(path, held, content.candidates, weights)
    except UsageError as error:
        if weights is not None:
            raise
        ambiguous = str(error)
        name, tensors, notes = choose(path, held, content.candidates, content.candidates[0].name)
    chosen = Checkpoint(
        path, content.layout, tensors, content.config, "", notes, name, content.training
    )
    result = {
        "what": f"a checkpoint, layout {content.layout}",
        "bytes": held,
        "layout": {"name": content.layout, "why": list(content.why)},
        "weights": {
            "shown": name,
            "must_choose": ambiguous,
            "candidates": _candidates(content.candidates),
        },
        "parameters": _sizes(tensors),
        "architecture": (architecture := _architecture(chosen)),
        "ops": (ops := _ops(architecture, chosen)),
        "next": []
        if ops.get("refused")
        else _next(architecture, chosen, choose=ambiguous is not None),
        "config": content.config,
        # In a file of its own, which anyone can read.
        "config_beside": any(file.suffix == ".json" for file in files),
        "training": content.training,
        "notes": [*content.notes, *notes],
    }
    if listed:
        result["tensors"] = {
            n: {"dtype": _dtype(t), "shape": list(t.shape)} for n, t in tensors.items()
        }
    return result


def _candidates(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    # Each is looked through once, under however many names it is.
    sizes = {
        key: [t.numel() for t in entries.values() if isinstance(t, Tensor)]
        for key, entries in {id(c.entries): c.entries for c in candidates}.items()
    }
    return [
        {
            "name": candidate.name,
            "what": candidate.what,
            "tensors": len(sizes[id(candidate.entries)]),
            "elements": sum(sizes[id(candidate.entries)]),
        }
        for candidate in candidates
    ]


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Elements and bytes: all, by dtype, and by module: those below the prefix that all share.

    Tensors that share their memory (a tied head) count once.
    """
    own: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        own.setdefault(
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), (name, tensor)
        )
    names = [name for name, _ in own.values()]
    prefix = _prefix(names)
    modules: Counter[str] = Counter()
    dtypes: dict[str, dict[str, int]] = {}
    for name, tensor in own.values():
        modules[f"{prefix}{name.removeprefix(prefix).split('.')[0]}"] += tensor.numel()
        entry = dtypes.setdefault(_dtype(tensor), {"tensors": 0, "elements": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["elements"] += tensor.numel()
        entry["bytes"] += tensor.numel() * tensor.element_size()
    return {
        "tensors": len(tensors),
        "elements": sum(entry["elements"] for entry in dtypes.values()),
        "bytes": sum(entry["bytes"] for entry in dtypes.values()),
        "dtypes": dtypes,
        "modules": dict(modules.most_common()),
    }


def _prefix(names: Iterable[str]) -> str:
    """The segments that all names begin with, with a last dot; never a whole name."""
    split = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "".join(f"{part}." for part in common)


def _architecture(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        recognised = models.recognised(checkpoint)
    except Missing as error:
        return {"name": None, "reason": str(error), "why": []}
    if recognised is None:
        return {"name": None, "reason": _nearest(checkpoint), "why": []}
    name, config = recognised
    why, stored = list(_signs(name, checkpoint)[0]), models.quantized(config)
    return {"name": name, "why": why, "config": config, "quantized": stored}


def _nearest(checkpoint: Checkpoint) -> str:
    best, share = "", -1.0
    for name in models.ARCHITECTURES:
        has, lacks = _signs(name, checkpoint)
        if has and len(has) / (len(has) + len(lacks)) > share:
            share = len(has) / (len(has) + len(lacks))
            less = f", not {', '.join(lacks)}" if lacks else ""
            best = f"; nearest is {name}: there is {', '.join(has)}{less}"
    looked = ", ".join(models.ARCHITECTURES)
    said = checkpoint.config.get("model_type")
    best += f"; the config says model_type {show(said, 60)}" if said is not None else ""
    return f"looked for {looked}{best or '; nothing of them is there'}; --model gives your own code"


def _signs(name: str, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """What of an architecture's signs is there, by the first tensor that shows it, and what not."""
    names = list(unwrap(checkpoint.tensors).values())
    has: list[str] = []
    lacks: list[str] = []
    for sign in models.signs(name):
        if sign.startswith("config:"):
            key, one_of, values = sign.removeprefix("config:").partition("=")
            value = str(checkpoint.config.get(key))
            right = value in values.split("|") if one_of else key in checkpoint.config
            there = f"config:{key}={value}" if right else None
        else:
            there = next((n for n in names if fnmatchcase(n, sign)), None)
        (lacks if there is None else has).append(sign if there is None else show(there, 80))
    return has, lacks


def _ops(architecture: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The ops `needed`, whether they are `guessed`, and the `reason` where none are known."""
    if architecture["name"] is None:
        names = unwrap(checkpoint.tensors)
        shapes = {names[name]: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
        found = guess.guessed(shapes)
        reason = None if found else "no tensors are called, or shaped, as those around an op are"
        return {"needed": found, "guessed": True, "reason": reason}
    try:
        answer = ask("needs", name=architecture["name"], config=architecture["config"])
    except FuseportError as error:
        return {"needed": [], "guessed": False, "reason": str(error)}
    if "reason" in answer:
        refused = {"refused": True} if answer.get("refused") else {}
        return {"needed": [], "guessed": False, "reason": answer["reason"], **refused}
    needed = known.of_ops(Counter(answer["operators"]))
    return {"needed": needed, "guessed": False, "reason": None}


def _next(architecture: Mapping[str, Any], checkpoint: Checkpoint, *, choose: bool) -> list[str]:
    """The commands to go on with, in their order."""
    if adapter := models.adapter_command(checkpoint):
        return [adapter]
    command = f"fuseport export {shlex.quote(show(checkpoint.path))} -o bundle/"
    if choose:
        command += f" --weights {shlex.quote(show(checkpoint.weights))}"
    if architecture["name"] is not None:
        install = models.to_install(architecture["name"])
        return [command] if install is None else [install, command]
    return [
        f"{command} --model your_code.py:Model --input-shapes 'x:[batch,…]'; with --shim auto where"
        " that code imports CUDA-only packages, such as mamba_ssm or selective_scan_cuda"
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
