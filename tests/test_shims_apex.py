"""The stand-in for apex by the definitions of its norms, values and gradients; and an export."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    import fused_layer_norm_cuda
    from apex import amp, normalization, optimizers, parallel
    from apex.contrib.layer_norm import FastLayerNorm
    from apex.normalization import fused_layer_norm as functions

EPS = 0.1


def normal(x: Tensor, dims: int, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x over its last dimensions, with the mean and the reciprocal deviation of each row."""
    axes = [*range(-dims, 0)]
    mean = sum_over(x, axes) if centred else torch.zeros(()).double()
    spread = sum_over((x - mean) ** 2, axes)
    return (x - mean) / (spread + EPS).sqrt(), mean, 1 / (spread + EPS).sqrt()


def sum_over(x: Tensor, axes: list[int]) -> Tensor:
    count = torch.tensor([x.shape[axis] for axis in axes]).prod()
    return x.sum(axes, keepdim=True) / count


def same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    """Values, and gradients of `leaves`."""
    close(found, expected)
    cotangent = rand(*expected.shape)
    pair = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (found, expected)]
    for one, other in zip(*pair, strict=True):
        close(one, other)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "name", ["FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"]
)
def test_a_norm_by_its_definition(name: str, shape: tuple[int, ...]) -> None:
    layer = getattr(normalization, name)(shape, eps=EPS).double()
    centred = "Layer" in name
    assert list(layer.state_dict()) == (["weight", "bias"] if centred else ["weight"])
    assert (layer.weight == 1).all()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = rand(4, 5, *shape).requires_grad_()
    expected = normal(x, len(shape), centred)[0] * layer.weight
    if centred:
        expected = expected + layer.bias
    same(layer(x), expected, [x, *layer.parameters()])
    if name.startswith("Mixed"):
        with pytest.raises(RuntimeError, match="has a weight"):
            getattr(normalization, name)(shape, elementwise_affine=False)
    else:
        plain = getattr(normalization, name)(shape, EPS, elementwise_affine=False)
        same(plain(x), normal(x, len(shape), centred)[0], [x])
    assert getattr(normalization, name)(6).normalized_shape == (6,)


def test_functions_are_the_layers() -> None:
    x, weight, bias = rand(4, 6), rand(6), rand(6)
    centred, plain = normal(x, 1, True)[0], normal(x, 1, False)[0]
    close(functions.fused_layer_norm_affine(x, weight, bias, 6, EPS), centred * weight + bias)
    close(
        functions.FusedLayerNormAffineFunction.apply(x, weight, bias, (6,), EPS),
        centred * weight + bias,
    )
    close(functions.FusedLayerNormFunction.apply(x, (6,), EPS), centred)
    close(functions.FusedRMSNormAffineFunction.apply(x, weight, (6,), EPS), plain * weight)
    close(functions.FusedRMSNormFunction.apply(x, (6,), EPS), plain)
    close(functions.manual_rms_norm(x, (6,), None, EPS), plain)
    layer = FastLayerNorm(6, EPS).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    close(layer(x), centred * layer.weight + layer.bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_have_the_dtype_of_the_input_or_of_the_weight(dtype: torch.dtype) -> None:
    x, weight, bias = rand(4, 6).to(dtype), rand(6).float(), rand(6).float()
    wide, eps = x.double(), 4 * torch.finfo(dtype).eps
    for centred, shift, name in ((True, [bias], "layer"), (False, [], "rms")):
        expected = normal(wide, 1, centred)[0] * weight + (bias if centred else 0.0)
        for mixed, of in (("", dtype), ("mixed_dtype_", torch.float32)):
            out = getattr(functions, f"{mixed}fused_{name}_norm_affine")(
                x, weight, *shift, (6,), EPS
            )
            assert out.dtype == of
            close(out.double(), expected, 1e-6 if mixed else eps)
        plain = getattr(functions, f"fused_{name}_norm")(x, (6,), EPS)
        assert plain.dtype == dtype
        close(plain.double(), normal(wide, 1, centred)[0], eps)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_the_extension_forward_and_backward(shape: tuple[int, ...]) -> None:
    ext, dims = fused_layer_norm_cuda, len(shape)
    x, weight, bias = (rand(*of).requires_grad_() for of in ((4, 5, *shape), shape, shape))
    centred, mean, reciprocal = normal(x, dims, True)
    cotangent = rand(*x.shape)
    for out, mean_, reciprocal_ in (
        ext.forward_affine(x, shape, weight, bias, EPS),
        ext.forward_affine_mixed_dtypes(x, shape, weight, bias, EPS),
    ):
        close(out, centred * weight + bias)
        close(mean_, mean.flatten())
        close(reciprocal_, reciprocal.flatten())
    leaves = [x, weight, bias]
    expected = torch.autograd.grad(centred * weight + bias, leaves, cotangent, retain_graph=True)
    found = ext.backward_affine(cotangent, mean_, reciprocal_, x, shape, weight, bias, EPS)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    out, mean_, reciprocal_ = ext.forward(x, shape, EPS)
    close(out, centred)
    (dx,) = torch.autograd.grad(centred, x, cotangent)
    close(ext.backward(cotangent, mean_, reciprocal_, x, shape, EPS, False), dx)

    plain, _, reciprocal = normal(x, dims, False)
    for out, reciprocal_ in (
        ext.rms_forward_affine(x, shape, weight, EPS),
        ext.rms_forward_affine_mixed_dtypes(x, shape, weight, EPS),
    ):
        close(out, plain * weight)
        close(reciprocal_, reciprocal.flatten())
    expected = torch.autograd.grad(plain * weight, [x, weight], cotangent, retain_graph=True)
    found = ext.rms_backward_affine(cotangent, reciprocal_, x, shape, weight, EPS)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    out, reciprocal_ = ext.rms_forward(x, shape, EPS)
    close(out, plain)
    (dx,) = torch.autograd.grad(plain, x, cotangent)
    close(ext.rms_backward(cotangent, reciprocal_, x, shape, EPS), dx)
    with pytest.raises(NotImplementedError, match="without memory_efficient"):
        ext.rms_backward(cotangent, reciprocal_, x, shape, EPS, True)


def test_what_only_trains_is_importable_and_refuses() -> None:
    def function() -> None:
        pass

    assert amp.float_function(function) is amp.half_function(function) is function
    amp.register_half_function(torch, "matmul")
    calls: list[Callable[[], Any]] = [
        amp.initialize,
        amp.scale_loss,
        optimizers.FusedAdam,
        parallel.DistributedDataParallel,
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="training script"):
            call()


def test_batch_norms_of_several_processes_are_torchs() -> None:
    x = rand(4, 5, 3)
    net = nn.Sequential(nn.BatchNorm1d(5), nn.InstanceNorm1d(5), nn.Sequential(nn.BatchNorm1d(5)))
    net = net.double()
    nn.init.normal_(net[0].weight)
    net(x)
    expected = net.eval()(x)
    made = parallel.convert_syncbn_model(net)
    assert [type(part) for part in made][:2] == [parallel.SyncBatchNorm, nn.InstanceNorm1d]
    assert isinstance(made[2][0], parallel.SyncBatchNorm)
    close(made(x), expected)
    last = parallel.SyncBatchNorm(5, channel_last=True, fuse_relu=True).double().eval()
    expected = ((x.mT + 1.0) / (1 + 1e-5) ** 0.5 - 1.0).relu()
    last.running_mean.fill_(-1.0)
    close(last(x.mT, -torch.ones(1)), expected)


CODE = """
import importlib
import torch
from torch import nn
from apex import amp
from apex.contrib.layer_norm import FastLayerNorm
from apex.normalization import FusedLayerNorm, MixedFusedRMSNorm
from apex.parallel import SyncBatchNorm

fused_layer_norm_cuda = importlib.import_module("fused_layer_norm_cuda")


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        shape = weight.shape
        out, mean, invvar = fused_layer_norm_cuda.forward_affine(x, shape, weight, bias, 1e-5)
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        return out

    @staticmethod
    def backward(ctx, dout):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        return tuple(fused_layer_norm_cuda.backward_affine(
            dout.contiguous(), mean, invvar, x, weight.shape, weight, bias, 1e-5
        ))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = FusedLayerNorm(6)
        self.second = MixedFusedRMSNorm(6)
        self.third = FastLayerNorm(6)
        self.channels = SyncBatchNorm(6, channel_last=True)

    @amp.float_function
    def forward(self, x):
        x = self.second(self.first(x)) + self.third(x)
        return Norm.apply(self.channels(x), self.first.weight, self.first.bias)
"""


def test_a_model_that_imports_apex_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {
        "first": normalization.FusedLayerNorm(6),
        "second": normalization.MixedFusedRMSNorm(6),
        "third": FastLayerNorm(6),
        "channels": parallel.SyncBatchNorm(6),
    }
    checkpoint, model = saved_with(CODE, **parts)
    bundle, _ = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,length,6]"],
        ["apex", "fused_layer_norm_cuda"],
    )
    assert "fuseport::rms_norm" in bundle.manifest["ops"]
