"""python -m gpu_scratch.bench2"""
import os, subprocess, sys, time
import torch
from gpu_scratch.bench import D, DEV, F8, LAYERS, WARM, attempt, copy_rate, layers, problem, report, same, us
from fp8tune_kernels.moe import cast_transpose_3d, gathered_transpose
from fp8tune_kernels.quantize import colwise_3d, transposed_codes
from fp8tune_kernels.moe import shifted_transpose_3d
from fp8tune_kernels.quantize import transposed_codes_3d
from fp8tune_kernels.runtime.lookup import config_for


def weights(rate):
    for name, (H, I, E, _) in LAYERS.items():
        for title, N, K, one in (("w13", 2 * I, H, False), ("w2", H, I, True)):
            w = (torch.randn(E, N, K, device=D) * 0.02).bfloat16()
            given, n, key = (w, one, F8), w.numel(), (E, K, N)
            out, ref = cast_transpose_3d.outputs(*given), cast_transpose_3d.outputs(*given)
            other = shifted_transpose_3d if one else transposed_codes_3d
            cast_config, other_config = config_for(colwise_3d.SPEC, key, DEV), config_for(other.SPEC, key, DEV)
            def present():
                colwise_3d.launch(cast_config, (w.mT, F8, True), ref[:2])
                other.launch(other_config, ref[:2] if one else ref[:1], ref[2:] if one else ref[2:3])
            present_us = us(present)
            rows = []
            grid = [(R, bk, lag, warps) for R in (4, 8, 16) for bk in (64, 128) for lag in (2, 4, 8) for warps in (4, 8)]
            if one:
                grid += [(8, 64, 16, 4), (8, 128, 16, 4), (16, 128, 1, 4), (8, 128, 1, 8)]
            for R, bk, lag, warps in grid:
                config = dict(ROWS=R, BLOCK_SIZE_M=128, BLOCK_SIZE_K=bk, LAG=lag, num_warps=warps, num_stages=1)
                if R * cast_transpose_3d.width_of(K) // (32 * warps) > 128:
                    continue
                out[2].view(torch.uint8).zero_()
                def check():
                    return all(same(a.mT, b.mT) if a.dim() == 3 else same(a, b) for a, b in zip(out, ref) if a.numel())
                attempt(rows, config, lambda: cast_transpose_3d.launch(config, given, out), check)
            report(f"{name} {title}", 4 * n, rate, present_us, rows)


def gathered(rate):
    for name, T, H, I, E, top_k in layers():
        inputs = gathered_transpose.inputs(problem(T * top_k, E, "float8_e4m3fn", K=H), D)
        q, offs, tokens, shifts = inputs
        tokens = (tokens % T).contiguous(); q = (q[:T] if len(q) >= T else q.repeat(2, 1)[:T]).contiguous()
        for sh in (None, shifts):
            given = (q, offs, tokens, sh)
            (ref,), (out,) = gathered_transpose.outputs(*given), gathered_transpose.outputs(*given)
            rows_ = q.view(torch.uint8)[tokens.long()].view(F8)
            config = config_for(transposed_codes.SPEC, (1, H, E), DEV)
            def present():
                transposed_codes.launch(config, (rows_, offs, sh), (ref,))
            ref.view(torch.uint8).zero_()
            present_us = us(present)
            rows = []
            for bm, bk, held, warps in ((128,128,64,4),(128,128,4,4),(128,128,8,4),(128,128,16,4),(128,64,4,4),(128,64,8,4),(128,64,16,4),(128,256,8,8),(128,256,16,8),(128,128,8,8),(64,128,8,4),(64,128,8,2),(128,128,2,4),(128,64,2,4)):
                c = dict(BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk, HELD_MIB=held, num_warps=warps, num_stages=1)
                out.view(torch.uint8).zero_()
                attempt(rows, c, lambda: gathered_transpose.launch(c, given, (out,)), lambda: same(ref, out))
            report(f"{name} {T} gathered{'' if sh is None else ', shifts'} (present: of copied rows)", (T + T * top_k) * H, rate, present_us, rows)


PARTS = {"gathered": gathered, "weights": weights}
if __name__ == "__main__":
    out = os.environ.get("OUT", "/tmp")
    if "--part" in sys.argv:
        part = sys.argv[sys.argv.index("--part") + 1]
        rate = copy_rate()
        if not WARM:
            print(f"{part}: {torch.cuda.get_device_name()}, copy {rate/1e6:.3f} TB/s", flush=True)
        PARTS[part](rate)
    else:
        began = time.time()
        base = [sys.executable, "-m", "gpu_scratch.bench2", "--part"]
        warm = [subprocess.Popen([*base, p, "--warm"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for p in PARTS]
        for process in warm:
            try:
                process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
        print(f"compiled {time.time() - began:.0f} s")
        for p in PARTS:
            code = "timeout"
            with open(f"{out}/{p}2.txt", "w") as file:
                try:
                    code = subprocess.run([*base, p], stdout=file, stderr=subprocess.STDOUT, timeout=70).returncode
                except subprocess.TimeoutExpired:
                    pass
            text = open(f"{out}/{p}2.txt").read()
            print(f"--- {p} {code} {time.time() - began:.0f} s")
            lines, shown = [], 0
            for l in text.splitlines():
                shown = 0 if not l.startswith("      ") else shown + 1
                if shown <= 4: lines.append(l)
            print("\n".join(lines), flush=True)
