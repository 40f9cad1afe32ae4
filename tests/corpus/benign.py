"""Checkpoints that are to be read, odd as some are, each with the tensors that it holds."""

import argparse
import collections
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._weights_only_unpickler import _get_allowed_globals

from fuseport.tests.corpus.hostile import weights
from fuseport.tests.corpus.pickled import (
    archive,
    call,
    entries,
    legacy,
    number,
    storage,
    tensor,
    text,
)

__all__ = ["BENIGN", "NESTED", "Benign"]

NESTED = "torch._utils._rebuild_nested_tensor" in _get_allowed_globals()
"""Whether torch itself reads nested tensors, as it does before 2.15."""


FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
ZEROS = {"w": torch.zeros(4)}


@dataclass(frozen=True)
class Benign:
    """A file or folder that is read.

    Attributes:
        name: of it.
        make: writes it into an empty folder, and returns its path and the tensors in it.
        config: what is read as the configuration, where that is of interest.
    """

    name: str
    make: Callable[[Path], tuple[Path, Mapping[str, Tensor]]]
    config: Mapping[str, Any] | None = None


def _saved(
    value: Any, tensors: Mapping[str, Tensor], name: str = "w.pt", **how: Any
) -> Callable[[Path], tuple[Path, Mapping[str, Tensor]]]:
    def make(folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
        torch.save(value, folder / name, **how)
        return folder / name, tensors

    return make


def _plain() -> Iterable[Benign]:
    own = weights()
    for name in ("w.ckpt", "w.bin", "w.pth", "w.pkl", "w.dat", "w", "w.safetensors", "ü 😀.pt"):
        yield Benign(f"saved as {name}", _saved(own, own, name))
    for key in ("state_dict", "model", "model_state_dict", "net"):
        yield Benign(f"under {key}", _saved({key: own, "epoch": 3}, own))
    old = {"_use_new_zipfile_serialization": False}
    yield Benign("an older file", _saved(own, own, **old))
    yield Benign("an older file, nested", _saved({"model": own, "args": {"lr": 0.1}}, own, **old))
    for dtype in DTYPES:
        value = {"w": torch.arange(5).to(dtype), "scalar": torch.ones((), dtype=dtype)}
        yield Benign(f"{dtype}", _saved(value, value))
    yield Benign(
        "an older file of bfloat16",
        _saved(
            {"w": torch.ones(3, dtype=torch.bfloat16)},
            {"w": torch.ones(3, dtype=torch.bfloat16)},
            **old,
        ),
    )


def _odd_tensors() -> Iterable[Benign]:
    base = torch.arange(24.0).reshape(4, 6)
    tied = {"head": base, "embedding": base}
    views = {"t": base.t(), "s": base[1:, ::2], "offset": base.flatten()[5:9]}
    empty = {"empty": torch.zeros(0, 3), "none": torch.zeros(3, 0, 2), "w": torch.ones(1)}
    expanded = {"w": torch.ones(1, 3).expand(5, 3)}
    parameter = nn.Parameter(torch.ones(3))
    parameter._no_weight_decay = True  # type: ignore[attr-defined]  # as Mamba's A_log has
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    for name, value, read in (
        ("tied tensors", tied, tied),
        ("views", views, views),
        ("empty tensors", empty, empty),
        ("an expanded tensor", expanded, expanded),
        ("a parameter with an attribute", {"w": parameter}, {"w": torch.ones(3)}),
        ("a module's state dict", module.state_dict(), module.state_dict()),
        ("a conjugate view", {"w": conjugate}, {"w": conjugate.resolve_conj()}),
        (
            "names that lead nowhere",
            {"../../x": base, "/etc/x": base},
            {"../../x": base, "/etc/x": base},
        ),
        ("a name of 10,000 characters", {"n" * 10_000: base}, {"n" * 10_000: base}),
        ("5,000 tensors", many := {f"layer.{i}": torch.full((1,), i) for i in range(5000)}, many),
        ("entries that are none", {"w": base, "_extra_state": None, "step": 3}, {"w": base}),
        ("a stream of bytes beside", {"w": base, "_extra_state": BytesIO(b"scales")}, {"w": base}),
        ("a sparse tensor beside", {"model": {"w": base}, "mask": base.to_sparse()}, {"w": base}),
        (
            "a quantised tensor beside",
            {"model": {"w": base}, "q": torch.quantize_per_tensor(base, 1.0, 0, torch.qint8)},
            {"w": base},
        ),
    ):
        yield Benign(name, _saved(value, read))


def _lightning(hyper: Any, **more: Any) -> Callable[[Path], tuple[Path, Mapping[str, Tensor]]]:
    content = {"pytorch-lightning_version": "2.5.0", "state_dict": weights(), **more}
    return _saved({**content, "hyper_parameters": hyper}, weights(), "w.ckpt")


def _settings() -> Iterable[Benign]:
    yield Benign(
        "_instantiator strings",
        _lightning({"_instantiator": "os.system", "_class_path": "x.Y"}),
        {"_instantiator": "os.system", "_class_path": "x.Y"},
    )
    numbers = {
        "best": np.float64(1.5),
        "steps": np.int64(7),
        "array": np.ones((2, 3)),
        "raw": bytearray(b"ab"),
        "seen": collections.Counter("aab"),
        "large": 2**2000,
        "meta": torch.ones(2, device="meta"),
        "day": np.datetime64("2025-01-01"),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "places": collections.defaultdict(list, a=[1]),
        "half a character": "\ud800",
    }
    said = {
        **{"best": 1.5, "steps": 7, "array": "<numpy array (2, 3)>", "raw": "ab"},
        **{"seen": {"a": 2, "b": 1}, "large": "<int of 2001 bits>"},
        **{"meta": "tensor (2,) of torch.float32", "half a character": "\\ud800"},
        **{"day": "<numpy M8>", "nested": "nested tensor of torch.float32", "places": {"a": [1]}},
    }
    if not NESTED:
        del numbers["nested"], said["nested"]
    yield Benign("numbers of every kind", _lightning(numbers), said)
    names = argparse.Namespace(lr=0.1, path=Path("/data"), dtype=torch.float16, size=(1, 2))
    read = {"lr": 0.1, "path": "/data", "dtype": "torch.float16", "size": [1, 2]}
    yield Benign("a namespace", _lightning(names), read)
    itself: list[Any] = []
    itself.append(torch.ones(1))
    yield Benign(
        "a set and a complex number", _lightning({"s": {"a"}, "c": 1j}), {"s": ["a"], "c": "1j"}
    )
    shared: dict[str, Any] = {"x": 1}
    for _ in range(4):
        shared = dict.fromkeys(map(str, range(1000)), shared)
    yield Benign("callbacks that share", _lightning({}, callbacks={"c": shared}), {})
    one = {str(i): i for i in range(20_000)}
    yield Benign(
        "one dictionary under 20,000 keys", _lightning({}, **{f"k{i}": one for i in range(20_000)})
    )
    same = {"state_dict": weights(), "optimizer": {"state": {0: {"m": torch.ones(2)}}}}
    yield Benign("an optimizer beside", _saved(same, weights()))


def _written() -> Iterable[Benign]:
    """By hand, as no torch.save of today would."""
    armed = (
        call("collections.OrderedDict") + entries({"items": number(1), "keys": number(2)}) + b"b"
    )
    for name, value in (
        ("an OrderedDict with items of its own", entries({"w": tensor([4], [1]), "x": armed})),
        ("a tensor with a number for numel", entries({"w": _dressed()})),
        ("a size by torch.Size", entries({"w": _sized()})),
        ("a text of 2 MiB beside", entries({"w": tensor([4], [1]), "x": text("x" * 2**21)})),
        ("a text of Python 2", entries({"w": tensor([4], [1]), "x": b"U\x02ab"})),
        ("an empty bytearray", entries({"w": tensor([4], [1]), "x": call("builtins.bytearray")})),
    ):
        yield Benign(name, lambda f, v=value: (archive(f / "w", v), ZEROS))  # type: ignore[misc]
    record = {"0": bytes(64)}
    value = entries({"w": tensor([4], [1])})
    yield Benign("a record that is longer", lambda f: (archive(f / "w", value, record), ZEROS))
    old = entries({"w": tensor([4], [1], of=storage(4, old=True))})
    yield Benign("an older file by hand", lambda f: (legacy(f / "w", old), ZEROS))


def _dressed() -> bytes:
    parts = (
        tensor([4], [1]),
        b"\x89",
        call("collections.OrderedDict"),
        entries({"numel": number(1)}),
    )
    return call("torch._utils._rebuild_parameter_with_state", *parts)


def _sized() -> bytes:
    size = call("torch.Size", b"(" + number(4) + b"t")
    return tensor([4], [1]).replace(b"(" + number(4) + b"t", size, 1)


def _folders() -> Iterable[Benign]:
    own = weights()

    def copied(
        name: str, link: bool = False
    ) -> Callable[[Path], tuple[Path, Mapping[str, Tensor]]]:
        def make(folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
            made = folder / "model"
            made.mkdir()
            for file in (FIXTURES / name).iterdir():
                if link:
                    (made / file.name).symlink_to(file)
                else:
                    shutil.copy(file, made)
            there = next(f for f in made.iterdir() if f.suffix in (".bin", ".safetensors"))
            if there.suffix == ".bin":
                return made, torch.load(there, weights_only=True)
            return made, safetensors.torch.load_file(there)

        return make

    yield Benign("Hugging Face's folder", copied("huggingface"))
    yield Benign("links of a cache", copied("huggingface", link=True))
    yield Benign("state-spaces' folder", copied("state_spaces"))

    def shards(folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
        places = {}
        for i, (key, value) in enumerate(own.items(), 1):
            places[key] = f"model-{i:05}-of-00002.safetensors"
            safetensors.torch.save_file({key: value}, folder / places[key])
        (folder / "config.json").write_text('{"model_type": "mamba", "limit": [0.0, Infinity]}')
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder, own

    yield Benign("two shards", shards)

    def tensors(metadata: dict[str, str] | None, name: str) -> Callable[[Path], Any]:
        def make(folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
            safetensors.torch.save_file(own, folder / name, metadata=metadata)
            return folder / name, own

        return make

    yield Benign("safetensors", tensors(None, "w.safetensors"))
    yield Benign("safetensors with metadata", tensors({"format": "pt", "x": "ü" * 99}, "w"))
    yield Benign("safetensors called .bin", tensors(None, "w.bin"))


BENIGN = (*_plain(), *_odd_tensors(), *_settings(), *_written(), *_folders())
