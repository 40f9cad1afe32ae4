"""VMamba: images as four walks over their pixels, scanned at once, in four stages.

Architecture and parameter names are those of github.com/MzeroMiko/VMamba (Liu et al., 2024), in its
versions with a gate ("v0", the first one published) and without ("v05_noz"); the code is our own.
b batch, H and W a stage's height and width, C its channels, D = d_inner, N = d_state, R = dt_rank.
Activations stay (b, H, W, channels) in memory but for filters and walks.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing
from fuseport.exporter.models import _vision as vision
from fuseport.exporter.models._language_model import cast, wide
from fuseport.exporter.models.model import OWN_CODE, Model
from fuseport.exporter.models.weights import some, unwrap
from fuseport.ops.cross_merge import cross_merge
from fuseport.ops.cross_scan import cross_scan
from fuseport.ops.selective_scan import selective_scan

__all__ = ["SIGNS", "VMamba", "VMambaConfig", "model", "recognise"]

SIGNS = (
    "*layers.*.blocks.*.A_logs",
    "*layers.*.blocks.*.x_proj_weight",
    "*layers.*.blocks.*.dt_projs_weight",
    "*layers.*.downsample.*",
    "*patch_embed.*.weight",
)

_WALKS = 4


@dataclass(frozen=True, kw_only=True)
class VMambaConfig:
    """What models differ in; a tuple has a number for each stage.

    Attributes:
        depths: blocks, each with one scan of four walks.
        dims: C, channels.
        d_inner: D, channels of each walk.
        dt_rank: R, the step sizes' inner width.
        mlp: inner widths of the perceptrons; 0 for a stage without.
        d_state: N, states per channel.
        d_conv: width of the depthwise filter; 0 without one.
        conv_bias: that filter has a bias.
        gate: what the scan returns is multiplied by SiLU of a projection.
        gated_mlp: perceptrons have a gate too.
        channels: of the image.
        image_size: its height and width.
        patch_kernel: width of the filters that make patches.
        patch_version: 1 for one filter, whose patches do not overlap; 2 for two that do.
        patch_norm: patches are normed.
        downsample: between stages: 1 for merging of 2×2 pixels, 2 for a filter of 2×2, 3 of 3×3.
        pos_embed: there are learned positions.
        num_classes: of the head; 0 without one.

    Raises:
        ValueError: a value makes no sense.
    """

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    d_inner: tuple[int, ...]
    dt_rank: tuple[int, ...]
    mlp: tuple[int, ...]
    d_state: int
    d_conv: int
    conv_bias: bool
    gate: bool
    gated_mlp: bool
    channels: int
    image_size: int
    patch_kernel: int
    patch_version: int
    patch_norm: bool
    downsample: int
    pos_embed: bool
    num_classes: int

    def __post_init__(self) -> None:
        vision.require_sizes(self, optional=("mlp", "d_conv", "num_classes"))
        stages = {len(v) for v in (self.depths, self.dims, self.d_inner, self.dt_rank, self.mlp)}
        if len(stages) > 1 or self.patch_version > 2 or self.downsample > 3:
            raise ValueError(f"downsample {self.downsample}, patch_version {self.patch_version}")

    @property
    def patches(self) -> int:
        """Patches in each row and column."""
        if self.patch_version == 1:
            return self.image_size // self.patch_kernel
        size = self.image_size
        for _ in range(2):
            size = (size + 2 - self.patch_kernel) // (self.patch_kernel - 1) + 1
        return size


class VMamba(nn.Module):
    """VMamba with the public code's parameter names, those of its later versions."""

    def __init__(self, config: VMambaConfig) -> None:
        super().__init__()
        self.config = config
        side, width = config.patches, config.dims[-1]
        self.patch_embed = _patch_embed(config)
        self.pos_embed = (
            nn.Parameter(torch.zeros(1, config.dims[0], side, side)) if config.pos_embed else None
        )
        self.layers = nn.ModuleList(_Stage(config, i) for i in range(len(config.depths)))
        self.classifier = nn.ModuleDict({"norm": nn.LayerNorm(width)})
        if config.num_classes:
            self.classifier["head"] = nn.Linear(width, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of classes, or without a head the mean features.

        Args:
            x: (b, channels, image_size, image_size), of any floating dtype.

        Returns:
            (b, num_classes), or (b, dims[-1]), in the weights' dtype.
        """
        norm: nn.Module = self.classifier["norm"]
        x = cast(x, norm.get_parameter("weight").dtype).permute(0, 2, 3, 1)
        x = self.patch_embed(x)
        if self.pos_embed is not None:
            x = x + self.pos_embed.permute(0, 2, 3, 1)
        for stage in self.layers:
            x = stage(x)
        x = self.classifier["norm"](x).mean((1, 2))
        return self.classifier["head"](x) if "head" in self.classifier else x


class _Stage(nn.Module):
    def __init__(self, config: VMambaConfig, index: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(config, index) for _ in range(config.depths[index])))
        last = index == len(config.depths) - 1
        self.downsample = nn.Identity() if last else _downsample(config, index)

    def forward(self, x: Tensor) -> Tensor:
        """(b, H, W, C) → the next stage's."""
        smaller: Tensor = self.downsample(self.blocks(x))
        return smaller


class _Block(nn.Module):
    def __init__(self, config: VMambaConfig, stage: int) -> None:
        super().__init__()
        width = config.dims[stage]
        self.norm = nn.LayerNorm(width)
        self.op = _Scan(config, stage)
        hidden = config.mlp[stage]
        self.norm2 = nn.LayerNorm(width) if hidden else None
        self.mlp = _Mlp(width, hidden, gated=config.gated_mlp) if hidden else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, H, W, C) → (b, H, W, C)."""
        x = x + self.op(self.norm(x))
        if self.mlp is not None and self.norm2 is not None:
            x = x + self.mlp(self.norm2(x))
        return x


class _Scan(nn.Module):
    """The public code's SS2D: a depthwise filter, four walks, one scan of all of them."""

    def __init__(self, config: VMambaConfig, stage: int) -> None:
        super().__init__()
        width, D, R = config.dims[stage], config.d_inner[stage], config.dt_rank[stage]
        N, d_conv = config.d_state, config.d_conv
        self.in_proj = nn.Linear(width, 2 * D if config.gate else D, bias=False)
        self.conv2d = (
            nn.Conv2d(D, D, d_conv, groups=D, bias=config.conv_bias, padding=(d_conv - 1) // 2)
            if d_conv
            else None
        )
        self.x_proj_weight = nn.Parameter(torch.empty(_WALKS, R + 2 * N, D))
        self.dt_projs_weight = nn.Parameter(torch.empty(_WALKS, D, R))
        self.dt_projs_bias = nn.Parameter(torch.empty(_WALKS, D))
        self.A_logs = nn.Parameter(torch.empty(_WALKS * D, N))
        self.Ds = nn.Parameter(torch.empty(_WALKS * D))
        self.out_norm = nn.LayerNorm(D)
        self.out_proj = nn.Linear(D, width, bias=False)
        self.gate = config.gate

    def forward(self, x: Tensor) -> Tensor:
        """(b, H, W, C) → (b, H, W, C)."""
        z = None
        x = self.in_proj(x)
        if self.gate:
            x, z = x.chunk(2, dim=-1)
        image = x.permute(0, 3, 1, 2)
        if self.conv2d is not None:
            image = self.conv2d(image)
        y = self.out_norm(self._scanned(F.silu(image)))
        out: Tensor = self.out_proj(y if z is None else y * F.silu(z))
        return out

    def _scanned(self, image: Tensor) -> Tensor:
        """(b, D, H, W) → (b, H, W, D)."""
        height, width = image.shape[2:]
        R, N = self.dt_projs_weight.shape[2], self.A_logs.shape[1]
        walks = cross_scan(image)
        selected = self.x_proj_weight @ walks  # (b, 4, R + 2N, H·W)
        low_rank, B, C = selected.split([R, N, N], dim=2)
        delta = self.dt_projs_weight @ low_rank
        y = selective_scan(
            walks.flatten(1, 2),
            delta.flatten(1, 2),
            -torch.exp(wide(self.A_logs)),
            B,
            C,
            wide(self.Ds),
            delta_bias=wide(self.dt_projs_bias).flatten(),
            delta_softplus=True,
        )
        merged = cross_merge(y.unflatten(1, (_WALKS, image.shape[1])), height, width)
        rows: Tensor = merged.transpose(1, 2).unflatten(1, (height, width))
        return rows


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, *, gated: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden if gated else hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C)."""
        x = self.fc1(x)
        if self.gated:
            x, z = x.chunk(2, dim=-1)
            x = x * F.gelu(z)
        else:
            x = F.gelu(x)
        out: Tensor = self.fc2(x)
        return out


class _Filter(nn.Conv2d):
    """A filter of images whose channels are last."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, H, W, C) → (b, H', W', C')."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class _Merging(nn.Module):
    """2×2 pixels become one; an odd row or column is filled up with zeros."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, H, W, C) → (b, ⌈H/2⌉, ⌈W/2⌉, C')."""
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged: Tensor = self.reduction(self.norm(torch.cat(parts, dim=-1)))
        return merged


# Modules stand under the numbers that they have in the public code's sequences, whose other members
# have no parameters.


def _patch_embed(config: VMambaConfig) -> nn.Sequential:
    width, kernel = config.dims[0], config.patch_kernel
    if config.patch_version == 1:
        first = _Filter(config.channels, width, kernel, stride=kernel)
        parts: dict[str, nn.Module] = {"0": first, "2": nn.LayerNorm(width)}
    else:
        half, stride = width // 2, kernel - 1
        parts = {
            "0": _Filter(config.channels, half, kernel, stride=stride, padding=1),
            "2": nn.LayerNorm(half),
            "4": nn.GELU(),
            "5": _Filter(half, width, kernel, stride=stride, padding=1),
            "7": nn.LayerNorm(width),
        }
    kept = {n: p for n, p in parts.items() if config.patch_norm or n not in ("2", "7")}
    return nn.Sequential(OrderedDict(kept))


def _downsample(config: VMambaConfig, index: int) -> nn.Module:
    width, out, kernel = config.dims[index], config.dims[index + 1], config.downsample
    if kernel == 1:
        return _Merging(width, out)
    conv = _Filter(width, out, kernel, stride=2, padding=kernel - 2)
    return nn.Sequential(OrderedDict({"1": conv, "3": nn.LayerNorm(out)}))


# --- what the exporter asks of an architecture ---------------------------------------------------

_SIGN = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.\d+\.blocks\.\d+\.(?:op|self_attention)\.A_logs")
# The first version's names, and those of the version that is one file.
_OTHER_NAMES = (
    (re.compile(r"patch_embed\.proj\."), "patch_embed.0."),
    (re.compile(r"patch_embed\.norm\."), "patch_embed.2."),
    (re.compile(r"(layers\.\d+\.blocks\.\d+)\.ln_1\."), r"\1.norm."),
    (re.compile(r"(layers\.\d+\.blocks\.\d+)\.self_attention\."), r"\1.op."),
    (re.compile(r"(norm|head)\."), r"classifier.\1."),
    (re.compile(r"(layers\.\d+\.blocks\.\d+\.op)\.(x_proj|dt_projs)\.weight"), r"\1.\2_weight"),
)
_STACKED = re.compile(r".*\.(x_proj|dt_projs)_weight")
# A filter of 1×1, as which `Linear2d` may be stored, is a matrix.
_LINEAR = re.compile(r".*\.(in_proj|out_proj|fc1|fc2|reduction)\.weight")
# In eval mode these compute the same; `_noz`, without a gate, shows in the shapes.
_FORWARD_TYPES = re.compile(r"(v0|v0seq|v0[1-5]|v[2-4])(_?no(z|32))*")
_ASSUMED_SIZE = 224


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a VMamba; None if it is another model.

    Sizes come from the shapes; the image's, and kinds of layers that have no parameters, from the
    training script's settings. What neither says is in `assumed`, a sentence each.

    Raises:
        Missing: it is a VMamba, but parts are absent, or it has some that are not built in.
    """
    found = vision.under(checkpoint, _SIGN)
    if found is None:
        return None
    tensors = dict(_own(name, tensor) for name, tensor in found.items())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _refuse_others(checkpoint, shapes)
    first = "layers.0.blocks.0"
    stages = range(vision.count(checkpoint, tensors, "layers."))
    blocks = [f"layers.{i}.blocks.0" for i in stages]
    scans = [_shape(checkpoint, shapes, f"{block}.op.dt_projs_weight", 3) for block in blocks]
    channels, kernel = _shape(checkpoint, shapes, "patch_embed.0.weight", 4)[1:3]
    version = 2 if "patch_embed.5.weight" in shapes else 1
    filters = shapes.get(f"{first}.op.conv2d.weight", (0,))
    outer, inner = (shapes.get(f"{first}.mlp.{name}.weight", (0, 0)) for name in ("fc1", "fc2"))
    size, assumed = _image_size(checkpoint, shapes, kernel, version)
    config = vision.fitting(
        checkpoint,
        VMambaConfig,
        depths=tuple(vision.count(checkpoint, tensors, f"layers.{i}.blocks.") for i in stages),
        dims=tuple(_shape(checkpoint, shapes, f"{block}.norm.weight", 1)[0] for block in blocks),
        d_inner=tuple(scan[1] for scan in scans),
        dt_rank=tuple(scan[2] for scan in scans),
        mlp=tuple(shapes.get(f"{block}.mlp.fc2.weight", (0, 0))[1] for block in blocks),
        d_state=_shape(checkpoint, shapes, f"{first}.op.A_logs", 2)[1],
        d_conv=filters[-1],
        conv_bias=f"{first}.op.conv2d.bias" in shapes,
        gate=_shape(checkpoint, shapes, f"{first}.op.in_proj.weight", 2)[0] == 2 * scans[0][1],
        gated_mlp=inner[1] > 0 and outer[0] == 2 * inner[1],
        channels=channels,
        image_size=size,
        patch_kernel=kernel,
        patch_version=version,
        patch_norm="patch_embed.2.weight" in shapes,
        downsample=shapes.get("layers.0.downsample.1.weight", (1,))[-1],
        pos_embed="pos_embed" in shapes,
        num_classes=shapes.get("classifier.head.weight", (0,))[0],
    )
    with torch.device("meta"):
        known = VMamba(config).state_dict()
    if others := [name for name in tensors if name not in known]:
        raise Missing(
            f"{show(checkpoint.path)}: like a VMamba, but with {some(others)}, which it has not;"
            f" {OWN_CODE}"
        )
    return asdict(config) | {"assumed": [*assumed, *_settled(checkpoint)]}


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    settings = vision.parsed(VMambaConfig, config, "vmamba")
    with torch.device("meta"):
        module = VMamba(settings)
    return vision.built(
        module,
        "vmamba",
        config,
        image=(settings.channels, settings.image_size),
        classes=settings.num_classes,
        scans=sum(settings.depths),
        keeps_float32=("A_logs", "Ds", "dt_projs_bias"),
        renamed=_renamed,
    )


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names and in the shapes of the module here, prefixes kept."""
    names = unwrap(tensors)
    prefix = vision.prefix(names.values(), _SIGN) or ""
    result = {}
    for original, name in names.items():
        if name.startswith(prefix):
            own, tensor = _own(name.removeprefix(prefix), tensors[original])
            result[prefix + own] = tensor
        else:
            result[name] = tensors[original]
    return result


def _own(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor of any version's name and shape under the name and in the shape it has here."""
    for other, own in _OTHER_NAMES:
        if match := other.match(name):
            name = match.expand(own) + name[match.end() :]
            break
    if _STACKED.fullmatch(name) and tensor.dim() == 2 and len(tensor) % _WALKS == 0:
        tensor = tensor.unflatten(0, (_WALKS, -1))
    if _LINEAR.fullmatch(name) and tensor.dim() == 4 and tensor.shape[2:] == (1, 1):
        tensor = tensor.flatten(1)
    return name, tensor


def _shape(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], name: str, rank: int
) -> tuple[int, ...]:
    if name not in shapes or len(shapes[name]) != rank:
        raise Missing(
            f"{show(checkpoint.path)}: {name} is {shapes.get(name, 'absent')}, and VMamba has it in"
            f" {rank} dimensions; give the whole checkpoint"
        )
    return shapes[name]


def _refuse_others(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    other = {
        "batch norms": any(name.endswith(".running_mean") for name in shapes),
        "another scan (forward_type m0 or xv)": "layers.0.blocks.0.op.x_proj_weight" not in shapes,
        "another norm after the scan": "layers.0.blocks.0.op.out_norm.weight" not in shapes,
    }
    kind = vision.setting(checkpoint, "MODEL", "VSSM", "SSM_FORWARDTYPE")
    other[f"forward_type {show(kind, 40)}"] = (
        isinstance(kind, str) and _FORWARD_TYPES.fullmatch(kind) is None
    )
    for key, usual in _ACTIVATIONS.items():
        said = vision.setting(checkpoint, "MODEL", "VSSM", key)
        other[f"{key} {show(said, 40)}"] = said not in (None, usual)
    found = [what for what, there in other.items() if there]
    if found:
        raise Missing(
            f"{show(checkpoint.path)}: a VMamba with {' and '.join(found)}, which is not built in;"
            f" {OWN_CODE}"
        )


_ACTIVATIONS = {"SSM_ACT_LAYER": "silu", "MLP_ACT_LAYER": "gelu"}


def _settled(checkpoint: Checkpoint) -> list[str]:
    """What the public models have in common, where the settings do not say it."""
    if vision.setting(checkpoint, "MODEL", "VSSM", "SSM_FORWARDTYPE") is not None:
        return []
    return ["walks by rows and columns, SiLU in scans and GELU elsewhere, as in all public VMambas"]


def _image_size(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], kernel: int, version: int
) -> tuple[int, list[str]]:
    patch = kernel if version == 1 else (kernel - 1) ** 2
    if "pos_embed" in shapes:
        return _shape(checkpoint, shapes, "pos_embed", 4)[-1] * patch, []
    size = vision.setting(checkpoint, "DATA", "IMG_SIZE")
    if type(size) is int and size > 0:
        return size, []
    return _ASSUMED_SIZE, [f"images are of {_ASSUMED_SIZE}×{_ASSUMED_SIZE}"]
