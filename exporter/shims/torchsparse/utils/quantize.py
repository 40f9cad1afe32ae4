"""Voxels of points, in numpy."""

from typing import Any

import numpy as np

__all__ = ["sparse_quantize"]


def sparse_quantize(
    coords: Any, voxel_size: Any = 1, *, return_index: bool = False, return_inverse: bool = False
) -> Any:
    """The voxels that points (n, 3) are in, sorted, int32.

    Args:
        voxel_size: a number, or three.
        return_index, return_inverse: whether which points are the first of theirs, and which voxel
            each point is in, come, too.
    """
    cells = np.floor(coords / np.asarray(voxel_size)).astype(np.int32)
    voxels, index, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    outputs = [voxels]
    if return_index:
        outputs.append(index)
    if return_inverse:
        outputs.append(inverse.reshape(-1))
    return outputs[0] if len(outputs) == 1 else outputs
