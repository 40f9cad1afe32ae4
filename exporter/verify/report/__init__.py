"""What a verification found: one dataclass, and its faces, a file each.

`terminal`, `json`, `junit`, `markdown` and `html`, all of `Report` and nothing else; what several
of them need is in `parts`.
"""

from fuseport.exporter.verify.report.json import SCHEMA
from fuseport.exporter.verify.report.model import FLOAT64, OWN_BACKWARD, Report, Row

__all__ = ["FLOAT64", "OWN_BACKWARD", "SCHEMA", "Report", "Row"]
