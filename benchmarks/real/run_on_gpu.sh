#!/usr/bin/env bash
# Records three runs of a program, sweeps its kernels and studies them: torchao, fla or liger.
#
#     bash benchmarks/real/run_on_gpu.sh FOLDER [PART] [SECONDS]
#
# Each step has a time limit and goes on after a failure. What is written into FOLDER: PART.db, PART-1.json to
# PART-3.json and PART.log. The most important steps come first; SECONDS (480) ends the last ones.
set -u
OUT=${1:?folder} PART=${2:-torchao} SECONDS_LEFT=${3:-480}
mkdir -p "$OUT"
BEGIN=$(date +%s)
LOG="$OUT/$PART.log" SAID=$(mktemp) CHECK=""
FP8TUNE="python3 -m fp8tune"
export PYTHONUNBUFFERED=1 COLUMNS=180
export FLA_CACHE_RESULTS=0 # fla reads Triton's cache of results otherwise: only the first process would tune

say() { echo "[$(($(date +%s) - BEGIN)) s] $*" | tee -a "$LOG"; }

step() { # LIMIT command...: at most LIMIT seconds, and no more than are left
  local limit=$1 left=$((SECONDS_LEFT - $(date +%s) + BEGIN))
  shift
  if [ "$left" -lt 10 ]; then
    say "left out: $*"
    return 3
  fi
  [ "$limit" -gt "$left" ] && limit=$left
  say "$*"
  timeout -k 15 "$limit" "$@" >"$SAID" 2>&1 # no pipe: a process that outlives its parent would hold it open
  local code=$?
  tail -n 60 "$SAID" | cut -c 1-400 | tee -a "$LOG"
  say "exit $code"
  return "$code"
}

record() { # NUMBER LIMIT module...
  local number=$1 limit=$2
  shift 2
  step "$limit" $FP8TUNE record -o "$OUT/$PART-$number.json" -- python3 -m "$@"
}

sweep() { # BUDGET kernel option...: CHECK is how its outputs are compared
  local budget=$1 kernel=$2 check=$CHECK
  shift 2
  [ -n "${ONLY_RECORDED[$kernel]:-}" ] && check="sizes=recorded${check:+&$check}"
  step $((budget + 60)) $FP8TUNE sweep --kernel "$kernel@$OUT/$PART-1.json${check:+?$check}" --db "$OUT/$PART.db" \
    --budget "$budget" "$@"
}

declare -A ONLY_RECORDED=()

screen() { # the same without finals; where no config is right, once more on the recorded sizes alone
  sweep "$@" --quick
  [ $? = 1 ] || return
  ONLY_RECORDED[$2]=1
  sweep "$@" --quick --again
}

study() { # also where no time is left
  timeout 60 python3 -m benchmarks.real_kernels "$OUT/$PART.db" "$OUT/$PART"-[123].json 2>&1 | cut -c 1-400 | tee -a "$LOG"
}

say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader) $(python3 --version)"

case $PART in
torchao)
  KERNELS=torchao.prototype.moe_training.kernels
  PROGRAM="benchmarks.real.libraries torchao"
  DUAL=$KERNELS.jagged_float8_scales:_triton_fp8_per_group_colwise_scales_dual_kernel
  FUSED=$KERNELS.jagged_float8_scales:_triton_fp8_per_group_colwise_scales_fused_kernel
  COLWISE_3D=$KERNELS.float8_rowwise:_triton_fp8_colwise_3d_scale_and_cast_kernel
  ROWWISE=$KERNELS.float8_rowwise:_triton_fp8_rowwise_2d_fused_scale_and_cast_kernel
  SCALES=$KERNELS.float8_rowwise:_triton_fp8_rowwise_3d_transpose_scales_rhs_kernel
  CAST=$KERNELS.float8_rowwise:_triton_fp8_rowwise_3d_transpose_cast_rhs_kernel
  record 1 240 $PROGRAM
  screen 60 $DUAL
  screen 30 $COLWISE_3D
  # its first config holds no group of the recorded calls: what is right is said in plain torch
  CHECK="reference=benchmarks.real.libraries:colwise&sizes=recorded" sweep 20 $FUSED --quick ||
    CHECK="sizes=recorded" sweep 20 $FUSED --quick --again
  record 2 120 $PROGRAM
  study
  record 3 120 $PROGRAM
  sweep 60 $DUAL
  sweep 30 $COLWISE_3D
  # one config each: widened
  screen 30 $ROWWISE --grid BLOCK_SIZE_K=128,256,512,1024 --grid num_warps=4,8
  screen 30 $SCALES --grid BLOCK_SIZE_K=32,64,128 --grid BLOCK_SIZE_N=64,128,256
  screen 30 $CAST --grid BLOCK_SIZE_K=32,64,128 --grid BLOCK_SIZE_N=64,128,256
  ;;
fla)
  PROGRAM="benchmarks.real.libraries fla"
  CHECK="check=tolerance&relative=0.016&absolute=0.01"
  record 1 200 $PROGRAM
  screen 40 fla.modules.norm.l2norm:l2norm_fwd_kernel
  screen 40 fla.ops.common.chunk_h:chunk_fwd_kernel_h
  record 2 60 $PROGRAM
  study
  record 3 60 $PROGRAM
  sweep 40 fla.modules.norm.l2norm:l2norm_fwd_kernel
  sweep 40 fla.ops.common.chunk_h:chunk_fwd_kernel_h
  screen 40 fla.modules.norm.l2norm:l2norm_bwd_kernel
  ;;
liger)
  PROGRAM="benchmarks.real.libraries liger"
  SUMS="check=tolerance&relative=0.016&absolute=0.01"
  record 1 240 $PROGRAM
  screen 30 liger_kernel.ops.dyt:_dyt_fwd_kernel
  CHECK=$SUMS screen 50 liger_kernel.ops.fused_moe_kernels:_fused_up_proj_swiglu_kernel
  record 2 90 $PROGRAM
  study
  record 3 90 $PROGRAM
  sweep 30 liger_kernel.ops.dyt:_dyt_fwd_kernel
  CHECK=$SUMS sweep 50 liger_kernel.ops.fused_moe_kernels:_fused_up_proj_swiglu_kernel
  CHECK=$SUMS screen 30 liger_kernel.ops.dyt:_dyt_bwd_kernel
  ;;
*)
  say "unknown part $PART: torchao, fla or liger"
  exit 2
  ;;
esac
study
say "done; $(ls -l "$OUT" | awk 'NR > 1 { printf "%s %d kB  ", $NF, $5 / 1024 }')"
