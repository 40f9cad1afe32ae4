"""Settings, which code may read and write; of these the layout of weights in files has an effect.

`SPCONV_SAVED_WEIGHT_LAYOUT` in the environment says how a checkpoint has weights: `KRSC`, spconv's
own, of outputs, places and inputs; `RSKC` or `RSCK`, as spconv 2.1 and 1 had them.
"""

import os
from typing import Any

__all__ = [
    "ALL_WEIGHT_IS_KRSC",
    "FILTER_HWIO",
    "SAVED_WEIGHT_LAYOUT",
    "SPCONV_ALLOW_TF32",
    "SPCONV_DO_SORT",
    "SPCONV_FX_TRACE_MODE",
    "SPCONV_USE_DIRECT_TABLE",
]

SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
SPCONV_ALLOW_TF32: Any = False
SPCONV_DO_SORT: Any = True
SPCONV_FX_TRACE_MODE: Any = False
SPCONV_USE_DIRECT_TABLE: Any = True

if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(
        f"SPCONV_SAVED_WEIGHT_LAYOUT is {SAVED_WEIGHT_LAYOUT}: it may be KRSC, RSKC or RSCK"
    )
