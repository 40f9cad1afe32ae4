"""The rotary embedding: what transformers compute, both pairings, gradients, public forms."""

import pytest
import torch
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from fuseport.ops.rotary_embedding import rotary_embedding


def angles(length: int, pairs: int) -> torch.Tensor:
    frequencies = 1e4 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def test_halves_are_turned_as_in_llama() -> None:
    q, k = (torch.randn(2, 3, 7, 16, dtype=torch.float64) for _ in range(2))
    table = torch.cat([angles(7, 8)] * 2, -1)[None]
    expected = llama.apply_rotary_pos_emb(q, k, table.cos(), table.sin())
    cos, sin = table.cos()[..., :8], table.sin()[..., :8]
    for x, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotary_embedding(x, cos, sin), wanted)
        torch.testing.assert_close(rotary_embedding(x, cos[0], sin[0]), wanted)
        each = cos.expand(2, 7, 8), sin.expand(2, 7, 8)
        torch.testing.assert_close(rotary_embedding(x, *each), wanted)


def test_neighbours_are_turned_as_in_gptj() -> None:
    x = torch.randn(2, 3, 7, 16, dtype=torch.float64)
    cos, sin = angles(7, 8).cos(), angles(7, 8).sin()
    # GPT-J has (b, l, h, p), and (b, l, p/2).
    expected = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    torch.testing.assert_close(rotary_embedding(x, cos, sin, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_multiplied_by_complex_numbers_and_the_rest_stays(interleaved: bool) -> None:
    x, theta = torch.randn(2, 3, 5, 11, dtype=torch.float64), angles(5, 3)
    out = rotary_embedding(x, theta.cos(), theta.sin(), interleaved)
    for i in range(3):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
        turned = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * theta[:, i])
        torch.testing.assert_close(out[..., a], turned.real)
        torch.testing.assert_close(out[..., b], turned.imag)
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_of_half_types_results_are_rounded_once() -> None:
    x, theta = torch.randn(2, 3, 5, 8).bfloat16(), angles(5, 4).float()
    out = rotary_embedding(x, theta.cos(), theta.sin())
    exact = rotary_embedding(x.float(), theta.cos(), theta.sin())
    assert torch.equal(out, exact.bfloat16())


def test_a_gradient_reaches_angles_that_batches_and_heads_share() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    theta = angles(4, 3).requires_grad_()

    def turned(theta: torch.Tensor) -> torch.Tensor:
        return rotary_embedding(x, theta.cos()[None], theta.sin()[None], interleaved=True)

    assert torch.autograd.gradcheck(turned, (theta,))


def test_tables_that_do_not_fit_are_named() -> None:
    x, table = torch.randn(2, 3, 5, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match="cos must be of r/2 <= 8/2; got 8"):
        rotary_embedding(x, table, table)
    with pytest.raises(ValueError, match=r"cos must be \(b, l, r/2\) = \(2, 5, 4\)"):
        rotary_embedding(x, torch.randn(3, 5, 4), torch.randn(3, 5, 4))
    with pytest.raises(ValueError, match="sin must be cos's shape"):
        rotary_embedding(x, torch.randn(5, 4), torch.randn(1, 5, 4))
