"""The file that `fuseport ci --init` writes."""

from pathlib import Path

from fuseport.exporter.errors import UsageError

__all__ = ["TEXT", "write"]

TEXT = """\
# What `fuseport ci` exports and verifies. Paths are relative to this file.

report = "fuseport-report"             # a page and data for each checkpoint go here
# formats = ["torchscript", "onnx"]    # absent: exported_program, onnx and torchscript
# programs = ["forward", "gradient"]
# runtimes = ["onnxruntime"]           # absent: all that are installed; one that is named must be
# device = "cuda"                      # runtimes on a GPU, against float64 on the CPU
# strict = true                        # what is unsupported is a mismatch
# seeds = 3                            # sets of values for each case

# [limits]
# timeout = 900                        # seconds for one job of a runtime
# memory = 8                           # GiB for its process
# jobs = 1                             # runtimes at once; absent: as many as have room, up to four

# Instead of the rule, which measures what is allowed: |error| <= atol + rtol * |truth|.
# `fuseport calibrate bundle/` proposes such a section.
# [tolerances]
# atol = 1e-5
# tensors = { "grad/*" = { atol = 1e-4, rtol = 1e-3 } }

[[checkpoint]]
path = "model.ckpt"
# name = "model"                       # absent: the file's name without its suffix
# weights = "model_ema"                # where the file holds several
# adapter = "adapter/"                 # of LoRA, that PEFT saved
# model = "net.py:Net"                 # your own code; else the architecture is recognised
# input-shapes = ["x:[batch,length,64]"]
# inputs = "samples.safetensors"       # or examples, with dynamic = ["x:{0:batch,1:length}"]
# size = "length=64"                   # of dynamic dimensions in the export's example
# ops = "my_ops.py"
# shim = "auto"
# dtype = "bfloat16"
# bundle = "bundles/model"             # to keep it there; else it is in the cache folder
# and all of the above, for this checkpoint alone

# Rows of the report that are known not to pass. Each field is a pattern (*: any), and verdict is
# fail, error or unsupported. One that passes is a failure: then this has to go.
# [[checkpoint.expected]]
# runtime = "onnxruntime"
# artifact = "gradient.onnx"
# tensor = "grad/*.conv1d.weight"
# case = "*"
# verdict = "fail"
# reason = "link to the bug"
"""


def write(file: Path) -> None:
    """Write it to a new file.

    Raises:
        UsageError: there is one.
        OSError: it cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(TEXT)
    except FileExistsError as error:
        raise UsageError(f"{file}: it is there, and stays as it is") from error
