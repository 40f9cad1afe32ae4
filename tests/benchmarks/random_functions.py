"""More statements that give floats, with places as in `random_statements.py`: rarer functions."""

__all__ = ["FUNCTIONS"]

FUNCTIONS = """
self.dilated($a.mT).mT
self.grouped($a.mT).mT
self.plane($a.mT.unsqueeze(-1).expand(-1, -1, -1, 3)).flatten(2)
self.wider($a.unsqueeze(1)).sum(1)
self.normed($a)
self.batch2($a.unsqueeze(1)).squeeze(1)
self.bag($i)
self.bag($i.reshape(-1), torch.arange(2))
self.cell($a[:, 0])
self.memory($a[:, 0], ($a[:, 1], $a[:, -1]))[1]
self.encoder($a)
self.encoder($a, src_key_padding_mask=torch.arange($a.shape[1]).expand($a.shape[:2]) > 3)
self.decoder($a, $a.flip(1))
self.mlp($a)
sum(e($a) * (j + 1) for j, e in enumerate(self.experts))
torch.stack([e($a) for e in self.experts], -1).amax(-1)
self.attention($a, $a, $a, attn_mask=torch.ones($n, $n).triu(1).bool())[0]
self.attention($a, $b, $b, need_weights=False)[0]
F.conv1d($a.mT, self.square[:, :, None], padding="same").mT
F.conv1d(F.pad($a.mT, (3, 0)), self.kernel.expand(6, 1, 4), groups=6).mT
F.conv_transpose1d($a.mT, self.bank.view(4, 6, 1).transpose(0, 1), stride=2).mT
F.grid_sample($a[:, None], $a[:, None, :, :2].tanh(), align_corners=False)[:, 0, 0]
F.grid_sample($a[:, None], $a[:, :, None, :2].tanh(), "nearest", "border", True)[:, 0, :, 0]
F.affine_grid($a[:, :2, :3], (*$a.shape[:1], 1, $a.shape[1], 3), align_corners=False)[..., 0]
F.interpolate($a.unsqueeze(1), scale_factor=2, mode="nearest").squeeze(1)
F.interpolate($a.unsqueeze(1), size=($a.shape[1] * 2, 5), mode="bicubic").squeeze(1)
F.interpolate($a.unsqueeze(1), size=($n, 6), mode="area").squeeze(1)
F.interpolate($a, size=$n, mode="nearest-exact")
F.interpolate($a[:, None], scale_factor=0.5, mode="bilinear", antialias=True)[:, 0]
F.avg_pool2d($a.unsqueeze(1), 2, ceil_mode=True).squeeze(1)
F.max_pool2d($a.unsqueeze(1), (2, 3), (1, 2), return_indices=True)[0].squeeze(1)
F.adaptive_avg_pool2d($a.unsqueeze(1), (None, 2)).squeeze(1)
F.adaptive_avg_pool2d($a.unsqueeze(1), 1).flatten(1)
F.fold(F.unfold($a.mT.unsqueeze(-1), (2, 1)), ($a.shape[1], 1), (2, 1)).squeeze(-1).mT
F.unfold($a.mT.unsqueeze(-1), (3, 1), padding=(1, 0), stride=(2, 1)).mT
F.local_response_norm($a, 3)
F.group_norm($a.mT, 3).mT
F.instance_norm($a.mT).mT
F.batch_norm($a.mT, self.w.detach(), self.w.detach().abs() + 1).mT
F.channel_shuffle($a.mT, 2)
F.pixel_unshuffle($a[:, None, : $a.shape[1] // 2 * 2], 2).flatten(1, 2)
F.embedding_bag($i, self.bank, mode="sum")
F.triplet_margin_loss($a, $b, $a.flip(0), reduction="none")
F.cosine_embedding_loss($a[:, 0], $b[:, 0], torch.ones($a.shape[0]))
F.margin_ranking_loss($a, $b, torch.ones_like($a))
F.poisson_nll_loss($a, $b.abs(), reduction="none")
F.nll_loss(F.log_softmax($a.mT, 1), $a.argmax(-1), ignore_index=1)
F.cross_entropy($a.mT, $a.argmin(-1), label_smoothing=0.1, reduction="none")
F.l1_loss($a, $b)
F.multi_margin_loss($a[:, 0], $a[:, 0].argmin(-1))
F.rrelu($a)
F.alpha_dropout($a, 0.1, False)
F.logsigmoid(-$a)
F.scaled_dot_product_attention($a, $b, $b, attn_mask=torch.ones($n, $n).tril().bool())
F.scaled_dot_product_attention($a, $a, $a, attn_mask=$a @ $a.mT, scale=0.2)
F.scaled_dot_product_attention($a[:, None], $b[:, None], $b.flip(1)[:, None]).squeeze(1)
torch.fft.fft($a, dim=1).real
torch.fft.ifft(torch.fft.fft($a, dim=1) * torch.fft.fft($b, dim=1), dim=1).real
torch.fft.irfft(torch.fft.rfft($a, n=2 * $a.shape[1], dim=1), dim=1)[:, : $a.shape[1]]
torch.fft.fft2($a).abs()
torch.fft.fftshift($a, dim=1)
torch.fft.fftfreq($n) + $k
torch.fft.rfft($a, dim=1, norm="ortho").imag
torch.fft.hfft(torch.complex($a, $b))
torch.stft($a[..., 0], 4, 2, window=self.kernel, return_complex=True).abs()
torch.view_as_complex($a[..., :2].contiguous()).abs()
torch.complex($a, $b).angle()
(torch.complex($a, $b) @ torch.complex($a, $b).mH).real
torch.complex($a, $b).prod($d).real.tanh()
torch.real(torch.exp(torch.complex($a * 0, $b)).cumsum($d))
torch.linalg.inv($a @ $a.mT + 2 * torch.eye($a.shape[-2]))
torch.linalg.solve($a @ $a.mT + 2 * torch.eye($a.shape[-2]), $b)
torch.linalg.cholesky($a @ $a.mT + torch.eye($a.shape[-2]))
torch.linalg.det($a.mT @ $a + torch.eye($a.shape[-1])).tanh()
torch.linalg.qr(self.square)[1] * $k
torch.linalg.solve_triangular(self.square.tril() + 3 * torch.eye(6), $a.mT, upper=False)
torch.linalg.slogdet($a.mT @ $a + torch.eye($a.shape[-1]))[1]
torch.linalg.cross($a[..., :3], $b[..., 1:4])
torch.linalg.norm($a, dim=(-2, -1))
torch.linalg.multi_dot([$a[0], self.square, self.bank.T])
torch.linalg.matrix_power(self.square * 0.1, 3) @ $a.mT
torch.chain_matmul($a[0], self.square)
torch.einsum("bld,hd->blh", $a, self.bank)
torch.einsum("bld,bld,d->bl", $a, $b, self.w)
torch.einsum("b...d,de->b...e", $a, self.square)
torch.einsum("bld->bd", $a)
torch.einsum("bll->bl", $a @ $a.mT)
torch.addmm(self.w, $a[0], self.square)
torch.addbmm(torch.zeros($a.shape[-1], $a.shape[-1]), $a.mT, $b)
torch.addr(self.square, self.w, self.w * 2) * $k
torch.mv($a[0], self.w)
torch.dot($a.reshape(-1), $a.flip(0).reshape(-1))
torch.vander(self.w.tanh(), 3) * $k
torch.ger(self.w, $a.reshape(-1)[:4])
torch.index_copy($a, 1, torch.tensor([0, 1]), $a[:, -2:])
torch.index_fill($a, $d, torch.tensor([0]), 0.5)
torch.index_put($a, (torch.arange($a.shape[0]), torch.zeros($a.shape[0]).long()), $a[:, 1])
torch.masked_scatter($a, $m, $b)
torch.select_scatter($a, $a.select($d, 1), $d, 0)
torch.slice_scatter($a, $a[:, :1] * 2, 1, 1, 2)
torch.diagonal_scatter($a, torch.diagonal($a, 0, -2, -1) * 2, 0, -2, -1)
torch.cummax($a, $d)[0]
torch.cummin($a, $d).values
torch.mode(($a * 3).round(), $d).values
torch.nanmedian($a, $d).values
torch.quantile($a, 0.3, dim=$d)
torch.quantile($a, torch.tensor([0.25, 0.5]), dim=$d).sum(0)
torch.nanmean($a, $d)
torch.dist($a, $b)
torch.renorm($a, 2, 0, 1.0)
torch.cov($a[0].mT)
torch.corrcoef($a[0] + self.bank.sum())
torch.cumulative_trapezoid($a, dim=$d)
torch.gradient($a, dim=-1)[0]
torch.unbind($a, 1)[0]
torch.column_stack([$a[:, 0], $b[:, 1]])
torch.heaviside($a, $b)
torch.ldexp($a, torch.tensor(2))
torch.float_power($a.abs() + 0.1, 0.5).float()
torch.floor_divide($a, 0.7) + $a
torch.true_divide($a, $k)
torch.square($a)
torch.exp2($a)
torch.log2($a.abs() + 0.3) + torch.log10($b.abs() + 0.3)
torch.deg2rad($a)
torch.acos($a.tanh() * 0.9)
torch.asinh($a) + torch.atanh($a.tanh() * 0.9)
torch.acosh($a.abs() + 1.2)
torch.tan($a.tanh())
torch.special.entr($a.abs() + 0.1)
torch.special.erfcx($a)
torch.special.i0e($a)
torch.special.ndtr($a)
torch.special.log_ndtr($a)
torch.special.gammaln($a.abs() + 0.5)
torch.digamma($a.abs() + 0.5)
torch.erfinv($a.tanh() * 0.9)
torch.igamma($a.detach().abs() + 0.5, $b.detach().abs() + 0.5)
torch.mvlgamma($a.abs() + 3, 2)
torch.rsub($a, 1)
torch.bernoulli($a.sigmoid().round().detach()) * $b
torch.unflatten($a, -1, (2, -1)).sum(-2)
torch.ravel($a)[: $a.shape[0]]
torch.permute($a, tuple(range($a.dim()))[::-1])
torch.moveaxis($a, 0, -1)
torch.split($a, 2, 1)[0]
torch.split($a, [1, 2, 3], -1)[1]
torch.chunk($a, 3, -1)[1]
torch.narrow_copy($a, 1, 0, 2)
torch.as_strided($a.contiguous(), (2, 3), (1, 1))
torch.concat([$a[:, i : i + 2].mean(1, True) for i in range(3)], 1)
torch.func.vmap(lambda r: r.softmax(0) * 2)($a)
torch.vmap(torch.dot, in_dims=(0, 0))($a[:, 0], $b[:, 1])
torch.utils.checkpoint.checkpoint(lambda t: t.tanh() * 2, $a, use_reentrant=False)
$a[$m]
$a[$a > 0].sum()
$a[$m].mean()
torch.masked_select($a, $m).square().sum()
$a.where($m, torch.zeros(()))
$a[:, None] - $a[:, :, None]
$a[torch.tensor([0, 0])]
$a[..., torch.tensor([2, 0, 1])]
$a[$a[..., 0].argmax(-1) * 0]
$a.index_select(1, $a[0].argmax(0).clamp(max=1)) * 0.5
$a.clamp(min=$b.detach() - 1)
$a.clamp_min($b)
$a.view(torch.int32).view(torch.float32)
$a.unfold(1, 2, 2).flatten(2)
$a.new_zeros($a.shape[1]).scatter_add(0, torch.arange($a.shape[1]), $a[0, :, 0])
$a.to_sparse().to_dense()
$a.sub($b, alpha=0.5)
$a.softmax(-1, dtype=torch.float64).float()
$a.bfloat16().float()
$a.half().softmax(-1).float()
$a.mul($b).sum((0, 1))
$a.mean((0, 1), keepdim=True)
$a.var((0, 1))
$a.amax((0, 1))
$a.logsumexp((0, 1))
$a.std()
$a.argmax() * 0.1 + $b
$a.max() - $a.min()
$a.sum(dtype=torch.float64).float()
$a.norm(p=1, dim=$d, keepdim=True)
$a.norm(p=float("inf"), dim=-1)
$a.cumsum(1).flip(1)
$a.prod()
"""
