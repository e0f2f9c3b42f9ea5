# Call C, H100, limit 600: bytes in full, bench against torchao, host times.
python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
T0=$(date +%s); el() { echo "== $1 at $(( $(date +%s) - T0 )) s"; }
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/tc PYTHONDONTWRITEBYTECODE=
cd .exp/base; export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site
python3 -m compileall -q /tmp/site fp8tune kernels >/dev/null
F="python3 -m fp8tune.cli"
timeout 150 $F sweep --kernel colwise --shapes llama4 --db $OUT/colwise.db > $OUT/c.log 2>&1; tail -3 $OUT/c.log; el colwise-llama4-with-finals
timeout 200 $F bench --time-budget 180 --format json > $OUT/bench.json 2>$OUT/bench.err; tail -2 $OUT/bench.err; el bench
timeout 240 python3 -m pytest -n 12 -q -p no:cacheprovider tests/kernels tests/gpu 2>&1 | tail -6; el bytes
