"""All functions that ONNX has not, whatever a program is."""

from fuseport.exporter.formats._onnx.functions.angles import ANGLES
from fuseport.exporter.formats._onnx.functions.counts import COUNTS
from fuseport.exporter.formats._onnx.functions.diagonals import DIAGONALS
from fuseport.exporter.formats._onnx.functions.distances import DISTANCES
from fuseport.exporter.formats._onnx.functions.error_functions import ERROR_FUNCTIONS
from fuseport.exporter.formats._onnx.functions.exponentials import EXPONENTIALS
from fuseport.exporter.formats._onnx.functions.factorisations import FACTORISATIONS
from fuseport.exporter.formats._onnx.functions.gammas import GAMMAS
from fuseport.exporter.formats._onnx.functions.running import RUNNING
from fuseport.exporter.formats._onnx.functions.searching import SEARCHING
from fuseport.exporter.formats._onnx.functions.special import SPECIAL
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
