import torch
from fp8tune_kernels.moe import cast_transpose_3d as k
def eq(a, b):
    c = lambda t: (t.mT if t.dim() == 3 else t).flatten().contiguous().view(torch.uint8)
    return torch.equal(c(a), c(b))
k.MOST_COLUMNS = 256
for E, N, K in ((2, 144, 101), (3, 272, 80), (2, 48, 272), (1, 528, 33)):
    w = torch.randn(E, N, K).mul_(torch.randn(E, N, 1).mul(6).exp2()).bfloat16()
    w[0, 3] = 0
    if E > 1: w[1, 5, 7] = float("inf"); w[1, 6, 7] = float("nan")
    for cfg in (dict(k.DEFAULT), dict(k.DEFAULT, ROWS=4, BLOCK_SIZE_K=64, LAG=2)):
        for one in (False, True):
            i = (w, one, torch.float8_e4m3fn)
            out = k.outputs(*i); k.launch(cfg, i, out)
            print(E, N, K, one, [eq(a, b) for a, b in zip(k.reference(*i), out)])
