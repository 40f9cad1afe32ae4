"""nnU-Net and U-Mamba: what nnU-Net's trainer saves.

Source: `nnUNetTrainer.save_checkpoint` of github.com/MIC-DKFZ/nnUNet. The architecture comes from
the plans, which are among the trainer's arguments: code given by `--model` may have parameters
`plans`, `configuration`, `fold` and `dataset_json`, as the trainer has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint.content import Candidate, Content, is_state_dict, show
from fuseport.exporter.checkpoint.plain import settings
from fuseport.exporter.errors import CorruptInput

__all__ = ["SIGNS", "recognise"]

_WEIGHTS = "network_weights"
SIGNS = (_WEIGHTS, "init_args", "trainer_name")

# What the trainer was told of the machine that it ran on; no part of the model.
_OF_THE_RUN = frozenset(["device", "unpack_dataset"])


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The weights; `config` are the trainer's arguments and its name.

    Raises:
        CorruptInput: no tensors among the weights, or arguments that nest without end.
    """
    if not loaded.keys() >= set(SIGNS):
        return None
    weights = loaded[_WEIGHTS]
    if not isinstance(weights, Mapping) or not is_state_dict(weights):
        raise CorruptInput(
            f"{show(path)}: {_WEIGHTS}: no tensors in it; give a checkpoint that holds weights"
        )
    arguments = settings(path, "init_args", loaded["init_args"])
    config = {key: value for key, value in arguments.items() if key not in _OF_THE_RUN}
    config |= settings(path, "trainer_name", {"trainer_name": loaded["trainer_name"]})
    return Content("nnunet", (Candidate(_WEIGHTS, weights),), config, why=SIGNS)
