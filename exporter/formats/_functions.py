"""All functions that ONNX has not, whatever a program is."""

from fuseport.exporter.formats._angles import ANGLES
from fuseport.exporter.formats._counts import COUNTS
from fuseport.exporter.formats._diagonals import DIAGONALS
from fuseport.exporter.formats._distances import DISTANCES
from fuseport.exporter.formats._error_functions import ERROR_FUNCTIONS
from fuseport.exporter.formats._exponentials import EXPONENTIALS
from fuseport.exporter.formats._factorisations import FACTORISATIONS
from fuseport.exporter.formats._gammas import GAMMAS
from fuseport.exporter.formats._running import RUNNING
from fuseport.exporter.formats._searching import SEARCHING
from fuseport.exporter.formats._special import SPECIAL
from fuseport.exporter.program.rewriting import Table

__all__ = ["FUNCTIONS"]

FUNCTIONS: Table = {
    **ANGLES,
    **COUNTS,
    **DIAGONALS,
    **DISTANCES,
    **EXPONENTIALS,
    **FACTORISATIONS,
    **GAMMAS,
    **RUNNING,
    **SEARCHING,
    **SPECIAL,
    **ERROR_FUNCTIONS,
}
