"""Statements of model code, with places for what they take, of which random models are made.

They stand by what they give: a float, integers, or booleans. `$a`, `$b` are floats that are there,
`$i` integers, `$m` booleans, `$n` a size, `$d` a dimension of `$a`, `$k` a small number.
"""

__all__ = ["BOOLEANS", "BUFFERS", "FLOATS", "INTEGERS", "LAYERS", "PARAMETERS"]

# What a model is built of, where a statement names it.
LAYERS = {
    "linear": "nn.Linear(6, 6)",
    "narrow": "nn.Linear(6, 3, bias=False)",
    "conv": "nn.Conv1d(6, 6, 3, padding=1)",
    "causal": "nn.Conv1d(6, 6, 4, padding=3, groups=6)",
    "strided": "nn.Conv1d(6, 12, 3, stride=2, padding=1)",
    "up": "nn.ConvTranspose1d(6, 6, 4, 2, 1)",
    "conv2": "nn.Conv2d(1, 2, 3, padding=1)",
    "norm": "nn.LayerNorm(6)",
    "groups": "nn.GroupNorm(2, 6)",
    "instance": "nn.InstanceNorm1d(6, affine=True)",
    "batch": "nn.BatchNorm1d(6)",
    "rms": "nn.RMSNorm(6)",
    "embedding": "nn.Embedding(11, 6)",
    "attention": "nn.MultiheadAttention(6, 2, batch_first=True)",
    "gru": "nn.GRU(6, 6, batch_first=True)",
    "lstm": "nn.LSTM(6, 3, batch_first=True, bidirectional=True)",
    "bilinear": "nn.Bilinear(6, 6, 4)",
    "prelu": "nn.PReLU(1)",
    "dilated": "nn.Conv1d(6, 6, 3, padding=2, dilation=2, padding_mode='reflect')",
    "grouped": "nn.Conv1d(6, 4, 1, groups=2)",
    "plane": "nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(1, 0))",
    "wider": "nn.ConvTranspose2d(1, 2, 3, (2, 1), 1, (1, 0))",
    "normed": "nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))",
    "batch2": "nn.BatchNorm2d(1)",
    "bag": "nn.EmbeddingBag(11, 6, mode='mean')",
    "cell": "nn.GRUCell(6, 6)",
    "memory": "nn.LSTMCell(6, 6)",
    "encoder": "nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)",
    "decoder": "nn.TransformerDecoderLayer(6, 2, 8, batch_first=True, norm_first=True)",
    "mlp": "nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 6))",
    "experts": "nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])",
}
PARAMETERS = {"w": "torch.randn(6)", "bank": "torch.randn(4, 6)", "square": "torch.randn(6, 6)"}
BUFFERS = {
    "scale": "torch.tensor(0.5)",
    "table": "torch.arange(11) * 3 % 11",
    "count": "torch.tensor(3)",
    "kernel": "torch.hann_window(4)",
}

FLOATS = """
$a + $b
$a - $b * $k
$a * torch.sigmoid($b)
$a / ($b.abs() + 1)
$a ** 2
torch.pow($a.abs() + 0.1, $b.tanh())
-$a
$a.exp().clamp(max=5)
$a.abs().add(0.3).sqrt()
$a.abs().add(0.3).rsqrt()
$a.abs().add(0.3).log()
torch.log1p($a.abs())
torch.expm1($a.tanh())
torch.sin($a) * torch.cos($b)
torch.atan2($a, $b.abs() + 0.5)
torch.hypot($a, $b.abs() + 1)
torch.erf($a)
torch.logaddexp($a, $b)
torch.lerp($a, $b, 0.3)
torch.addcmul($a, $b, $b, value=0.5)
torch.addcdiv($a, $b, $b.abs() + 1)
torch.clamp($a, min=-0.5)
torch.clamp($a, -1, 1) * 2
torch.maximum($a, $b)
torch.fmod($a, 1.5)
torch.remainder($a, 0.7)
torch.floor($a) + $a
torch.round($a * 4) / 4 + $a
torch.frac($a)
torch.sign($a) * $b
torch.copysign($a, $b)
torch.nan_to_num($a)
torch.softmax($a, $d)
torch.log_softmax($a, $d)
F.softmin($a, $d)
F.softplus($a)
F.gelu($a)
F.gelu($a, approximate="tanh")
F.silu($a)
F.mish($a)
F.elu($a)
F.selu($a)
F.celu($a, 0.7)
F.relu($a)
F.relu6($a * 4)
F.leaky_relu($a, 0.2)
F.hardtanh($a)
F.hardswish($a)
F.hardsigmoid($a)
F.softsign($a)
F.tanhshrink($a)
F.softshrink($a, 0.2)
F.hardshrink($a, 0.2)
F.threshold($a, 0.1, 0.2)
F.logsigmoid($a)
F.glu($a, $d)
F.normalize($a, dim=$d)
F.layer_norm($a, $a.shape[-1:])
F.rms_norm($a, ($a.shape[-1],))
F.cosine_similarity($a, $b, dim=$d)
F.pairwise_distance($a, $b)
torch.cdist($a, $b)
$a.sum($d)
$a.sum($d, keepdim=True)
$a.mean($d)
$a.mean($d, keepdim=True) + $b
$a.amax($d)
$a.amin($d, keepdim=True)
$a.max($d).values
$a.min($d)[0]
$a.median($d).values
$a.std($d)
$a.var($d, unbiased=False)
torch.var_mean($a, $d)[0]
torch.std_mean($a, $d)[1]
$a.prod($d).tanh()
$a.norm(dim=$d)
$a.norm()
torch.linalg.vector_norm($a, 3, dim=$d)
torch.logsumexp($a, $d)
$a.cumsum($d)
$a.cumsum(1) / torch.arange(1, $a.shape[1] + 1)[:, None]
torch.logcumsumexp($a, $d)
$a.tanh().cumprod($d)
torch.diff($a, dim=$d)
torch.trapezoid($a, dim=$d)
$a.transpose($d, -1)
$a.transpose(0, $d).contiguous()
$a.flip($d)
$a.roll($k, $d)
$a.roll($n, $d)
$a.unsqueeze($d)
$a.unsqueeze($d).expand(*[-1] * $d, $k + 1, *[-1] * ($a.dim() - $d))
$a.squeeze($d)
$a.flatten($d)
$a.flatten(0, 1)
$a.reshape($a.shape[0], -1)
$a.reshape(-1)
$a.reshape(-1, $a.shape[-1])
$a.view(*$a.shape[:-1], 2, -1)
$a.unflatten(-1, (3, -1))
$a.permute(*range(1, $a.dim()), 0)
$a.movedim($d, 0)
$a.swapaxes(0, $d)
$a.T
$a.mT
$a.narrow($d, 0, $a.shape[$d] - 1)
$a.narrow($d, $a.shape[$d] // 2, 1)
$a.select($d, 0)
$a.select($d, -1)
$a[:, 1:]
$a[:, :-1]
$a[:, ::2]
$a[..., 1::2]
$a[..., None]
$a[:, -1]
$a[:, $n // 2:]
$a[: ($n + 1) // 2]
$a[torch.arange($a.shape[0]), 0]
$a[:, torch.arange($a.shape[1]).flip(0)]
torch.cat([$a, $b], $d)
torch.cat([$a, $a.flip($d)], $d)
torch.stack([$a, $a.tanh()], $d)
torch.stack($a.unbind(-1), $d)
torch.cat($a.chunk(2, $d)[::-1], $d)
torch.cat(torch.tensor_split($a, 3, $d)[::-1], $d)
$a.repeat(*[1] * ($a.dim() - 1), 2)
$a.repeat(2, *[1] * ($a.dim() - 1))
$a.repeat_interleave(2, $d)
$a.repeat_interleave($a.shape[0], 0)
torch.tile($a, (2,))
$a.expand(2, *$a.shape)
$a.unfold($d, 2, 1)
$a.unfold($d, 3, 2).mean(-1)
F.pad($a, (1, 2))
F.pad($a, (0, 0, $k, 0))
F.pad($a, (0, 0, 0, -$a.shape[-2] % 4))
F.pad($a, (0, 0, 0, $n))
F.pad($a, (1, 1), mode="replicate")
F.pad($a, (1, 1), mode="reflect")
F.pad($a, (1, 1), mode="circular")
torch.tril($a)
torch.triu($a, 1)
torch.diagonal($a, 0, -2, -1)
torch.diag_embed($a)
torch.where($m, $a, $b)
torch.where($a > 0, $a, $b)
torch.where($a > $b, $a, 0.5)
$a.masked_fill($m, 0.1)
$a.masked_fill($a < 0, -1.0)
$a * $m
torch.gather($a, $d, torch.zeros_like($a, dtype=torch.long))
torch.gather($a, -1, $a.argsort(-1))
torch.take_along_dim($a, $a.argmax($d, keepdim=True), $d)
$a.index_select($d, torch.arange($a.shape[$d] - 1, -1, -1))
torch.zeros_like($a).scatter_add($d, torch.zeros_like($a, dtype=torch.long), $a)
torch.zeros_like($a).scatter($d, torch.ones_like($a[:, :1], dtype=torch.long), $a)
torch.zeros_like($a).index_add($d, torch.arange($a.shape[$d]), $a)
torch.scatter_reduce($a, $d, torch.zeros_like($a, dtype=torch.long), $a, "amax")
$a.sort($d).values
$a.sort($d, descending=True)[0]
$a.topk(2, $d).values
$a.topk(max($n // 2, 1), 1)[0]
$a.kthvalue(1, $d).values
torch.take($a, torch.tensor([0, 1]))
$a @ $b
$a @ $b.mT
torch.matmul($a.mT, $b)
torch.bmm($a, $b.transpose(1, 2))
torch.baddbmm($a, $a, torch.eye($a.shape[-1]).expand($a.shape[0], -1, -1))
torch.einsum("...ij,...kj->...ik", $a, $b)
torch.einsum("bld,bmd->blm", $a, $b)
torch.einsum("bl,bl->b", $a, $b)
torch.outer($a.reshape(-1)[:4], $b.reshape(-1)[:5])
torch.kron($a[:1].reshape(-1)[:3], $b.reshape(-1)[:2])
torch.tensordot($a, $b, dims=1)
torch.inner($a, $b)
torch.cross($a[..., :3], $b[..., :3], dim=-1)
torch.linalg.matrix_norm($a)
torch.matrix_exp(torch.softmax($a @ $a.mT, -1))
F.scaled_dot_product_attention($a, $a, $b)
F.scaled_dot_product_attention($a, $a, $a, is_causal=True)
F.linear($a, self.square)
F.linear($a, self.bank, self.scale.expand(4))
$a * self.w
$a + self.scale
$a @ self.square
torch.cat([$a, self.bank.expand($a.shape[0], 4, 6)], 1)
self.linear($a)
self.narrow($a)
self.norm($a)
self.rms($a)
self.prelu($a)
self.conv($a.transpose(1, 2)).transpose(1, 2)
self.causal($a.mT)[..., : $a.shape[1]].mT
self.strided($a.mT).mT
self.up($a.mT).mT
self.conv2($a.unsqueeze(1)).mean(1)
self.groups($a.mT)
self.instance($a.mT)
self.batch($a.mT).mT
self.batch($a.flatten(0, 1)).view_as($a)
self.attention($a, $a, $a)[0]
self.attention($a, $a, $a, need_weights=True)[1]
self.gru($a)[0]
self.gru($a)[1][0]
self.lstm($a)[0]
self.bilinear($a, $a.flip(-1))
self.embedding($i)
self.embedding($i % 11) * 0.5
F.embedding($i, self.bank)
F.avg_pool1d($a, 2)
F.avg_pool1d($a, 3, 1, 1, count_include_pad=False)
F.max_pool1d($a, 3, 2, 1)
F.lp_pool1d($a.abs() + 0.1, 2, 2)
F.adaptive_avg_pool1d($a, 3)
F.adaptive_max_pool1d($a, 2)
F.interpolate($a, scale_factor=2)
F.interpolate($a, size=$n, mode="linear")
F.interpolate($a, scale_factor=1.5, mode="linear", align_corners=True)
F.interpolate($a.unsqueeze(1), size=($n, 4), mode="bilinear").squeeze(1)
F.unfold($a.unsqueeze(1), (2, 3))
F.pixel_shuffle($a.unsqueeze(0).flatten(1, 2).unflatten(1, (-1, 1)).expand(-1, 4, -1, 1)[:, :4], 2)
F.one_hot($i, 11) * 0.1 + $k
F.smooth_l1_loss($a, $b)
F.mse_loss($a, $b, reduction="none")
F.huber_loss($a, $b)
F.kl_div(F.log_softmax($a, -1), F.softmax($b, -1), reduction="none")
F.cross_entropy($a.flatten(0, -2), $a.flatten(0, -2).argmin(-1))
F.binary_cross_entropy_with_logits($a, torch.sigmoid($b))
F.gaussian_nll_loss($a, $b, $b.abs() + 0.2)
torch.fft.rfft($a).abs()
torch.fft.irfft(torch.fft.rfft($a, dim=1), n=$a.shape[1], dim=1)
torch.view_as_real(torch.complex($a, $b) * torch.exp(1j * $a)).flatten(-2)
torch.polar($a.abs() + 0.1, $b).real
torch.arange($n) * 0.1 + $k
torch.linspace(0, 1, $n)
torch.ones($n, 6) * 0.2
torch.full((2, $n), 0.3)
torch.eye($n)
torch.zeros($n, $n).fill_diagonal_(0.7)
torch.meshgrid(torch.arange($n) * 0.5, torch.arange(3) * 1.0, indexing="ij")[0]
torch.hann_window($n + 2)
$a.new_full($a.shape[:2], 0.25)
torch.tensor([0.1, 0.4]) * $k
$a * $n
$a / $n
$a * ($n ** 0.5)
$a + $n // 2 * 0.1
$a.sum() / $a.numel()
$a.mean() * $b
$a - $a.detach().mean()
$a.softmax(-1).max(-1, keepdim=True)[0]
$i * 0.1
$i.float().mean(-1)
$i.cumsum(0).to($a.dtype)
$m.float()
$m.to(torch.float32).mean()
$a.double().tanh().float()
$a.to(torch.float16).float()
$a.type_as($b)
torch.bucketize($a, torch.tensor([-0.5, 0.0, 0.5])) * 0.1 + $a
torch.searchsorted(torch.linspace(-1, 1, 5), $a) * 0.1 + $a
torch.histc($a.detach(), 4, -1, 1) * 0.1
torch.block_diag($a[0], $b[0])
torch.cartesian_prod($a.reshape(-1)[:2], $b.reshape(-1)[:3])
torch.rot90($a, 1, (0, 1))
torch.sinc($a)
torch.special.expit($a)
torch.special.logit(torch.sigmoid($a), 1e-3)
torch.special.xlog1py($a, $b.abs())
torch.xlogy($a, $b.abs() + 0.1)
torch.nansum($a, $d)
torch.aminmax($a, dim=$d)[0]
torch.count_nonzero($a > 0, $d) * 0.1
torch.broadcast_to($a, (2, *$a.shape))
torch.atleast_3d($a)
torch.hstack([$a, $b])
torch.dstack([$a, $a])
torch.vstack([$a, $b])
"""

INTEGERS = """
$a.argmax($d)
$a.argmin($d)
$a.argsort($d)
$a.topk(2, $d).indices
torch.arange($n) % 11
torch.arange($a.shape[1]).expand($a.shape[0], -1) % 7
torch.arange($n) // 2
(torch.arange($n)[:, None] - torch.arange(3)[None]).clamp(0, 10)
($a * 3).long().clamp(0, 10)
($a > 0).long()
$m.sum(-1)
$m.cumsum(-1) % 11
torch.where($m, 1, 2)
$i.clamp(max=5)
($i * 2 + 1) % 11
$i.flip(0)
$i.unsqueeze(-1)
self.table[$i % 11]
torch.full_like($i, 3)
torch.zeros($n, dtype=torch.long)
torch.tensor([0, 2, 1])
($i // 2).to(torch.int32).long()
$i.bitwise_and(3)
$i.max(-1)[0]
torch.div($i, 2, rounding_mode="floor")
$a.cummax($d)[1]
$a.sort($d, stable=True)[1]
torch.bucketize($a, self.w.sort()[0].detach())
torch.bincount($i.reshape(-1).clamp(0, 4), minlength=5)
torch.nonzero($a[0, :, 0] > -99)[:, 0]
torch.cumsum($m.long(), -1)
torch.arange($n - 1, -1, -1)
torch.arange(0, $n, 2)
torch.bitwise_left_shift($i.clamp(0, 3), 1)
torch.unique($i.clamp(0, 0))
($a.mean((-1)) > 0).int().long()
torch.remainder($i - 3, 5)
torch.full(($n,), self.count.item())
$i[..., None] + torch.arange(2)
$i.scatter(0, torch.zeros_like($i[:1]), 4)
torch.gather($i, 0, torch.zeros_like($i))
torch.minimum($i, $i.flip(0))
$i.repeat_interleave(2)
$i.bool().long()
torch.sym_max($n, 4) + torch.zeros_like($i)
"""

BOOLEANS = """
$a > 0
$a > $b
$a.abs() < 0.5
$a != $a.amax($d, keepdim=True)
~$m
$m & ($a > 0)
$m | ($a < -0.5)
$m ^ ($a < 0.2)
$m.any(-1, keepdim=True)
$m.all($d)
$i > 1
$i == $i.flip(0)
torch.ones($n, $n, dtype=torch.bool).tril()
torch.arange($n)[:, None] >= torch.arange($n)
torch.arange($a.shape[1]) < $a.shape[1] - 1
torch.isfinite($a)
torch.isclose($a, $b)
torch.logical_xor($a > 0, $b > 0)
$a.bool()
torch.eq($i, $i.max())
$a.isnan() | ($a < 0)
$a.isinf()
$a.topk(1, -1).values == $a
torch.logical_and($a, $b > 0)
torch.isin($i, torch.tensor([1, 2]))
$i.unsqueeze(-1) == torch.arange(3)
torch.triu(torch.ones($n, $n + 1), 1) > 0
($a.sort($d)[0] - $b).signbit()
torch.zeros_like($a, dtype=torch.bool)
$m.flip(0)
$m.logical_not()
$a.gt(0) & $b.le(0.5)
torch.any($m, 0)
"""
