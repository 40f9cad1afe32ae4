"""How much the checks see: every planted bug of every op, and clean runs beside. It takes hours.

    python tests/benchmarks/power.py                    # all ops, every place, six clean seeds
    python tests/benchmarks/power.py swiglu --quick     # one place of each kind
    python tests/benchmarks/power.py --bundle bundle/   # a bundle's self-test, too
    python tests/benchmarks/power.py --add swiglu power.json    # what a command's --json wrote

Each op, or bundle, takes the place of its former part in `results/power.json`, so that it can be
run in parts, side by side; the sums are over all parts that are there.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
from filelock import FileLock

from fuseport.exporter import api
from fuseport.exporter.verify import mutants
from fuseport.ops import OPS

RESULTS = Path(__file__).parent / "results" / "power.json"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--quick", is_flag=True, help="Each kind in one place of each op.")
@click.option("--runs", default=6, show_default=True, help="Seeds of clean runs.")
@click.option("--seed", default=0, show_default=True)
@click.option("--bundle", type=click.Path(path_type=Path), help="Its self-test, instead of ops.")
@click.option("--runtime", multiple=True, help="Of the bundle.")
@click.option("--add", nargs=2, multiple=True, metavar="NAME FILE", help="A command's JSON.")
def main(
    names: tuple[str, ...],
    quick: bool,
    runs: int,
    seed: int,
    bundle: Path | None,
    runtime: tuple[str, ...],
    add: tuple[tuple[str, str], ...],
) -> None:
    def tell(message: str) -> None:
        click.echo(message, err=True)

    for name, file in add:
        _keep(name, json.loads(Path(file).read_text(encoding="utf-8")), "one place of each kind")
    if add:
        return
    if bundle is not None:
        for name in runtime or ("eager", "onnxruntime", "torchscript", "exported_program"):
            power = api.self_test(bundle, runtime=[name], seed=seed, progress=tell)
            _keep(f"{bundle.name}, {name}", json.loads(power.to_json()), "one place of each kind")
        return
    for name in names or OPS:
        power = mutants.check([name], None, quick=quick, runs=runs, seed=seed, progress=tell)
        content = json.loads(power.to_json())
        _keep(name, content, "one place of each kind" if quick else "every place")


def _keep(name: str, content: dict[str, Any], places: str) -> None:
    """Put a part into the results, and print it."""
    for large in ("planted", "clean"):
        del content[large]
    environment = content.pop("environment")
    part = {"places": places, **content}
    with FileLock(Path(tempfile.gettempdir()) / "fuseport-power.lock"):
        _merge(name, part, environment)
    click.echo(f"{name}: {json.dumps(content['summary'])}")
    sys.stdout.flush()


def _merge(name: str, part: dict[str, Any], environment: dict[str, Any]) -> None:
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"parts": {}}
    parts = {**before["parts"], name: part}
    total: Counter[str] = Counter()
    for one in parts.values():
        total.update(one["summary"])
    whole = {
        "command": "python tests/benchmarks/power.py",
        "environment": environment,
        "summary": dict(total),
        "caught_share": total["caught"] / max(1, total["planted"]),
        "parts": dict(sorted(parts.items())),
    }
    RESULTS.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
