"""What was found, as lines for a terminal."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fuseport.exporter.checkpoint.content import show

__all__ = ["artifact", "bundle", "checkpoint"]

_Found = Mapping[str, Any]
_LISTED = 12


def checkpoint(found: _Found) -> Iterator[str]:
    """Of a checkpoint."""
    layout, architecture, sizes = found["layout"], found["architecture"], found["parameters"]
    yield _row("layout", f"{layout['name']}, by {_join(layout['why'])}")
    weights = found["weights"]
    if len(weights["candidates"]) > 1:
        for candidate in weights["candidates"]:
            what = f", {candidate['what']}" if candidate["what"] else ""
            yield _row("weights", f"{_shown(candidate)}{what}")
        yield _row("", f"what follows is of {show(weights['shown'])}; --weights chooses")
    if architecture["name"] is None:
        yield _row("architecture", f"none recognised: {show(architecture['reason'], 600)}")
    else:
        yield _row("architecture", f"{architecture['name']}, by {_join(architecture['why'])}")
    if not found["config_beside"]:
        yield from _settings(found["config"])
    for number, way in enumerate(architecture.get("quantized", ())):
        yield _row("" if number else "quantized", show(way))
    count = f"{sizes['elements']:,} in {sizes['tensors']} tensors, {_size(sizes['bytes'])}"
    yield _row("parameters", count)
    for dtype, entry in sizes["dtypes"].items():
        yield _row("", f"{dtype}: {entry['elements']:,}, {_size(entry['bytes'])}")
    for name, elements in _first(sizes["modules"].items()):
        yield _row("", f"{show(name, 60)}: {elements:,}")
    yield from _cut(sizes["modules"])
    yield from _ops(found["ops"]["needed"])
    if found["ops"]["guessed"] and found["ops"]["needed"]:
        yield _row("", "guessed from names and shapes: only the model's code tells what it calls")
    if found["ops"]["reason"]:
        yield _row("ops", f"not known: {show(found['ops']['reason'], 300)}")
    for name, entry in found.get("tensors", {}).items():
        yield f"  {show(name, 100)}  {entry['dtype']} {entry['shape']}"
    yield from _notes(found)
    if not found["next"]:
        yield _row("next", "no export: it is refused for that reason")
    for number, command in enumerate(found["next"]):
        yield _row("" if number else "next", command)


def bundle(found: _Found) -> Iterator[str]:
    """Of a bundle."""
    source, versions = found["checkpoint"], found["versions"]
    yield _row("from", f"{show(source['name'])}, layout {show(source['layout'])}")
    parameters = found["parameters"]
    yield _row("parameters", f"{parameters['count']:,}, {_join(parameters['dtypes'])}")
    for name, program in found["programs"].items():
        yield _row(name, f"takes {_values(program['inputs'])}")
        yield _row("", f"gives {_values(program['outputs'])}")
    for entry in found["artifacts"]:
        said = ("file", "program", "format", "bytes")
        more = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in said)
        facts = f", {show(more, 100)}" if more else ""
        size = _size(entry["bytes"] or 0)
        yield _row("artifact", f"{show(entry['file'])}, {entry['format']}, {size}{facts}")
    for library in found["libraries"]:
        yield _row("library", f"{show(library['file'])}: {show(library['here'])}")
    yield from _ops(found["ops"])
    if found["unknown_ops"]:
        yield _row("ops", f"not registered here: {_join(found['unknown_ops'])}")
    wrong = found["differences"]
    state = "as the manifest says" if not wrong else f"{len(wrong)} not as the manifest says"
    yield _row("files", f"{found['files']}, {_size(found['bytes'])}: {state}")
    for entry in wrong:
        yield _row("", f"{show(entry['file'])} {entry['state']}")
    if found["machine_code"]:
        trust = "trusted" if found["trusted"] else f"not trusted: --trust-native {found['sha256']}"
        yield _row("machine code", f"{_join(found['machine_code'])}: {trust}")
    yield _row("written by", ", ".join(f"{k} {show(v, 40)}" for k, v in versions.items()))
    yield from _notes(found)


def artifact(found: _Found) -> Iterator[str]:
    """Of an artifact."""
    yield _row("format", f"{found['format']}, {_size(found['bytes'])}")
    for name, value in found.get("version", {}).items():
        yield _row("", f"{name} {show(value, 100)}")
    yield _row("takes", _values(found["inputs"]) or "not said in the file")
    yield _row("gives", _values(found["outputs"]) or "not said in the file")
    weights = found.get("weights")
    if weights is not None:
        dtypes = ", ".join(f"{e['elements']:,} {d}" for d, e in weights.get("dtypes", {}).items())
        yield _row("weights", f"{_size(weights['bytes'])}{': ' if dtypes else ''}{dtypes}")
    for place in found.get("external", ()):
        where = f"{place['tensors']} tensors in {show(place['file'])}: {show(place['state'])}"
        yield _row("external", where)
    ops = found.get("ops", {"counts": {}, "custom": []})
    for domain, counts in ops["counts"].items():
        some = ", ".join(f"{show(n, 60)} {c}" for n, c in _first(counts.items()))
        more = f", and {len(counts) - _LISTED} more" if len(counts) > _LISTED else ""
        yield _row("ops", f"{show(domain, 60)} {sum(counts.values())}: {some}{more}")
    for custom in ops["custom"]:
        yield _row("custom", f"{show(custom['op'], 80)} × {custom['count']}: {custom['as']}")
    for name, size in found.get("code", {}).items():
        yield _row("code", f"{show(name, 100)}, {_size(size)}")
    for name, value in found.get("metadata", {}).items():
        yield _row("metadata", f"{show(name, 60)}: {show(value, 200)}")
    if "trusted" in found:
        yield _row("trust", "trusted" if found["trusted"] else "machine code of unknown origin")
    if found.get("pickles"):
        yield _row("pickle", f"{_join(found['pickles'])}: loading it unpickles them")


def _settings(config: _Found) -> Iterator[str]:
    """What the checkpoint says of its model: what one's own code may take as parameters."""
    for number, (name, value) in enumerate(_first(config.items())):
        yield _row("" if number else "config", f"{show(name, 60)}: {show(value, 80)}")
    yield from _cut(config)


def _ops(needed: Iterable[_Found]) -> Iterator[str]:
    for op in needed:
        calls = sum(op["operators"].values())  # 0 where only the names are known
        times = f" × {calls}" if calls else ""
        marks = [
            "registered",
            "lowered to ONNX" if op["onnx"] else f"no ONNX: {op['reasons']['ONNX portable']}",
            "differentiable" if op["differentiable"] else "no gradient",
            f"native on this CPU ({op['cpu']})" if op["cpu"] else "plain torch on this CPU",
        ]
        yield _row("op", f"{op['op']}{times}: {', '.join(marks)}")
        for seen in op.get("evidence", ()):
            tensors = _join(f"{name} {shape}" for name, shape in seen["tensors"].items())
            less = f"; no {_join(seen['absent'])} beside" if seen["absent"] else ""
            yield _row("", f"by {seen['what']} × {seen['places']}: {tensors}{less}")


def _values(values: Iterable[_Found]) -> str:
    said = []
    for value in list(values)[: _LISTED + 1]:
        dtype = value.get("dtype", value.get("type", ""))
        dims = value.get("shape", value.get("dims"))
        shape = "" if dims is None else f"[{','.join(str(d) for d in dims)}]"
        said.append(f"{show(value['name'], 60)} {show(dtype, 60)}{show(shape, 80)}".strip())
    if len(said) > _LISTED:
        said[_LISTED] = f"and {len(list(values)) - _LISTED} more"
    return ", ".join(said)


def _notes(found: _Found) -> Iterator[str]:
    for note in found["notes"]:
        yield f"  note: {show(note, 400)}"


def _row(label: str, value: str) -> str:
    return f"  {label:<12}  {value}"


def _shown(candidate: _Found) -> str:
    name = show(candidate["name"], 80)
    return f"{name}: {candidate['elements']:,} in {candidate['tensors']} tensors"


def _first(items: Iterable[Any]) -> list[Any]:
    return list(items)[:_LISTED]


def _cut(items: Mapping[str, Any]) -> Iterator[str]:
    if len(items) > _LISTED:
        yield _row("", f"… and {len(items) - _LISTED} more")


def _join(items: Iterable[object]) -> str:
    listed = [show(item, 100) for item in items]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
