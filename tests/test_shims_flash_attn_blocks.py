"""Blocks and embeddings of the stand-in for flash_attn, by their definitions; and an export."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.tests.by_stand_ins import verified
from fuseport.tests.test_shims_values import close, rand

with shims.installed(shims.SHIMS):
    from flash_attn.modules import block, embedding
    from flash_attn.modules.mha import MHA
    from flash_attn.modules.mlp import Mlp
    from flash_attn.ops.triton.layer_norm import RMSNorm
    from flash_attn.utils import distributed

NORMS = {"layer norm": nn.LayerNorm, "RMS norm": partial(RMSNorm, eps=1e-5)}


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def with_input(width: int) -> nn.Module:
    return Mlp(width, width, return_residual=True)


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64, its norms with weights of their own."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fused", [False, True])
def test_norms_before_layers(fused: bool, norm: str) -> None:
    options: dict[str, Any] = {"norm_cls": NORMS[norm], "fused_dropout_add_ln": fused}
    made = drawn(block.Block(8, linear, linear, drop_path1=0.5, **options)).eval()
    x, residual = rand(2, 5, 8), rand(2, 5, 8)
    out, total = made(x, residual)
    first = made.mixer(made.norm1(x + residual))
    close(total, x + residual + first)
    close(out, made.mlp(made.norm2(total)))
    _, total = made(x)
    close(total, x + made.mixer(made.norm1(x)))
    alone = drawn(block.Block(8, linear, nn.Identity, residual_in_fp32=True, **options))
    assert [name for name, _ in alone.named_children()] == [
        "mixer",
        "dropout1",
        "drop_path1",
        "norm1",
        "mlp",
    ]
    out, total = alone.to(torch.bfloat16)(x.bfloat16())
    assert total.dtype == torch.float32
    close(out, alone.mixer(alone.norm1(x.bfloat16())), 2e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer", [linear, with_input])
def test_norms_after_layers(layer: Callable[[int], nn.Module], fused: bool) -> None:
    pairs = layer is with_input
    options: dict[str, Any] = {"prenorm": False, "return_residual": pairs}
    made = drawn(block.Block(8, layer, layer, fused_dropout_add_ln=fused, **options))
    x = rand(2, 5, 8)

    def of(inner: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = inner(x)[0] if pairs else inner(x)
        return found

    between = made.norm1(of(made.mixer, x) + x)
    close(made(x), made.norm2(of(made.mlp, between) + between))
    with pytest.raises(ValueError, match="no residual stream"):
        made(x, x)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_layers_side_by_side(tied: bool, fused: bool) -> None:
    made = drawn(block.ParallelBlock(8, linear, linear, tied_norm=tied, fused_dropout_add_ln=fused))
    assert hasattr(made, "norm2") != tied
    x, y, residual = rand(2, 5, 8), rand(2, 5, 8), rand(2, 5, 8)
    second = made.norm1 if tied else made.norm2
    for given, expected in (((x, y, residual), x + y + residual), ((x,), x), ((x, y), x + y)):
        one, two, total = made(*given)
        close(total, expected)
        close(one, made.mixer(made.norm1(expected)))
        close(two, made.mlp(second(expected)))


@pytest.mark.parametrize("fused", [False, True])
def test_in_training_items_of_a_batch_add_nothing(fused: bool) -> None:
    torch.manual_seed(0)
    options = {"drop_path1": 0.25, "fused_dropout_add_ln": fused}
    made = drawn(block.Block(8, linear, nn.Identity, **options)).train()
    x = rand(400, 3, 8)
    _, total = made(x)
    stays = (total != 0).all(2)
    assert (stays == stays[:, :1]).all()
    assert 0.65 < stays[:, 0].double().mean() < 0.85
    close(total[stays], x[stays] / 0.75)


def test_what_the_layers_are_asked() -> None:
    made = drawn(block.Block(8, partial(MHA, num_heads=2, cross_attn=True), linear))
    x, kv = rand(2, 5, 8), rand(2, 4, 8)
    out, total = made(x, mixer_subset=slice(0, 1), mixer_kwargs={"x_kv": kv})
    close(total, x[:, :1] + made.mixer(made.norm1(x)[:, :1], kv))
    close(out, made.mlp(made.norm2(total)))
    usual = block.Block(128)
    assert usual.mixer.num_heads == 2
    assert usual.mlp.fc1.out_features == 512
    with pytest.raises(NotImplementedError, match="does not decode"):
        usual.allocate_inference_cache(1, 8)
    with pytest.raises(ValueError, match="residual_in_fp32 needs prenorm"):
        block.Block(8, linear, linear, prenorm=False, residual_in_fp32=True)
    with pytest.raises(ValueError, match="takes LayerNorm or RMSNorm"):
        block.ParallelBlock(8, linear, linear, nn.RMSNorm, fused_dropout_add_ln=True)


def test_embeddings_are_sums() -> None:
    ids, places = torch.tensor([[3, 0, 7], [1, 1, 2]]), torch.tensor([[2, 1, 0], [4, 4, 4]])
    words = embedding.GPT2Embeddings(6, 8, 5, word_embed_proj_dim=4)
    expected = F.linear(words.word_embeddings(ids), words.project_in.weight)
    close(words(ids), expected + words.position_embeddings.weight[:3])
    close(words(ids, places), expected + words.position_embeddings(places))
    plain = embedding.GPT2Embeddings(6, 8, 0)
    assert list(plain.state_dict()) == ["word_embeddings.weight"]
    close(plain(ids), plain.word_embeddings(ids))
    bert = embedding.BertEmbeddings(6, 8, 5, 2)
    kinds = torch.tensor([[0, 1, 1], [1, 0, 0]])
    expected = bert.word_embeddings(ids) + bert.position_embeddings.weight[:3]
    close(bert(ids), expected + bert.token_type_embeddings.weight[0])
    close(bert(ids, token_type_ids=kinds), expected + bert.token_type_embeddings(kinds))
    close(embedding.ColumnParallelEmbedding(8, 6).eval()(ids).shape, torch.Size([2, 3, 6]))
    for made in (
        partial(embedding.VocabParallelEmbedding, 8, 6, process_group=object()),
        partial(embedding.ParallelGPT2Embeddings, 6, 8, 5, object()),
        partial(distributed.all_gather_raw, ids, None),
    ):
        with pytest.raises(NotImplementedError, match="no program is of several devices"):
            made()


def test_what_each_of_several_devices_has() -> None:
    split = [distributed.get_dim_for_local_rank(40, 3, rank, 8) for rank in range(3)]
    assert split == [16, 16, 8]


# As the language models of Hyena and H3: a layer of their own between blocks.
CODE = """
import torch
from functools import partial
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.utils.distributed import all_gather_raw, sync_shared_params
from flash_attn.utils.generation import GenerationMixin
from torch import nn


class Long(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decays = nn.Parameter(torch.linspace(0.1, 2.0, width))

    def forward(self, x, **kwargs):
        steps = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        kernel = torch.fft.rfft(torch.exp(-self.decays[:, None] * steps), n=2 * x.shape[1])
        y = torch.fft.irfft(torch.fft.rfft(x.mT, n=2 * x.shape[1]) * kernel, n=2 * x.shape[1])
        return y[..., : x.shape[1]].mT


class Net(nn.Module, GenerationMixin):
    def __init__(self):
        super().__init__()
        self.embeddings = GPT2Embeddings(16, 12, 40)
        mixers = [Long, partial(MHA, num_heads=2, causal=True, use_flash_attn=True)]
        self.layers = nn.ModuleList(
            Block(16, mixer, partial(Mlp, hidden_features=20), fused_dropout_add_ln=fused,
                  residual_in_fp32=True)
            for mixer, fused in zip(mixers, (True, False))
        )
        self.out = nn.Linear(16, 3)

    def forward(self, ids):
        x, residual = self.embeddings(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.out(x + residual)
"""


def test_a_model_of_blocks_is_exported(
    tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    with shims.installed(shims.SHIMS):
        _, checkpoint, model = saved_net(CODE)
    inputs = ["ids:int64[batch,length]<12"]
    verified(tmp_path / "b", (checkpoint, model), inputs, ["flash_attn"])
