#!/usr/bin/env bash
# The check of a GPU (benchmarks/gpu_check.py), in 8 minutes at most and without a network. The result is gpu_check.json in OUT (default: here).
# PYTHON names the interpreter, whose PyTorch has to see the GPU (default: the project's .venv, else python3). Arguments go on: --engine, --device cpu --small
# LIMIT: the seconds after which it is ended (default 480).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -x "$python" ]] || python=python3
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
exec timeout --kill-after=10 "${LIMIT:-480}" "$python" "$root/benchmarks/gpu_check.py" --out "${OUT:-.}/gpu_check.json" "$@"
