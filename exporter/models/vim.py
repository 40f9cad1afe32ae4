"""Vision Mamba: patches of an image as a sequence, scanned in both directions, and a class token.

Architecture and parameter names are those of github.com/hustvl/Vim (Zhu et al., 2024), whose blocks
are of its own fork of `mamba_ssm` (`bimamba_type` "v2"); the code is our own. b batch, l tokens,
D = d_inner channels, N = d_state, W = d_conv, R = dt_rank. Activations stay (b, l, channels) in
memory; ops get transposed views of them.
"""

import re
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
from fuseport.exporter.models.weights import unwrap
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.selective_scan import selective_scan

__all__ = ["SIGNS", "Vim", "VimConfig", "model", "recognise"]

SIGNS = (
    "*patch_embed.proj.weight",
    "*layers.*.mixer.A_b_log",
    "*layers.*.mixer.conv1d_b.weight",
    "*pos_embed",
    "*cls_token*",
)

# No shape tells it, and no public model has another.
_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class VimConfig:
    """What models differ in.

    Attributes:
        embed_dim: width of the residual stream.
        depth: blocks, each with two scans.
        d_state: N, states per channel.
        d_conv: W, the causal filters' width.
        d_inner: D, channels of the scans.
        dt_rank: R, the step sizes' inner width.
        channels: of the image.
        image_size: its height and width.
        patch_size: height and width of a patch.
        stride: from patch to patch.
        class_tokens: 1 in the middle of the sequence, 2 at its ends, 0 for none: then the mean of
            all tokens is taken.
        num_classes: of the head; 0 without one.
        pos_embed: there are learned positions.
        rms_norm: RMSNorm; LayerNorm otherwise.
        conv_bias: the causal filters have a bias.
        proj_bias: in_proj and out_proj have one.
        layer_scale: what a block adds is scaled, channel by channel.

    Raises:
        ValueError: a value makes no sense.
    """

    embed_dim: int
    depth: int
    d_state: int
    d_conv: int
    d_inner: int
    dt_rank: int
    channels: int
    image_size: int
    patch_size: int
    stride: int
    class_tokens: int
    num_classes: int
    pos_embed: bool = True
    rms_norm: bool = True
    conv_bias: bool = True
    proj_bias: bool = False
    layer_scale: bool = False

    def __post_init__(self) -> None:
        vision.require_sizes(self, optional=("class_tokens", "num_classes"))
        if self.class_tokens > 2 or self.patch_size > self.image_size:
            raise ValueError(f"{self.class_tokens} class tokens, image_size {self.image_size}")

    @property
    def grid(self) -> int:
        """Patches in each row and column."""
        return (self.image_size - self.patch_size) // self.stride + 1


class Vim(nn.Module):
    """Vision Mamba with the public code's parameter names."""

    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.patch_embed = _PatchEmbed(config)
        for name in _class_tokens(config.class_tokens):
            self.register_parameter(name, _token(1, width))
        self.pos_embed = (
            _token(config.grid**2 + config.class_tokens, width) if config.pos_embed else None
        )
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.norm_f = _Norm(config)
        self.head = nn.Linear(width, config.num_classes) if config.num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of classes, or without a head the features.

        Args:
            x: (b, channels, image_size, image_size), of any floating dtype.

        Returns:
            (b, num_classes), or (b, embed_dim), in the weights' dtype.
        """
        dtype = self.patch_embed.proj.weight.dtype
        tokens = self._with_class_tokens(self.patch_embed(cast(x, dtype)))
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        residual = wide(tokens)
        for layer in self.layers:
            residual = residual + layer(residual)
        result: Tensor = self.head(cast(self._pooled(residual), dtype))
        return result

    def _with_class_tokens(self, patches: Tensor) -> Tensor:
        batch, count = patches.shape[:2]
        tokens = [
            getattr(self, name).expand(batch, 1, -1)
            for name in _class_tokens(self.config.class_tokens)
        ]
        if len(tokens) == 1:
            middle = count // 2
            return torch.cat([patches[:, :middle], tokens[0], patches[:, middle:]], dim=1)
        return torch.cat([tokens[0], patches, tokens[1]], dim=1) if tokens else patches

    def _pooled(self, residual: Tensor) -> Tensor:
        """The norm is of each token by itself, so only those that count go through it."""
        if self.config.class_tokens == 1:
            pooled: Tensor = self.norm_f(residual[:, self.config.grid**2 // 2])
        elif self.config.class_tokens == 2:
            pooled = (self.norm_f(residual[:, 0]) + self.norm_f(residual[:, -1])) / 2
        else:
            pooled = self.norm_f(residual).mean(1)
        return pooled


class _PatchEmbed(nn.Module):
    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            config.channels, config.embed_dim, config.patch_size, stride=config.stride
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, channels, H, W) → (b, patches, embed_dim), by rows."""
        patches: Tensor = self.proj(x).flatten(2).mT
        return patches


class _Block(nn.Module):
    """What a block adds to the residual stream."""

    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        self.mixer = _Mixer(config)
        self.norm = _Norm(config)

    def forward(self, residual: Tensor) -> Tensor:
        dtype = self.mixer.in_proj.weight.dtype
        added: Tensor = self.mixer(cast(self.norm(residual), dtype))
        return added


class _Mixer(nn.Module):
    """Two scans, of the sequence and of its reverse, with one projection in and out."""

    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        D, N, R = config.d_inner, config.d_state, config.dt_rank
        self.in_proj = nn.Linear(config.embed_dim, 2 * D, bias=config.proj_bias)
        self.out_proj = nn.Linear(D, config.embed_dim, bias=config.proj_bias)
        self.gamma = nn.Parameter(torch.ones(config.embed_dim)) if config.layer_scale else None
        for end in ("", "_b"):
            conv = nn.Conv1d(D, D, config.d_conv, groups=D, bias=config.conv_bias)
            self.add_module(f"conv1d{end}", conv)
            self.add_module(f"x_proj{end}", nn.Linear(D, R + 2 * N, bias=False))
            self.add_module(f"dt_proj{end}", nn.Linear(R, D))
            A_log = nn.Parameter(torch.arange(1.0, N + 1).log().repeat(D, 1))
            self.register_parameter(f"A{end}_log", A_log)
            self.register_parameter(f"D{end}", nn.Parameter(torch.ones(D)))

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, embed_dim) → (b, l, embed_dim)."""
        xz = self.in_proj(x)
        both = self._scanned(xz, "") + self._scanned(xz.flip(1), "_b").flip(1)
        out: Tensor = self.out_proj(both / 2)
        return out if self.gamma is None else out * self.gamma

    def _scanned(self, xz: Tensor, end: str) -> Tensor:
        """One direction: (b, l, 2D) → (b, l, D)."""
        conv, dt_proj = getattr(self, f"conv1d{end}"), getattr(self, f"dt_proj{end}")
        A_log = getattr(self, f"A{end}_log")
        N, R = A_log.shape[1], dt_proj.in_features
        u, z = xz.chunk(2, dim=-1)
        u = causal_conv1d(u.mT, conv.weight.squeeze(1), conv.bias, activation="silu")
        low_rank, B, C = getattr(self, f"x_proj{end}")(u.mT).split([R, N, N], dim=-1)
        y = selective_scan(
            u,
            F.linear(low_rank, dt_proj.weight).mT,
            -torch.exp(wide(A_log)),
            B.mT,
            C.mT,
            wide(getattr(self, f"D{end}")),
            z.mT,
            wide(dt_proj.bias),
            delta_softplus=True,
        )
        return y.mT


class _Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, of each token; computed in float32 at least."""

    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.embed_dim))
        self.bias = None if config.rms_norm else nn.Parameter(torch.zeros(config.embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = wide(x), wide(self.weight)
        if self.bias is None:
            return rms_norm(x, weight, _EPSILON)
        return F.layer_norm(x, weight.shape, weight, wide(self.bias), _EPSILON)


def _class_tokens(number: int) -> tuple[str, ...]:
    return ((), ("cls_token",), ("cls_token_head", "cls_token_tail"))[number]


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, count, width))


# --- what the exporter asks of an architecture ---------------------------------------------------

_SIGN = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.\d+\.mixer\.A_b_log")
_COMMON_SIZES = (224, 384)


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The configuration, as JSON data, of a Vision Mamba; None if it is another model.

    Sizes come from the shapes, the image's from the positions and the training script's
    `input_size`. What neither says is in `assumed`, a sentence each.

    Raises:
        Missing: it is Vim, but layers are absent, or it has parts that are not built in.
    """
    tensors = vision.under(checkpoint, _SIGN)
    if tensors is None or "patch_embed.proj.weight" not in tensors:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(shapes["patch_embed.proj.weight"]) != 4:
        return None  # VideoMamba: its patches are of several frames
    mixer = "layers.0.mixer"
    depth = vision.count(checkpoint, tensors, "layers.")
    _refuse_others(checkpoint, shapes)
    parts = ("A_log", "conv1d.weight", "dt_proj.weight")
    match [shapes.get(f"{mixer}.{part}") for part in parts]:
        case [(d_inner, d_state), (_, 1, d_conv), (_, dt_rank)]:
            pass
        case _:
            names = ", ".join(f"{mixer}.{part}" for part in parts)
            raise Missing(
                f"{show(checkpoint.path)}: {names}: absent, or not of the shapes that Vision Mamba"
                " has; give the whole checkpoint"
            )
    assumed = ["the two directions of a block are averaged (if_divide_out), as in all public Vims"]
    tokens = next(n for n in (2, 1, 0) if all(t in shapes for t in _class_tokens(n)))
    if tokens == 1:
        assumed.append("the class token is in the middle of the sequence (use_middle_cls_token)")
    if tokens == 0:
        assumed.append("the mean of all tokens is taken (final_pool_type)")
    embed_dim, channels, patch_size, _ = shapes["patch_embed.proj.weight"]
    image_size, stride, said = _image(checkpoint, shapes, patch_size, tokens)
    config = vision.fitting(
        checkpoint,
        VimConfig,
        embed_dim=embed_dim,
        depth=depth,
        d_state=d_state,
        d_conv=d_conv,
        d_inner=d_inner,
        dt_rank=dt_rank,
        channels=channels,
        image_size=image_size,
        patch_size=patch_size,
        stride=stride,
        class_tokens=tokens,
        num_classes=shapes.get("head.weight", (0,))[0],
        pos_embed="pos_embed" in shapes,
        rms_norm="norm_f.bias" not in shapes,
        conv_bias=f"{mixer}.conv1d.bias" in shapes,
        proj_bias=f"{mixer}.in_proj.bias" in shapes,
        layer_scale=f"{mixer}.gamma" in shapes,
    )
    return asdict(config) | {"assumed": [*assumed, *said]}


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration from `recognise`, its weights on the meta device until set.

    Raises:
        CorruptInput: a key is absent, or a value makes no sense.
    """
    settings = vision.parsed(VimConfig, config, "vim")
    with torch.device("meta"):
        module = Vim(settings)
    return vision.built(
        module,
        "vim",
        config,
        image=(settings.channels, settings.image_size),
        classes=settings.num_classes,
        scans=2 * settings.depth,
        keeps_float32=("A_log", ".D", "dt_proj.bias", "A_b_log", ".D_b", "dt_proj_b.bias"),
        renamed=_renamed,
    )


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[original] for original, name in unwrap(tensors).items()}


def _refuse_others(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    other = {
        "rotary positions (if_rope)": any(name.startswith("rope.") for name in shapes),
        "blocks of bimamba v1": "layers.0.mixer.conv1d_b.weight" not in shapes,
        "a norm of patches": "patch_embed.norm.weight" in shapes,
    }
    found = [what for what, there in other.items() if there]
    if found:
        raise Missing(
            f"{show(checkpoint.path)}: a Vision Mamba with {' and '.join(found)}, which is not"
            f" built in; {OWN_CODE}"
        )


def _image(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], patch: int, tokens: int
) -> tuple[int, int, list[str]]:
    """Its size, the stride of patches, and what of these was assumed.

    Positions tell the number of patches; one of size and stride then tells the other. Patches are
    square, and so are images.
    """
    size = vision.setting(checkpoint, "input_size")
    known = type(size) is int and size >= patch
    if "pos_embed" not in shapes:
        said = "" if known else "images are of 224×224, and "
        return (size if known else 224), patch, [f"{said}patches do not overlap"]
    patches = shapes["pos_embed"][1] - tokens if len(shapes["pos_embed"]) == 3 else -1
    grid = int(max(patches, 0) ** 0.5)
    if grid < 1 or grid**2 != patches:
        raise Missing(
            f"{show(checkpoint.path)}: pos_embed: it is {shapes['pos_embed']}: without"
            f" {tokens} class tokens that is no square of patches, and other images are not built"
            f" in; {OWN_CODE}"
        )
    if grid == 1:
        return patch, patch, []
    for whole in [size] if known else _COMMON_SIZES:
        stride = (whole - patch) // (grid - 1)
        if 1 <= stride <= patch and (whole - patch) // stride + 1 == grid:
            if known:
                return whole, stride, []
            return whole, stride, [f"images are of {whole}×{whole}, patches {stride} pixels apart"]
    whole = grid * patch
    return whole, patch, [f"images are of {whole}×{whole}: patches do not overlap"]
