"""Does the time or the size of an export depend on the length of the example sequence?

    python tests/benchmarks/export_time.py [CHECKPOINT]

Captures and writes every program in every format with example sequences of several lengths, in
turn, and prints medians and node counts. A scan is one node, so nothing should grow; for
comparison, a model that exports its scan as a loop over time grows by some twenty nodes a step.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import onnx
from safetensors.torch import save_file

from fuseport import ops
from fuseport.exporter import checkpoint, formats, models
from fuseport.exporter.api import PROGRAMS, capture

LENGTHS = (16, 256, 2048)
ROUNDS = 3
FIXTURE = Path(__file__).parents[2] / "fixtures" / "lightning" / "mamba-kjv.ckpt"


def export(model: models.Model, folder: Path) -> tuple[float, dict[str, int]]:
    """Seconds to capture and write everything, and the number of ONNX nodes of each program."""
    begin = time.perf_counter()
    counts = {}
    for program in capture(model, PROGRAMS, seed=0):
        for name in formats.default():
            writer = formats.get(name)
            path = folder / f"{program.kind}{writer.SUFFIX}"
            writer.write(program, path, formats.Options(folder / "weights.safetensors"))
            if name == "onnx":
                counts[program.kind] = len(onnx.load(path, load_external_data=False).graph.node)
    return time.perf_counter() - begin, counts


def main(path: Path) -> None:
    """Print a line for each length."""
    ops.register()
    model, _ = models.from_checkpoint(checkpoint.load(path))
    seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}
    nodes: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(model.module.named_parameters()), Path(folder) / "weights.safetensors")
        for round_ in range(ROUNDS + 1):  # the first one warms up
            for length in LENGTHS:
                sized = replace(model, sizes={**model.sizes, "length": length})
                taken, nodes[length] = export(sized, Path(folder))
                if round_:
                    seconds[length].append(taken)
    base = statistics.median(seconds[LENGTHS[0]])
    for length in LENGTHS:
        median = statistics.median(seconds[length])
        print(
            f"length {length:5}: {median:6.2f} s, {median / base:.2f} times that of length "
            f"{LENGTHS[0]}; nodes: {nodes[length]}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE)
