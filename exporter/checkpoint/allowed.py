"""Which names a pickle may use, and what stands in for those that must not be imported."""

import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath

import torch
from torch._weights_only_unpickler import _get_allowed_globals

__all__ = ["STAND_INS", "STORAGES", "Array", "Boxed", "Namespace", "refused"]


def refused(names: tuple[str, ...]) -> list[str]:
    """Those of `names` that loading does not allow."""
    return [name for name in names if name not in _ALLOWED and name not in _STAND_IN_NAMES]


# Harmless classes that checkpoints hold beside their weights. Each is read as plain data under its
# own name: the real class is never imported, so Lightning need not be installed and no code of it
# runs.


class Namespace:
    """Stands in for a class whose instances are a bag of attributes (`argparse.Namespace`)."""


class _Dict:
    """Stands in for dict subclasses (Lightning's AttributeDict, yacs' CfgNode).

    Gives an OrderedDict: the weights-only unpickler sets items on that, though on no subclass, and
    takes the attributes that a CfgNode has beside its items.
    """

    def __new__(cls, *_args: object) -> OrderedDict[object, object]:  # type: ignore[misc]
        return OrderedDict()


class Boxed:
    """Stands in for OmegaConf's containers and nodes: what Hydra's users have for settings."""

    def content(self) -> object:
        """What is inside: of a container `_content`, of a node `_val`."""
        return vars(self).get("_content", vars(self).get("_val"))


class Array:
    """Stands in for `numpy.ndarray`: keeps its shape alone."""

    shape: tuple[int, ...] = ()

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, state: tuple[object, ...]) -> None:
        shape = state[1]
        # What else there may be prints without end.
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise ValueError("an array whose shape is no tuple of integers")
        self.shape = shape

    def __str__(self) -> str:
        return f"<numpy array {self.shape}>"


class _Stream:
    """Stands in for `io.BytesIO`, which Transformer Engine kept scales of FP8 in: keeps nothing."""

    def __setstate__(self, state: object) -> None:
        pass


def _array(*_args: object) -> Array:
    return Array()


def _nothing(*_args: object) -> None:
    """Stands in for types that settings name, such as `builtins.int`: nothing is made of them."""


_STRUCT_CODES = {
    **{"f8": "d", "f4": "f", "f2": "e", "b1": "?"},
    **{"i8": "q", "i4": "i", "i2": "h", "i1": "b"},
    **{"u8": "Q", "u4": "I", "u2": "H", "u1": "B"},
}


class _NumpyDtype:
    """Stands in for `numpy.dtype`: keeps the type code and the byte order."""

    def __init__(self, code: str, *_args: object) -> None:
        self.code = code if isinstance(code, str) else "<unknown>"
        self.order = "<"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> int | float | bool | str:
    """Stands in for numpy's scalars, which metrics and best scores in checkpoints are made of."""
    code = _STRUCT_CODES.get(dtype.code)
    if code is None:
        return f"<numpy {dtype.code}>"
    value: int | float | bool = struct.unpack(dtype.order + code, data)[0]
    return value


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _default_dict(*_factory: object) -> dict[object, object]:
    return {}


STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (Namespace, "argparse.Namespace"),
    (Namespace, "types.SimpleNamespace"),
    (_default_dict, "collections.defaultdict"),
    (_Dict, "lightning.fabric.utilities.data.AttributeDict"),
    (_Dict, "lightning_fabric.utilities.data.AttributeDict"),
    (_Dict, "lightning.pytorch.utilities.parsing.AttributeDict"),
    (_Dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    (_Dict, "yacs.config.CfgNode"),
    *(
        (Boxed, f"omegaconf.{name}")
        for name in (
            "dictconfig.DictConfig",
            "listconfig.ListConfig",
            "base.ContainerMetadata",
            "base.Metadata",
            *(f"nodes.{kind}Node" for kind in ("Any", "Boolean", "Float", "Integer", "String")),
        )
    ),
    # Types that OmegaConf's metadata name. No `object`, `type` or function is among them.
    *(
        (_nothing, name)
        for name in ("typing.Any", *(f"builtins.{t}" for t in ("bool", "dict", "float", "int")))
    ),
    *((_nothing, f"builtins.{name}") for name in ("list", "str")),
    (_Stream, "_io.BytesIO"),
    (Array, "numpy.ndarray"),
    (_array, "numpy.core.multiarray._reconstruct"),
    (_array, "numpy._core.multiarray._reconstruct"),
    (_NumpyDtype, "numpy.dtype"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    *(
        (_path, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
]
_STAND_IN_NAMES = frozenset(entry[1] for entry in STAND_INS if isinstance(entry, tuple))

# Bytes per item of torch.save's storage types. Newer dtypes have untyped ones, in bytes.
STORAGES = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
    **{"BoolStorage": 1, "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "QInt32Storage": 4},
    **{"QInt8Storage": 1, "QUInt8Storage": 1, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1},
}

# What torch.save writes for tensors, storages and the containers around them, and torch's own
# weights-only unpickler allows. A fixed list: a host's `add_safe_globals` does not widen it.
_ALLOWED = frozenset(
    [
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "builtins.bytearray",
        "builtins.complex",
        "_codecs.encode",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        "torch._tensor._rebuild_from_type_v2",
        *(
            f"torch._utils._rebuild_{what}"
            for what in (
                "parameter",
                "parameter_with_state",
                "qtensor",
                "tensor",
                "tensor_v2",
                "tensor_v3",
                "sparse_tensor",
                "meta_tensor_no_storage",
                "device_tensor_from_numpy",
                "device_tensor_from_cpu_tensor",
            )
        ),
        *(
            f"torch.{n}"
            for n, v in vars(torch).items()
            if isinstance(v, (torch.dtype, torch.qscheme))
        ),
        *(f"torch.{name}" for name in STORAGES),
        # Before 2.15.
        *({"torch._utils._rebuild_nested_tensor"} & _get_allowed_globals().keys()),
    ]
)
