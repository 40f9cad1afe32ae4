"""Mutated files: each is refused, or read; nothing dies, hangs or says that it is a bug.

    python -m fuseport.tests.corpus.fuzz --count 100000      # `make fuzz`

Mutations are seeded: file N of a kind is the same every time. Files are read in children, some
hundreds in each, under limits of processor time and memory. Figures go to
`tests/benchmarks/results/fuzz.json`.
"""

import functools
import io
import json
import random
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from fuseport.exporter.describe import environment
from fuseport.tests.corpus.judge import forked, judged

__all__ = ["KINDS", "Kind", "fuzz"]

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "fuzz.json"
FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
BATCH = 200
NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**400, 1.5, float("inf"), float("nan"), "", "x", "\0"),
    *("../x", "/etc/passwd", "\ud800", "mamba", [], {}, [[]], {"a": {}}, "n" * 5000),
)


@dataclass(frozen=True)
class Kind:
    """A kind of file to mutate.

    Attributes:
        seed: the right file's bytes; made once.
        reader: of `judge`.
        name: the file's name, its folder's too where it needs more files.
        mutate: seeded; bytes to bytes.
        summed: every byte that matters is under a checksum: what is read must be what was written.
        around: writes what else the folder needs.
    """

    seed: Callable[[], bytes]
    reader: str
    name: str
    mutate: Callable[[bytes, random.Random], bytes]
    summed: bool = False
    around: Callable[[Path], None] = lambda folder: None


def fuzz(kind: str, first: int, count: int) -> dict[str, Any]:
    """Read the mutated files `first` to `first + count` of a kind.

    Returns:
        How many by exit code, and lists of what must not be: `died` (signal and range), `bugs` (an
        exception that is no error of ours, with the file's number), `wrong` (read, but other
        numbers under a right checksum).
    """
    codes: Counter[str] = Counter()
    found: dict[str, list[str]] = {"died": [], "bugs": [], "wrong": []}
    right = KINDS[kind].seed()
    for begin in range(first, first + count, BATCH):
        end = min(begin + BATCH, first + count)
        answer = forked(functools.partial(_batch, kind, right, begin, end))
        if answer["died"] is not None:
            found["died"].append(f"{answer['died']} among {kind} {begin} to {end}")
            continue
        codes.update(answer["result"]["codes"])
        for what in ("bugs", "wrong"):
            found[what] += answer["result"][what]
    return {"files": count, "codes": dict(sorted(codes.items())), **found}


def _batch(name: str, right: bytes, begin: int, end: int) -> dict[str, Any]:
    kind = KINDS[name]
    codes: Counter[str] = Counter()
    found: dict[str, list[str]] = {"bugs": [], "wrong": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kind.around(folder)
        path = folder / kind.name
        given = str(path if kind.name.startswith("w") else folder)
        path.write_bytes(right)
        truth = judged(kind.reader, given)
        assert truth["code"] == 0, truth
        for number in range(begin, end):
            path.write_bytes(kind.mutate(right, random.Random(f"{name} {number}")))
            answer = judged(kind.reader, given)
            codes[str(answer["code"])] += 1
            if answer["code"] == 70:
                found["bugs"].append(f"{name} {number}: {answer['message'][:200]}")
            if kind.summed and answer["code"] == 0 and answer["tensors"] != truth["tensors"]:
                found["wrong"].append(f"{name} {number}")
    return {"codes": codes, **found}


def mutated(data: bytes, source: random.Random) -> bytes:
    """One to four changes: bits, numbers, pieces taken out, doubled, moved or cut off."""
    result = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        at = source.randrange(len(result)) if result else 0
        length = source.choice((1, 2, 4, 8, 64, 1000))
        match source.randrange(8):
            case 0 | 1 | 2:
                if result:
                    result[at] ^= 1 << source.randrange(8)
            case 3:
                result[at : at + 1] = bytes([source.randrange(256)])
            case 4:
                width = source.choice((1, 2, 4, 8))
                number = source.choice(NUMBERS) % 2 ** (8 * width)
                result[at : at + width] = number.to_bytes(width, source.choice(("little", "big")))
            case 5:
                del result[at : at + length]
            case 6:
                piece = result[at : at + length]
                other = source.randrange(len(result) + 1)
                result[other:other] = piece
            case 7:
                if source.random() < 0.2:
                    del result[at:]
    return bytes(result)


def _member(data: bytes, source: random.Random, *suffixes: str) -> bytes:
    """Another content of one member, under a right checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as there:
        content = {info.filename: there.read(info) for info in there.infolist()}
    name = source.choice([n for n in content if n.endswith(suffixes)])
    content[name] = mutated(content[name], source)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, value in content.items():
            made.writestr(name, value)
    return out.getvalue()


def _archive(*suffixes: str) -> Callable[[bytes, random.Random], bytes]:
    def mutate(data: bytes, source: random.Random) -> bytes:
        return mutated(data, source) if source.random() < 0.4 else _member(data, source, *suffixes)

    return mutate


def _header(data: bytes, source: random.Random) -> bytes:
    """Of safetensors: what comes before the numbers, mostly."""
    end = 8 + int.from_bytes(data[:8], "little")
    if source.random() < 0.2:
        return mutated(data, source)
    header = mutated(data[8:end], source)
    length = data[:8] if source.random() < 0.3 else len(header).to_bytes(8, "little")
    return length + header + data[end:]


def _json(data: bytes, source: random.Random) -> bytes:
    if source.random() < 0.5:
        return mutated(data, source)
    value = json.loads(data)
    place = value
    while True:
        key = source.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or source.random() < 0.3:
            break
        place = place[key]
    if source.random() < 0.2:
        del place[key]
    else:
        place[key] = source.choice(ODD)
    return json.dumps(value).encode()


def _tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {"a.weight": base, "a.tied": base, "b": base.t()[1:].bfloat16(), "c": torch.ones(3)}


def _saved(**how: Any) -> bytes:
    settings = {"lr": 0.1, "sizes": (1, 2), "names": ["a", "b"], "path": Path("x")}
    value = {"state_dict": _tensors(), "pytorch-lightning_version": "2.5", "epoch": 3}
    out = io.BytesIO()
    torch.save({**value, "hyper_parameters": settings}, out, **how)
    return out.getvalue()


def _written(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "w.pt2"
        write(file)
        return file.read_bytes()


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x.sum()


def _exported() -> bytes:
    program = torch.export.export(_Net(), (torch.ones(2, 3),))
    return _written(lambda file: torch.export.save(program, file))


def _onnx() -> bytes:
    text = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
    g (float[n, 3] x) => (float[n, 3] y) <float[3] w = {1.0, 2.0, 3.0}> {
        a = Mul(x, w)
        b = own.F(a)
        c = Constant<value = bool {1}>()
        y = If(c) <then_branch = t () => (float[n, 3] p) { p = Abs(b) },
                   else_branch = e () => (float[n, 3] q) { q = Neg(b) }>
    }
    <domain: "own", opset_import: ["" : 20]> F (u) => (v) { v = Relu(u) }"""
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def _weights_around(folder: Path) -> None:
    safetensors.torch.save_file(
        {k: v.contiguous().clone() for k, v in _tensors().items()}, folder / "model.safetensors"
    )


def _shards_around(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    for i, (name, value) in enumerate(_tensors().items()):
        file = folder / f"model-{i}.safetensors"
        safetensors.torch.save_file({name: value.contiguous().clone()}, file)


def _index() -> bytes:
    places = {name: f"model-{i}.safetensors" for i, name in enumerate(_tensors())}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()


def _safetensors() -> bytes:
    return safetensors.torch.save({k: v.contiguous().clone() for k, v in _tensors().items()})


def _hugging_face_config() -> bytes:
    return (FIXTURES / "huggingface" / "config.json").read_bytes()


def _parts_around(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"model": _tensors(), "step": 3}, checkpoint_id=folder, no_dist=True)


def _metadata() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        _parts_around(Path(place))
        return (Path(place) / ".metadata").read_bytes()


KINDS = {
    "archive": Kind(_saved, "recognised", "w.ckpt", mutated, summed=True),
    "pickle": Kind(_saved, "recognised", "w.ckpt", _archive("data.pkl")),
    "older file": Kind(
        functools.partial(_saved, _use_new_zipfile_serialization=False),
        "recognised", "w.pt", mutated,
    ),
    "safetensors": Kind(_safetensors, "recognised", "w.safetensors", _header),
    "config": Kind(
        _hugging_face_config, "recognised", "config.json", _json, around=_weights_around
    ),
    "index": Kind(
        _index, "recognised", "model.safetensors.index.json", _json, around=_shards_around
    ),
    "metadata": Kind(_metadata, "recognised", ".metadata", mutated, around=_parts_around),
    "onnx": Kind(_onnx, "artifact", "w.onnx", mutated),
    "exported program": Kind(_exported, "artifact", "w.pt2", _archive(".json")),
    "torchscript": Kind(
        lambda: _written(lambda file: torch.jit.script(_Net()).save(str(file))),
        "artifact", "w.pt", _archive(".pkl", ".py"),
    ),
}  # fmt: skip
CHECKPOINTS = ("archive", "pickle", "older file", "safetensors", "config", "index", "metadata")


@click.command()
@click.option("--count", default=100_000, show_default=True, help="Of all checkpoints together.")
@click.option("--artifacts", default=2000, show_default=True, help="Of each kind of artifact.")
@click.option("--first", default=0, show_default=True, help="Number of the first file of a kind.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
def main(count: int, artifacts: int, first: int, results: Path) -> None:
    """Mutate checkpoints and artifacts, read them, and write what came of it."""
    begin = time.monotonic()
    parts = {}
    for kind in KINDS:
        number = -(-count // len(CHECKPOINTS)) if kind in CHECKPOINTS else artifacts
        parts[kind] = fuzz(kind, first, number)
        click.echo(f"{kind}: {json.dumps(parts[kind])}", err=True)
    content = {
        "command": f"python -m fuseport.tests.corpus.fuzz --count {count} --artifacts {artifacts}",
        "environment": environment(),
        "seconds": round(time.monotonic() - begin),
        "checkpoints": sum(parts[kind]["files"] for kind in CHECKPOINTS),
        "parts": parts,
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    if any(part[what] for part in parts.values() for what in ("died", "bugs", "wrong")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
