# Call A, H100, limit 600: experiments on colwise, bytes, captures, grouped GEMM, calibrate.
python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
T0=$(date +%s); el() { echo "== $1 at $(( $(date +%s) - T0 )) s"; }
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/tc PYTHONDONTWRITEBYTECODE=
cd .exp/base
export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site:$PWD/..
python3 -m compileall -q /tmp/site fp8tune kernels >/dev/null
F="python3 -m fp8tune.cli"
PER_SM=16 timeout 200 python3 ../exp_colwise3.py time $OUT/exp.json 130 2>&1 | tail -90; el exp
timeout 60 python3 -m pytest -q -x -n 12 -p no:cacheprovider tests/gpu/test_captures.py tests/kernels/test_both_ways.py tests/kernels/test_keep_fp8.py 2>&1 | tail -8; el captures
timeout 60 $F sweep --quick --kernel rowwise-colwise --kernel colwise-transpose-3d --shapes ../g.toml --time-budget 50 --db $OUT/both.db >/dev/null 2>$OUT/both.err; tail -c 200 $OUT/both.err; python3 ../show.py $OUT/both.db 2; el both
timeout 60 python3 -m pytest -q -n 12 -p no:cacheprovider tests/gpu/test_grouped_steps.py tests/kernels/test_grouped_mm.py tests/kernels/test_grouped_mxfp8.py tests/kernels/test_token_groups.py tests/kernels/test_mxfp8_blocked.py 2>&1 | tail -8; el grouped-tests
timeout 110 $F bench --op grouped-mm --seed 1 --time-budget 100 --format markdown 2>$OUT/gmm.err; tail -3 $OUT/gmm.err; el grouped-bench
timeout 60 $F sweep --kernel mxfp8-dim0 --shapes llama4 --db $OUT/finals.db 2>&1 | tail -9; el finals
