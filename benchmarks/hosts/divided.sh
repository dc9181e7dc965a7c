#!/usr/bin/env bash
# Decode context parallelism under vLLM on the GPUs of one host: the tokens of tiny models with one KV
# head, with windows and over latents, each in an engine of its own; and two requests of 64k tokens
# and 16 of 32k, by both backends in turn, and by attnlib without division.
#   benchmarks/hosts/divided.sh OUT GPUS LIMIT [tokens|rates]    with vLLM 0.26 and this package
# GPUS is a number of GPUs, or several such as "4 2", which are timed one beside the other; tokens are
# those of the first. All engines start together, and no call is timed while one of them starts or
# writes tokens. OUT keeps each result as it comes: a run that is ended keeps them. Nothing starts
# after LIMIT seconds, and nothing runs longer. MODELS names a folder of `tests/hosts/models.py`, TURNS
# a file that several runs may share.
set -u
out=$1 limit=$3 part=${4:-} here=$(dirname "$0") models=${MODELS:-$(mktemp -d)}
read -ra gpus <<< "$2"
export VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 TEST_VLLM_CPU=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn
mkdir -p "$out"
turns=${TURNS:-$out/turns}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
row() { # SECONDS LOG COMMAND...
  local left=$((limit - SECONDS))
  if ((left <= 0)); then
    echo "not run: ${*:3}"
    return
  fi
  timeout -s USR1 -k 3 "$((left < $1 ? left : $1))" "${@:3}" > "$out/$2" 2>&1 ||
    { echo "FAILED: ${*:3}"; tail -c 2000 "$out/$2"; }
  grep -as "^long" "$out/$2"
}
if [ "$part" != rates ]; then
  [ -d "$models/mqa" ] || row 150 models.log python "$here/../../tests/hosts/models.py" "$models" mqa gemma2-mqa deepseek
  python "$here/vllm_gpu_cases.py" "$models" "$out/cases" divided "${gpus[0]}"
  for case in "$out"/cases/*.json; do
    name=$(basename "$case" .json)
    row 150 "$name.log" flock --shared --close "$turns" \
      python "$here/../../tests/hosts/run_engine.py" "$case" "$out/tokens-$name.json" &
  done
fi
if [ "$part" != tokens ]; then
  runs=("CUSTOM ${gpus[0]} 1")
  for count in "${gpus[@]}"; do
    runs+=("CUSTOM $count $count" "FLASH_ATTN $count $count")
  done
  for run in "${runs[@]}"; do
    read -r backend count ranks <<< "$run"
    row 300 "$backend-$count-$ranks.log" python "$here/vllm_throughput.py" --backend "$backend" \
      --workloads long64k long32k --gpus "$count" --context-parallel "$ranks" --repetitions 3 \
      --max-model-len 66560 --memory 0.2 --cache-gib 8 --turns "$turns" \
      --model '{"num_key_value_heads": 1, "num_hidden_layers": 16}' --out "$out/results.jsonl" &
  done
fi
wait
if [ "$part" != rates ]; then
  python "$here/vllm_gpu_cases.py" "$models" "$out/cases" "$out"/tokens-*.json |
    tee "$out/tokens.txt"
fi
exit 0
