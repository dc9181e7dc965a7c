#!/usr/bin/env bash
# Everything that is measured under vLLM on one GPU; about six minutes on an H200.
#   benchmarks/hosts/h200.sh OUT      with vLLM 0.26 and this package importable
set -u
out=$1 here=$(dirname "$0") models=$(mktemp -d)
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 TEST_VLLM_CPU=0
run() { # SECONDS COMMAND...: a limit of its own, so that one failure does not end the series
  local start=$SECONDS
  timeout "$@" > "$out/last.log" 2>&1 || { echo "FAILED ($?): ${*:2}"; tail -c 1500 "$out/last.log"; }
  grep -v "WARNING\|INFO\|Loading\|Capturing" "$out/last.log" | grep -a "tokens\|CUSTOM\|FLASH" | tail -20
  echo "-- $((SECONDS - start)) s"
}
throughput() { # BACKEND MODE KV WORKLOADS...
  run 150 python "$here/vllm_throughput.py" --backend "$1" --mode "$2" --kv-cache-dtype "$3" \
    --workloads "${@:4}" --out "$out/results.jsonl"
}
{ nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python -c "import torch, triton, vllm; print('torch', torch.__version__, 'triton', triton.__version__, 'vllm', vllm.__version__)"
} 2> /dev/null | tee "$out/machine.txt"
python "$here/../../tests/hosts/models.py" "$models"
python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json"
run 150 python "$here/../../tests/hosts/run_engine.py" "$out/cases.json" "$out/tiny.json"
python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json" "$out/tiny.json" | tee "$out/tiny.txt"
for backend in CUSTOM FLASH_ATTN; do throughput $backend graphs auto one short serve long deep; done
for backend in CUSTOM FLASH_ATTN; do throughput $backend graphs fp8 deep; done
for backend in CUSTOM FLASH_ATTN; do throughput $backend eager auto one short serve long; done
rm -f "$out/last.log" "$out/cases.json"
