#!/usr/bin/env bash
# Decode of 32 requests of 16 000 tokens under vLLM: attnlib, then FLASH_ATTN, on the same GPU. About
# two minutes on an H200.
#   benchmarks/hosts/deep_decode.sh OUT auto|fp8      with vLLM 0.26 and this package importable
set -u
out=$1 kv=$2 here=$(dirname "$0")
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
for backend in CUSTOM FLASH_ATTN; do
  start=$SECONDS
  timeout 110 python "$here/vllm_throughput.py" --backend "$backend" --kv-cache-dtype "$kv" \
    --workloads deep --repetitions 3 --out "$out/results.jsonl" --profile "$out/profile.jsonl" \
    > "$out/$backend.log" 2>&1 || { echo "FAILED: $backend"; tail -c 1500 "$out/$backend.log"; }
  grep -a "^deep" "$out/$backend.log"
  echo "-- $backend: $((SECONDS - start)) s"
done
