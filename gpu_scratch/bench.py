"""python -m gpu_scratch.bench: present kernels and candidates; runs each part in a process."""
import math, os, subprocess, sys, time
import torch
from triton.testing import do_bench

from fp8tune_kernels.gemm import grouped_contraction
from fp8tune_kernels.moe import gathered_transpose, shifted_transpose_3d
from fp8tune_kernels.quantize import colwise_3d, gated_rows, swiglu_rowwise, transposed_codes_3d
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.spec import NamedInts, Problem
from gpu_scratch import chunked, flat, words

LAYERS = {"OLMoE": (2048, 1024, 64, 8), "Qwen3-30B-A3B": (2048, 768, 128, 8), "DeepSeek-MoE-16B": (2048, 1408, 64, 6)}
TOKENS = (4096, 16384)
F8 = torch.float8_e4m3fn
WARM = "--warm" in sys.argv
D = os.environ.get("D", "cuda")
DEV = torch.device(D)


def us(f):
    f()
    torch.cuda.synchronize()
    if WARM:
        return 1.0
    return do_bench(f, warmup=4, rep=16, return_mode="median") * 1e3


def same(a, b):
    flat = lambda t: t.flatten().contiguous().view(torch.uint8)
    return torch.equal(flat(a), flat(b))


def copy_rate():
    if WARM:
        return 1e6
    a = torch.empty(1 << 28, dtype=torch.int16, device=D); b = torch.empty_like(a)
    return 2 * a.nbytes / do_bench(lambda: b.copy_(a), warmup=10, rep=50, return_mode="median") / 1e3  # bytes / us


def report(title, bytes_, rate, present_us, rows):
    rows = sorted(rows, key=lambda r: r[0])
    least = bytes_ / rate
    print(f"{title}: copy's {least:.0f} us; present {present_us:.0f} ({100*least/present_us:.0f} %); best {rows[0][0]:.0f} ({100*least/rows[0][0]:.0f} %) {rows[0][1]} {rows[0][2]}", flush=True)
    for t, c, ok in rows[1:]:
        print(f"      {t:7.0f} {c} {ok}")


def attempt(rows, config, f, check):
    try:
        t = us(f)
        rows.append((t, str(dict(config)), check()))
    except Exception as e:
        rows.append((9e9, str(dict(config)), f"{type(e).__name__} {str(e)[:120]}"))


def layers():
    for name, dims in LAYERS.items():
        for tokens in TOKENS:
            yield name, 512 if WARM else tokens, *dims


def weights(rate):
    for name, (H, I, E, _) in LAYERS.items():
        for title, N, K, shifted in (("w13", 2 * I, H, False), ("w2", H, I, True)):
            w = (torch.randn(E, N, K, device=D) * 0.02).bfloat16()
            view, n = w.mT, w.numel()
            key = (E, K, N)
            q, s = colwise_3d.outputs(view, F8, True)
            if shifted:
                t, c = shifted_transpose_3d.outputs(q, s)
            else:
                (t,), c = transposed_codes_3d.outputs(q), None
            cast_config = config_for(colwise_3d.SPEC, key, DEV)
            other = shifted_transpose_3d if shifted else transposed_codes_3d
            other_config = config_for(other.SPEC, key, DEV)
            def cast():
                colwise_3d.launch(cast_config, (view, F8, True), (q, s))
            def rest():
                other.launch(other_config, (q, s) if shifted else (q,), (t, c) if shifted else (t,))
            def present():
                cast(); rest()
            cast_us, rest_us, present_us = us(cast), us(rest), us(present)
            print(f"{name} {title}: cast {cast_us:.0f} (copy's {3*n/rate:.0f}), transpose {rest_us:.0f} (copy's {2*n/rate:.0f})")
            q2, s2 = colwise_3d.outputs(view, F8, True)
            t2 = transposed_codes_3d.outputs(q)[0]
            c2 = None if c is None else torch.empty_like(c)
            if shifted:
                grid = [(8,128,128,4,1,1),(8,128,128,4,1,2),(8,128,64,4,1,2),(16,128,128,8,1,2),(8,128,64,4,1,4),(4,128,64,4,1,2),(16,128,64,4,1,2),(16,128,64,8,1,1),(16,128,64,8,1,4)]
            else:
                grid = [(4,128,128,4,4,4),(4,128,128,4,4,8),(4,128,64,4,4,16),(8,128,128,4,4,8),(4,128,64,4,4,8),(8,128,128,8,4,8),(8,128,64,8,4,8),(8,128,64,8,2,8),(16,128,128,8,4,8),(4,128,64,4,1,32),(2,128,64,4,4,8)]
            rows = []
            for R, bm, bk, warps, stripes, lag in grid:
                config = dict(ROWS=R, BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk, LAG=lag, STRIPES=stripes, num_warps=warps)
                t2.view(torch.uint8).zero_()
                def check():
                    return same(q.mT, q2.mT) and same(s, s2) and same(t.mT, t2.mT) and (c is None or same(c, c2))
                attempt(rows, config, lambda: words.both_copies(config, w, (q2, s2, t2, c2), shifted), check)
            report(f"{name} {title}", 4 * n, rate, present_us, rows)


def problem(M, G, dtype, **dims):
    return Problem("x", NamedInts(M=M, G=G, **dims), routing="jagged", in_dtype=dtype)


def gathered(rate):
    for name, T, H, I, E, top_k in layers():
        inputs = gathered_transpose.inputs(problem(T * top_k, E, "float8_e4m3fn", K=H), D)
        q, offs, tokens, shifts = inputs
        tokens = (tokens % T).contiguous(); q = q[:T] if len(q) >= T else q.repeat(2, 1)[:T]
        for sh in (None, shifts):
            given = (q.contiguous(), offs, tokens, sh)
            (out,), (out2,) = gathered_transpose.outputs(*given), gathered_transpose.outputs(*given)
            out.view(torch.uint8).zero_()
            config = config_for(gathered_transpose.SPEC, gathered_transpose.key(*given), DEV)
            present_us = us(lambda: gathered_transpose.launch(config, given, (out,)))
            rows = []
            for bm, bk in ((128, 64), (64, 128)):
                other = dict(config, BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk)
                attempt(rows, dict(other, present=1), lambda: gathered_transpose.launch(other, given, (out,)), lambda: True)
            for bm, bk, count, warps, stages in ((128,128,1,4,1),(128,64,1,4,1),(128,128,2,4,1),(128,128,4,4,1),(128,64,4,4,1),(128,64,2,4,1),(64,128,1,4,1),(128,128,1,8,1),(128,128,4,8,1),(128,256,1,8,1),(128,128,4,4,3),(128,64,4,4,3),(64,128,4,4,1),(128,32,4,2,1)):
                c = dict(BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk, COUNT=count, num_warps=warps, num_stages=stages)
                out2.view(torch.uint8).zero_()
                attempt(rows, c, lambda: words.gathered_words(c, given, (out2,)), lambda: same(out, out2))
            report(f"{name} {T} gathered{'' if sh is None else ', shifts'}", (T + T * top_k) * H, rate, present_us, rows)


def swiglu(rate):
    for name, T, H, I, E, top_k in layers():
        p = Problem("x", NamedInts(M=T * top_k, N=I, G=E, weights=1, keep=1), routing="jagged", in_dtype="bfloat16", fp8_dtype="float8_e4m3fn")
        given = swiglu_rowwise.inputs(p, D)
        out, out2 = swiglu_rowwise.outputs(*given), swiglu_rowwise.outputs(*given)
        config = config_for(swiglu_rowwise.SPEC, gated_rows.key(given[0], given[1]), DEV)
        present_us = us(lambda: swiglu_rowwise.launch(config, given, out))
        rows = []
        for bm, tile, warps, stages in ((8,2048,4,1),(8,2048,4,3),(8,4096,4,1),(8,4096,4,3),(8,4096,8,1),(8,4096,8,3),(8,8192,8,1),(32,2048,4,3),(32,4096,8,3),(32,4096,4,3),(32,2048,4,4)):
            c = dict(config, BLOCK_SIZE_M=bm, TILE=tile, num_warps=warps, num_stages=stages)
            attempt(rows, dict(c, present=1), lambda: swiglu_rowwise.launch(c, given, out), lambda: True)
        for width in {768: (256,), 1024: (256, 512), 1408: (128, 256)}[I]:
            for r, bm, warps, stages in ((4,8,4,1),(8,8,8,1),(4,16,4,3),(4,32,4,3),(8,32,8,3),(2,8,2,1),(2,16,4,1),(2,16,4,3)):
                c = dict(WIDTH=width, ROWS=r, BLOCK_SIZE_M=bm, num_warps=warps, num_stages=stages)
                attempt(rows, c, lambda: chunked.chunked(c, given, out2), lambda: all(same(a, b) for a, b in zip(out, out2)))
        report(f"{name} {T} swiglu", T * top_k * I * 7, rate, present_us, rows)


def contraction(rate):
    for name, T, H, I, E, top_k in layers():
        for title, N, K in (("d_w13", 2 * I, H), ("d_w2", H, I)):
            M = T * top_k
            given = grouped_contraction.inputs(problem(M, E, "float8_e4m3fn", N=N, K=K), D)
            a, b, offs, *_ = given
            ones = torch.ones(E * K, device=D)
            given = (a, b, offs, given[3], ones, 128)
            out, out2 = grouped_contraction.outputs(*given), grouped_contraction.outputs(*given)
            config = config_for(grouped_contraction.SPEC, grouped_contraction.key(*given), DEV)
            present_us = us(lambda: grouped_contraction.launch(config, given, out))
            rows = [(present_us, "present " + str({k[-3:]: v for k, v in config.items()}), True)]
            grid = [(128,256,128,8,1,1,3),(128,256,128,8,1,2,3),(128,256,128,8,1,2,2),(128,128,128,4,2,1,2),(128,128,128,4,2,1,3),(128,128,128,4,2,2,2),(128,128,64,4,2,2,4),(128,256,64,8,1,2,4),(64,256,128,4,1,2,3),(128,128,128,8,2,1,3)]
            for bm, bn, bk, warps, programs, d, stages in grid:
                c = dict(BLOCK_SIZE_M=bm, BLOCK_SIZE_N=bn, BLOCK_SIZE_K=bk, BAND=8, DESCRIPTORS=d, PROGRAMS=programs, num_warps=warps, num_stages=stages)
                short = f"fused {(bm, bn, bk)} warps {warps} programs {programs} descriptors {d} stages {stages}"
                try:
                    t = us(lambda: flat.fused(c, given, out2))
                    rows.append((t, short, same(out[0], out2[0])))
                except Exception as e:
                    rows.append((9e9, short, str(e)[:120]))
                if programs == 1 and bn == 256 and bm == 128 and bk == 128:
                    attempt(rows, dict(c, present=1), lambda: grouped_contraction.launch(c, given, out), lambda: True)
            rows.sort(key=lambda r: r[0])
            flops = 2 * M * N * K
            print(f"{name} {T} {title}: present {present_us:.0f} us ({flops/present_us/1e6:.0f} TFLOP/s), output alone {2*E*N*K/rate:.0f}; best {rows[0][0]:.0f} ({flops/rows[0][0]/1e6:.0f}) {rows[0][1]} {rows[0][2]}", flush=True)
            for r in rows[1:]:
                print(f"      {r[0]:7.0f} {r[1]} {r[2]}")


PARTS = {"contraction": contraction, "gathered": gathered, "swiglu": swiglu, "weights": weights}

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
        base = [sys.executable, "-m", "gpu_scratch.bench", "--part"]
        warm = {p: subprocess.Popen([*base, p, "--warm"], stdout=subprocess.DEVNULL, stderr=open(f"{out}/warm_{p}.err", "w")) for p in PARTS}
        for p, process in warm.items():
            try:
                print("compiled", p, process.wait(timeout=max(5, 200 - (time.time() - began))), f"{time.time() - began:.0f} s", flush=True)
            except subprocess.TimeoutExpired:
                process.kill(); print("compiling", p, "took too long", flush=True)
        for p in PARTS:
            with open(f"{out}/{p}.txt", "w") as file:
                try:
                    code = subprocess.run([*base, p], stdout=file, stderr=subprocess.STDOUT, timeout=100).returncode
                except subprocess.TimeoutExpired:
                    code = "timeout"
            text = open(f"{out}/{p}.txt").read()
            print(f"--- {p} {code} {time.time() - began:.0f} s")
            print("\n".join(l for l in text.splitlines() if not l.startswith("      "))[-2600:], flush=True)
