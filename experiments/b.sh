# Call B, H200-x4, limit 600: the three shape sets with the full protocol, kernels split over four GPUs.
python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
cd .exp/base; export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site
python3 -m compileall -q /tmp/site fp8tune kernels >/dev/null
go() { g=$1; shift; k=""; for x in "$@"; do k="$k --kernel $x"; done
  CUDA_VISIBLE_DEVICES=$g TRITON_CACHE_DIR=/tmp/tc$g timeout 560 sh -c "python3 -m fp8tune.cli calibrate --db $OUT/g$g.db; python3 -m fp8tune.cli sweep $k --shapes llama4 --shapes deepseek-v3 --shapes deepseek-moe-16b --time-budget 470 --db $OUT/g$g.db" >$OUT/g$g.log 2>&1 & }
go 0 rowwise mxfp8-dim0
go 1 colwise rowwise-2d mxfp8-dim1
go 2 colwise-3d colwise-dual rowwise-colwise mxfp8-dim1-3d
go 3 transpose-3d-reduction transpose-3d-atomic colwise-transpose-3d mxfp8-dim1-3d-via-2d
wait; tail -n 3 $OUT/g*.log
