"""Types of arguments."""

__all__ = [
    "CausalArg1DType",
    "CausalArg1DTypeOrDed",
    "CausalArg2DType",
    "CausalArg2DTypeOrDed",
    "CausalArg3DType",
    "CausalArg3DTypeOrDed",
    "CausalArgType",
    "CausalArgTypeOrDed",
    "Dimension1DType",
    "Dimension1DTypeOrDed",
    "Dimension2DType",
    "Dimension2DTypeOrDed",
    "Dimension3DType",
    "Dimension3DTypeOrDed",
    "DimensionType",
    "DimensionTypeOrDed",
    "NoneType",
]

NoneType = type(None)

Dimension1DType = tuple[int]
Dimension2DType = tuple[int, int]
Dimension3DType = tuple[int, int, int]
DimensionType = Dimension1DType | Dimension2DType | Dimension3DType
Dimension1DTypeOrDed = int | Dimension1DType
Dimension2DTypeOrDed = int | Dimension2DType
Dimension3DTypeOrDed = int | Dimension3DType
DimensionTypeOrDed = int | DimensionType

CausalArg1DType = tuple[bool]
CausalArg2DType = tuple[bool, bool]
CausalArg3DType = tuple[bool, bool, bool]
CausalArgType = CausalArg1DType | CausalArg2DType | CausalArg3DType
CausalArg1DTypeOrDed = bool | CausalArg1DType
CausalArg2DTypeOrDed = bool | CausalArg2DType
CausalArg3DTypeOrDed = bool | CausalArg3DType
CausalArgTypeOrDed = bool | CausalArgType
