#!/usr/bin/env bash
# Throughput of attnlib and of FLASH_ATTN under vLLM, at the same time on two GPUs of one host, then
# with the GPUs exchanged, so that differences between the GPUs cancel. About six minutes.
#   benchmarks/hosts/side_by_side.sh OUT      with vLLM 0.26 and this package importable
set -u
out=$1 here=$(dirname "$0")
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
run() { # GPU BACKEND MODE KV REPETITIONS WORKLOADS...
  CUDA_VISIBLE_DEVICES=$1 timeout -s USR1 -k 3 150 python "$here/vllm_throughput.py" --backend "$2" --mode "$3" \
    --kv-cache-dtype "$4" --repetitions "$5" --workloads "${@:6}" --out "$out/results.jsonl" \
    > "$out/$1.log" 2>&1 || { echo "FAILED: $*"; tail -c 1500 "$out/$1.log"; }
  grep -a "$2 $3 $4" "$out/$1.log"
}
pair() { # MODE KV REPETITIONS WORKLOADS...
  for first in 0 1; do
    local start=$SECONDS
    run "$first" CUSTOM "$@" &
    run "$((1 - first))" FLASH_ATTN "$@"
    wait
    echo "-- attnlib on GPU $first: $((SECONDS - start)) s"
  done
}
pair graphs auto 2 one short serve long deep
pair eager auto 2 one short serve long
pair graphs fp8 2 deep
rm -f "$out"/[01].log
