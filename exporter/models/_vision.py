"""What vision architectures have in common: names under a prefix, a configuration, one image."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models.model import OWN_CODE, Model
from fuseport.exporter.models.weights import unwrap
from fuseport.exporter.program import TensorSpec

__all__ = ["built", "count", "fitting", "parsed", "prefix", "require_sizes", "setting", "under"]

_Config = TypeVar("_Config")


def under(checkpoint: Checkpoint, sign: re.Pattern[str]) -> dict[str, Tensor] | None:
    """The model's tensors by its own names, without prefix and wrappers; None without the sign.

    Args:
        checkpoint: of any model.
        sign: fullmatches a name, and has a group `prefix` for what stands before the model's own.
            Where several prefixes have it, the shortest counts; `weights.fit` refuses two models.
    """
    names = unwrap(checkpoint.tensors)
    start = prefix(names.values(), sign)
    if start is None:
        return None
    return {
        name.removeprefix(start): checkpoint.tensors[original]
        for original, name in names.items()
        if name.startswith(start)
    }


def prefix(names: Iterable[str], sign: re.Pattern[str]) -> str | None:
    """What stands before the model's own names; None where no name has the sign; see `under`."""
    prefixes = {m["prefix"] for name in names if (m := sign.fullmatch(name))}
    return min(prefixes, key=lambda p: (len(p), p), default=None)


def count(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], stem: str) -> int:
    """How many there are of what is numbered after `stem`, as `layers.` is; they must be whole.

    Raises:
        Missing: a number is left out.
    """
    pattern = re.compile(rf"{re.escape(stem)}(\d+)\..*")
    numbers = {int(m[1]) for name in tensors if (m := pattern.fullmatch(name))}
    absent = set(range(max(numbers, default=-1) + 1)) - numbers
    if absent:
        raise Missing(
            f"{show(checkpoint.path)}: {show(stem)}{min(absent)} is absent, and"
            f" {show(stem)}{max(numbers)} is there; give the whole checkpoint"
        )
    return len(numbers)


def setting(checkpoint: Checkpoint, *keys: str) -> Any:
    """What the training script's settings say under these keys; None if nothing."""
    value: Any = checkpoint.training
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def fitting(checkpoint: Checkpoint, kind: Callable[..., _Config], **sizes: Any) -> _Config:
    """The configuration of these sizes.

    Raises:
        Missing: they are those of no model that is built in.
    """
    try:
        return kind(**sizes)
    except ValueError as error:
        raise Missing(
            f"{show(checkpoint.path)}: such layers are not built in ({show(error)}); {OWN_CODE}"
        ) from error


def parsed(kind: type[_Config], config: Mapping[str, Any], architecture: str) -> _Config:
    """A configuration, a dataclass, from JSON data; other keys left aside.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    try:
        values = {field.name: config[field.name] for field in fields(kind)}  # type: ignore[arg-type]
        return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptInput(
            f"a {architecture} configuration: {show(error)}; export the model again"
        ) from error


def require_sizes(config: Any, optional: Sequence[str] = ()) -> None:
    """Raises ValueError unless the fields of a dataclass have their types, and sizes are positive.

    Sizes in `optional` may be 0.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        values = value if isinstance(value, tuple) else (value,)
        kind = int if isinstance(value, tuple) else field.type
        if not values or any(type(v) is not kind for v in values):
            raise ValueError(f"{field.name} is {value!r}")
        if kind is int and min(values) < (0 if field.name in optional else 1):
            raise ValueError(f"{field.name} is {value!r}, expected 1 or more")


def built(
    module: nn.Module,
    architecture: str,
    config: Mapping[str, Any],
    *,
    image: tuple[int, int],
    classes: int,
    scans: int,
    keeps_float32: tuple[str, ...],
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Model:
    """The model around a module that takes `x`, an image of (batch, channels, size, size).

    Args:
        module: its weights not set yet.
        architecture: its name.
        config: JSON data; `assumed` has what the checkpoint left unsaid, a sentence each.
        image: channels, and height and width.
        classes: 0 for a model without a head, which returns features.
        scans: how many scan nodes there must be.
        keeps_float32: see `Model`.
        renamed: see `Model`.
    """
    channels, size = image
    return Model(
        module=module,
        architecture=architecture,
        config=dict(config),
        inputs=(TensorSpec("x", "float32", ("batch", channels, size, size)),),
        sizes={"batch": 2},
        outputs=("logits" if classes else "features",),
        scans=scans,
        keeps_float32=keeps_float32,
        renamed=renamed,
        notes=tuple(f"the checkpoint does not say it: {said}" for said in config["assumed"]),
    )
