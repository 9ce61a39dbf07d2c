#!/usr/bin/env bash
# Does training work on this GPU, and how fast? Six models, one table line each, in some minutes and without a network.
#
#     benchmarks/gpu_smoke.sh [--only WORD] [--at-once N]      on a machine with one CUDA GPU
#     benchmarks/gpu_smoke.sh --tiny                           the same on the CPU, with tiny models
#
# PYTHON names the interpreter that has Entasis; the clone's .venv unless given. TMPDIR needs 30 GB.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-$here/../.venv/bin/python}"
if [[ -z "${PYTHON:-}" && ! -x "$python" ]]; then
    python=python3
fi

work="$(mktemp -d -t gpu-smoke.XXXXXX)"
trap 'rm -rf -- "$work"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$work/compiled"
"$python" "$here/gpu_smoke.py" --folder "$work" "$@"
