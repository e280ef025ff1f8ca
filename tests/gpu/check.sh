#!/usr/bin/env bash
# Checks the engine on a GPU, where torch, transformers, peft and pytest are and nothing else of ours, in at most eight
# minutes: first what it computes, against the CPU in fp32, then how fast it is, as JSON lines.
#
#   tests/gpu/check.sh                              on the first CUDA device
#   tests/gpu/check.sh --device cpu --size tiny     to try the script itself
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=. COLLM_CHECK_DEVICE=cuda TOKENIZERS_PARALLELISM=false
[ "${1:-}" != --device ] || export COLLM_CHECK_DEVICE="$2"
# Neither the project's pytest options nor its fixtures: they need what is not there.
timeout 220 python -m pytest -q -c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider \
    -W ignore tests/gpu/test_gpu.py
exec timeout 250 python -m tests.gpu.measure "$@"
