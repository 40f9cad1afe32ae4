"""A file's tensors by the names that transformers' models have for them today.

Files keep the names of their time: an expert's matrix each, where a layer has them as one tensor
now, `backbone.` where the model says `model.`. transformers knows what became of them, and loads
them so; that is asked, and nothing of it repeated here.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing

__all__ = ["offline", "quiet", "renamed"]

_MADE = ".rotary_emb.inv_freq"  # files of before 4.32 have it; models make it of their settings


def renamed(module: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors by the module's own names, those that it lacks under theirs.

    Args:
        module: of transformers; its own weights stay as they are.
        tensors: by the file's names; they keep their dtypes, but where several became one.

    Raises:
        Missing: transformers has no way to read them here.
    """
    own = module.state_dict()
    tensors = {n: t for n, t in tensors.items() if n in own or not n.endswith(_MADE)}
    if not own.keys() - tensors.keys() or not tensors.keys() - own.keys():
        return tensors  # nothing of the file is called otherwise
    try:
        with quiet(), offline():
            other, found = type(module).from_pretrained(
                None, config=module.config, state_dict=dict(tensors), output_loading_info=True
            )
    except RuntimeError:  # such as an expert that is absent: what is amiss, `weights.fit` says
        return tensors
    except Exception as error:  # of any type, as where weights are quantized
        raise Missing(
            f"transformers cannot read the weights of this {type(module).__name__}:"
            f" {type(error).__name__}: {show(error)}"
        ) from error
    taken = other.state_dict()
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    if absent >= own.keys():  # under a prefix, which is the concern of `weights`
        return tensors
    result = {n: tensors.get(n, taken[n]) for n in own if n in tensors or n not in absent}
    result |= {name: tensors[name] for name in found["unexpected_keys"] if name in tensors}
    return result


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched from a hub meanwhile, whatever a config names."""
    constants = importlib.import_module("huggingface_hub.constants")
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What transformers would print is of no use: names that do not fit are `weights.fit`'s."""
    logging = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
