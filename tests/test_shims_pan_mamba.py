"""Mamba's layer of Pan-Mamba's fork, whose v3 scans another sequence beside its own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport import shims
from fuseport.exporter import api
from fuseport.exporter.models import weights
from fuseport.tests.test_shims_values import block_of, close, rand

with shims.installed("mamba_ssm"):
    from mamba_ssm import Mamba

CODE = """
from torch import nn
from mamba_ssm.modules.mamba_simple import Mamba

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.alone = Mamba(6, 4, bimamba_type=None)
        self.cross = Mamba(6, 4, bimamba_type="v3")

    def forward(self, x, y):
        return self.cross(self.alone(x), extra_emb=y)
"""


def names_of_the_fork(layer: nn.Module, width: int) -> dict[str, torch.Tensor]:
    """Weights of a v3 as that fork has them."""
    generator = torch.Generator().manual_seed(9)
    kept = {name: value for name, value in layer.state_dict().items() if "_s" not in name}
    return {
        name: torch.randn(value.shape, generator=generator) / 3
        for name, value in (kept | {"in_proj_extra.weight": torch.empty(24, width)}).items()
    }


@pytest.mark.parametrize("mean_of", [1, 2])
def test_it_scans_both_sequences_forward(mean_of: int) -> None:
    layer = Mamba(6, 4, bimamba_type="v3", if_divide_out=mean_of == 2)
    weights.fit(layer, names_of_the_fork(layer, 6), "cross.pth")
    layer = layer.double()
    x, y = rand(2, 5, 6), rand(2, 5, 6)
    out = block_of(layer, "", layer.in_proj(x).mT)
    out = (out + block_of(layer, "_b", layer.in_proj_extra(y).mT)) / mean_of
    close(layer(x, extra_emb=y), layer.out_proj(out.mT))
    with pytest.raises(NotImplementedError, match="takes extra_emb if"):
        layer(x)


@pytest.mark.parametrize("kind", [None, "v2", "v3"])
def test_other_layers_take_one_sequence(kind: str | None) -> None:
    layer = Mamba(6, 4, bimamba_type=kind)
    given = {name: value.clone() for name, value in layer.state_dict().items()}
    weights.fit(layer, given, "layer.pth")
    assert layer.state_dict().keys() == given.keys()
    with pytest.raises(NotImplementedError, match="takes extra_emb if"):
        layer(torch.zeros(1, 5, 6), extra_emb=torch.zeros(1, 5, 6))


def test_a_model_of_it_is_exported_and_verified(
    saved_with: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    checkpoint, code = saved_with(CODE)
    own = {f"alone.{name}": value for name, value in Mamba(6, 4).state_dict().items()}
    cross = names_of_the_fork(Mamba(6, 4, bimamba_type="v3"), 6)
    torch.save(own | {f"cross.{name}": value for name, value in cross.items()}, checkpoint)
    inputs = ["x:[batch,length,6]", "y:[batch,length,6]"]
    options = {"model": code, "inputs": inputs, "format": "torchscript", "shim": "auto"}
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    report = api.verify(bundle.folder, model=code, runtime=["eager", "torchscript"])
    assert report.exit_code(strict=True) == 0, report.failures()
