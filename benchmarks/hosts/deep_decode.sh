#!/usr/bin/env bash
# Decode of 32 requests of 16 000 tokens under vLLM: attnlib, then FLASH_ATTN, on the same GPU.
# About three minutes on an H200, most of which is prefill.
#   benchmarks/hosts/deep_decode.sh OUT auto|fp8 [WORKLOADS...]
# with vLLM 0.26 and this package importable.
set -u
out=$1 kv=$2 here=$(dirname "$0")
workloads=("${@:3}")
[ ${#workloads[@]} -gt 0 ] || workloads=(deep deep-uncached)
share=0.8 # of the GPU's memory: 16 GB of weights, 68 GB of bfloat16 keys and values
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
wait_for_memory() { # a process that was just killed still holds its memory for some seconds
  timeout 60 python - "$share" << 'END' || echo "the GPU's memory is still in use"
import sys
import time
import torch
while True:
    free, total = torch.cuda.mem_get_info()
    if free >= (float(sys.argv[1]) + 0.01) * total:
        break
    print(f"waiting: {free >> 20} of {total >> 20} MiB are free", flush=True)
    time.sleep(2)
END
}
for backend in CUSTOM FLASH_ATTN; do
  start=$SECONDS
  wait_for_memory
  # --foreground: one group of processes, so that a limit of the caller ends the engine, too.
  timeout --foreground --kill-after 5 150 python "$here/vllm_throughput.py" --backend "$backend" \
    --kv-cache-dtype "$kv" --memory "$share" --workloads "${workloads[@]}" \
    --repetitions "${REPETITIONS:-3}" --out "$out/results.jsonl" --profile "$out/profile.jsonl" \
    > "$out/$backend.log" 2>&1 || { echo "FAILED: $backend"; tail -c 1500 "$out/$backend.log"; }
  grep -a "^deep" "$out/$backend.log"
  echo "-- $backend: $((SECONDS - start)) s"
done
