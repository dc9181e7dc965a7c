#!/usr/bin/env bash
# Decode context parallelism under vLLM on the GPUs of one host: the tokens of tiny models with one KV
# head, with windows and over latents, then both backends in turn, with two requests of 64k tokens
# and 16 of 32k. About eight minutes. No row starts after LIMIT seconds, and none runs longer.
#   benchmarks/hosts/divided.sh OUT GPUS LIMIT      with vLLM 0.26 and this package importable
set -u
out=$1 gpus=$2 limit=$3 here=$(dirname "$0") models=$(mktemp -d)
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 TEST_VLLM_CPU=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
row() { # SECONDS LOG COMMAND...
  local left=$((limit - SECONDS))
  if ((left <= 0)); then
    echo "not run: ${*:3}"
    return
  fi
  timeout "$((left < $1 ? left : $1))" "${@:3}" > "$out/$2" 2>&1 ||
    { echo "FAILED: ${*:3}"; tail -c 2000 "$out/$2"; }
}
row 150 models.log python "$here/../../tests/hosts/models.py" "$models"
python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json" divided "$gpus"
row 300 tiny.log python "$here/../../tests/hosts/run_engine.py" "$out/cases.json" "$out/tiny.json"
[ -f "$out/tiny.json" ] &&
  python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json" "$out/tiny.json" | tee "$out/tiny.txt"
model='{"num_key_value_heads": 1, "num_hidden_layers": 16}'
for run in "CUSTOM $gpus" "FLASH_ATTN $gpus" "CUSTOM $gpus" "FLASH_ATTN $gpus" "CUSTOM 1"; do
  read -r backend ranks <<< "$run"
  row 150 last.log python "$here/vllm_throughput.py" --backend "$backend" \
    --workloads long64k long32k --gpus "$gpus" --context-parallel "$ranks" --repetitions 3 \
    --max-model-len 66560 --model "$model" --out "$out/results.jsonl"
  grep -as "^long" "$out/last.log"
done
rm -f "$out/last.log" "$out/cases.json"
exit 0
