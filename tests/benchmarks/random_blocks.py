"""Blocks of model code, with places as in `random_statements.py`; `$v` is what they give."""

__all__ = ["BLOCKS"]

BLOCKS = [
    """
    $v = $a.clone()
    $v[:, 0] = 0
    """,
    """
    $v = $a.clone()
    $v[:, 1:] += $a[:, :-1]
    """,
    """
    $v = $a.clone()
    $v[$a > 0] = 0.3
    """,
    """
    $v = $a * 1
    $v.mul_(0.5).add_($b)
    """,
    """
    $v = torch.zeros($a.shape[0], $a.shape[1] + 2)
    $v[:, 1:-1] = $a[..., 0]
    """,
    """
    $v = torch.zeros_like($a[:, 0])
    for t in range($a.shape[1]):
        $v = torch.tanh($v * 0.5 + $a[:, t])
    """,
    """
    h, found = $a[:, 0] * 0, []
    for t in range($a.shape[1]):
        h = 0.9 * h + $a[:, t] * torch.sigmoid(h)
        found.append(h)
    $v = torch.stack(found, 1)
    """,
    """
    found = []
    for row in $a:
        found.append(row.softmax(-1))
    $v = torch.stack(found)
    """,
    """
    $v = $a
    for scale in (0.5, 0.25):
        $v = $v + torch.sin($v * scale)
    """,
    """
    $v, rest = $a.split([1, $a.shape[1] - 1], 1)
    $v = $v * rest.mean(1, keepdim=True)
    """,
    """
    q, k = $a.chunk(2, -1)
    $v = (q @ k.mT * 0.3).softmax(-1) @ q
    """,
    """
    mean, var = $a.mean(-1, keepdim=True), $a.var(-1, keepdim=True, unbiased=False)
    $v = ($a - mean) / torch.sqrt(var + 1e-5)
    """,
    """
    b, l, d = $a.shape
    $v = $a.view(b, l, 2, d // 2).transpose(1, 2).reshape(b * 2, l, d // 2)
    """,
    """
    b, l, d = $a.shape
    padded = F.pad($a, (0, 0, 0, -l % 4))
    $v = padded.view(b, -1, 4, d).mean(2).repeat_interleave(4, 1)[:, :l]
    """,
    """
    angle = torch.arange($a.shape[1])[:, None] * 0.3 + torch.arange(3)
    one, two = $a[..., :3], $a[..., 3:6]
    $v = torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos()], -1)
    """,
    """
    with torch.no_grad():
        weight = $a.abs().mean(-1, keepdim=True)
    $v = $a / (weight + 0.1)
    """,
    """
    values, places = $a.topk(2, -1)
    $v = torch.zeros_like($a).scatter(-1, places, values.softmax(-1))
    """,
    """
    lengths = torch.full(($a.shape[0],), $a.shape[1]) - torch.arange($a.shape[0]) % 2
    mask = torch.arange($a.shape[1])[None] < lengths[:, None]
    $v = $a * mask[..., None]
    """,
    """
    $v = torch.cat([$a[i : i + 1] * (i + 1) for i in range($a.shape[0])])
    """,
    """
    $v = sum($a[..., j] * (j + 1) for j in range($a.shape[-1]))
    """,
    """
    if $a.mean() > 0:
        $v = $a * 2
    else:
        $v = $a - 1
    """,
    """
    $v = $a
    if $a.shape[1] > 4:
        $v = $a[:, :4]
    """,
    """
    dt = F.softplus($a[..., :2])
    decay = torch.exp(-dt * (torch.arange(2) + 1.0))
    h, found = torch.zeros($a.shape[0], 2), []
    for t in range($a.shape[1]):
        h = decay[:, t] * h + dt[:, t] * $a[:, t, 2:4]
        found.append((h * $a[:, t, 4:6]).sum(-1))
    $v = torch.stack(found, 1)
    """,
    """
    def f(t):
        return (t * self.w).tanh().sum()
    $v = torch.func.grad(f)($a)
    """,
    """
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * t
        @staticmethod
        def backward(ctx, g):
            (t,) = ctx.saved_tensors
            return g * 2 * t
    $v = Twice.apply($a)
    """,
    """
    scores = $a @ self.bank.mT
    weights, places = scores.topk(2, -1)
    weights = weights.softmax(-1)
    $v = torch.zeros_like($a)
    for e in range(4):
        chosen = (places == e).any(-1)
        share = (weights * (places == e)).sum(-1, keepdim=True)
        $v = $v + share * torch.tanh($a * self.bank[e]) * chosen[..., None]
    """,
    """
    flat = $a.reshape(-1, $a.shape[-1])
    $v = torch.zeros_like(flat)
    for e in range(3):
        rows = torch.where(flat.argmax(-1) % 3 == e)[0]
        $v[rows] = $v[rows] + flat[rows] * (e + 1)
    """,
    """
    places = torch.argsort($a[..., 0], dim=1)
    ordered = torch.gather($a, 1, places[..., None].expand_as($a))
    back = torch.argsort(places, dim=1)
    $v = torch.gather(ordered.cumsum(1), 1, back[..., None].expand_as($a))
    """,
    """
    l = $a.shape[1]
    near = (torch.arange(l)[:, None] - torch.arange(l)[None]).abs() <= 2
    scores = ($a @ $a.mT).masked_fill(~near, float("-inf"))
    $v = scores.softmax(-1) @ $a
    """,
    """
    half = $a.shape[1] // 2
    $v = torch.cat([$a[:, half:], $a[:, :half]], 1)
    """,
    """
    windows = F.pad($a, (0, 0, 2, 0)).unfold(1, 3, 1)
    $v = (windows * torch.tensor([0.2, 0.3, 0.5])).sum(-1)
    """,
    """
    $v = $a.clone()
    $v[..., ::2], $v[..., 1::2] = $a[..., 1::2], -$a[..., ::2]
    """,
    """
    $v = []
    for part in $a.chunk(3, -1):
        $v.append(part / part.norm(dim=-1, keepdim=True).clamp(min=0.1))
    $v = torch.cat($v, -1)
    """,
    """
    $v = torch.empty_like($a)
    $v[:, 0::2] = $a[:, 0::2] * 2
    $v[:, 1::2] = $a[:, 1::2] - 1
    """,
    """
    total, n = $a.new_zeros(()), 0
    for row in $a.unbind(-1):
        total, n = total + row.mean(), n + 1
    $v = total / n
    """,
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        $v = F.linear($a, self.square).float()
    """,
    """
    x_, y_ = torch.meshgrid(torch.linspace(-1, 1, $a.shape[1]), torch.arange(6.0), indexing="ij")
    $v = $a + x_ * 0.1 + y_ * 0.01
    """,
    """
    $v = $a.transpose(0, 1).contiguous().view(-1, $a.shape[0] * 6).softmax(0)
    """,
    """
    h = c = torch.zeros($a.shape[0], 6)
    for t in range($a.shape[1]):
        i, f, g, o = F.linear(torch.cat([$a[:, t], h], -1), torch.ones(24, 12) * 0.1).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    $v = h
    """,
    """
    $v = $a
    while $v.shape[1] > 3:
        $v = ($v[:, ::2][:, : $v.shape[1] // 2] + $v[:, 1::2]) / 2
    """,
    """
    lengths = ($a[..., 0] > -1).sum(1).clamp(min=1)
    packed = nn.utils.rnn.pack_padded_sequence($a, lengths, True, False)
    $v = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], True, total_length=$a.shape[1])[0]
    """,
]
