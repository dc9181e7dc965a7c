#!/usr/bin/env bash
# Tensor parallelism and decode context parallelism under vLLM on two GPUs; about three minutes.
#   benchmarks/hosts/two_gpus.sh OUT      with vLLM 0.26 and this package importable
set -u
out=$1 here=$(dirname "$0") models=$(mktemp -d)
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 TEST_VLLM_CPU=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
python "$here/../../tests/hosts/models.py" "$models" 2> /dev/null | grep mqa
python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json" two
timeout 100 python "$here/../../tests/hosts/run_engine.py" "$out/cases.json" "$out/tiny.json" \
  > "$out/tiny.log" 2>&1 || tail -c 2000 "$out/tiny.log"
python "$here/vllm_gpu_cases.py" "$models" "$out/cases.json" "$out/tiny.json" | tee "$out/tiny.txt"
model='{"num_key_value_heads": 1, "num_hidden_layers": 16}'
for run in "CUSTOM 2" "CUSTOM 1" "FLASH_ATTN 2"; do
  read -r backend ranks <<< "$run"
  timeout 90 python "$here/vllm_throughput.py" --backend "$backend" --workloads long64k \
    --gpus 2 --context-parallel "$ranks" --max-model-len 66560 --model "$model" \
    --out "$out/results.jsonl" > "$out/last.log" 2>&1 || tail -c 2000 "$out/last.log"
  grep -a "^long64k" "$out/last.log"
done
rm -f "$out/last.log" "$out/cases.json"
