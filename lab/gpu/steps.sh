# shellcheck shell=bash
# The steps of a runner with a GPU: nvidia.sh, amd.sh and intel.sh `source steps.sh VENDOR [--dry-run]`.
#
#   lab/gpu/amd.sh               install, run every step below, write results into REPORT; the status is 1 if a step failed
#   lab/gpu/amd.sh --dry-run     print each step's command instead
#
#   NO_INSTALL=1            use PYTHON unchanged, fetch nothing: it must have torch, Triton and pytest;
#                           without pytest-xdist the tests run in one process
#   PYTHON, VENV, TORCH, TORCH_INDEX    as in the Makefile; AMD and Intel need TORCH_INDEX to install their torch
#   REPORT                  a folder (report)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VENDOR=$1
shift
DRY_RUN=
for argument; do
  case $argument in
    --dry-run) DRY_RUN=1 ;;
    *) echo "$0: got $argument, allowed: --dry-run" >&2; exit 2 ;;
  esac
done
REPORT=${REPORT:-report}
VENV=${VENV:-.venv}
if [ -n "${NO_INSTALL:-}" ]; then
  PYTHON=${PYTHON:-python3}
  export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
else
  INSTALL_WITH=${PYTHON:-python3}
  PYTHON=$VENV/bin/python
fi
unset LIGER_HW_BACKEND LIGER_HW_AUTOTUNE TRITON_INTERPRET # a runner tests the users' defaults
failed=()

# step NAME COMMAND...: run it, keep its output; after a failure the next steps still run
step() {
  local name=$1 began=$SECONDS
  shift
  if [ -n "$DRY_RUN" ]; then
    printf '%s:' "$name"
    printf ' %q' "$@"
    echo
    return
  fi
  echo "=== $name: $*"
  mkdir -p "$REPORT"
  if "$@" 2>&1 | tee "$REPORT/$name.txt"; then
    echo "=== $name: passed in $((SECONDS - began)) s"
  else
    echo "=== $name: FAILED in $((SECONDS - began)) s"
    failed+=("$name")
  fi
}

# must NAME COMMAND...: run a step that all others need; stop if it fails
must() {
  step "$@"
  if [ ${#failed[@]} -gt 0 ]; then
    echo "=== stopped: $1 failed" >&2
    exit 1
  fi
}

if [ -z "${NO_INSTALL:-}" ]; then
  must install make setup "ACCELERATOR=$VENDOR" "PYTHON=$INSTALL_WITH" "VENV=$VENV"
fi
[ -n "$DRY_RUN" ] || mkdir -p "$REPORT"/{evidence,doctor,bench}
must device "$PYTHON" lab/gpu/device.py "$VENDOR"
workers=(-n auto --dist loadgroup)
if [ -z "$DRY_RUN" ] && ! "$PYTHON" -c "import xdist" 2>/dev/null; then
  echo "=== no pytest-xdist here: the tests run in one process"
  workers=()
fi
step info "$PYTHON" -m liger_hw info
# tests that depend on the GPU; cpu.yml runs the others
tests=(tests/kernels tests/losses tests/test_device.py tests/test_dispatch.py tests/test_tracing.py tests/tuning
  tests/transformers/test_kernels_in_models.py)
step tests "$PYTHON" -m pytest "${workers[@]}" --needs-device --evidence "$REPORT/evidence/executed.json" "${tests[@]}"
# a GPU for each of two ranks; on one GPU these tests would run on the CPU
several='import sys, torch; sys.exit(torch.accelerator.device_count() < 2)'
if [ -n "$DRY_RUN" ] || "$PYTHON" -c "$several"; then
  ranks=(tests/test_sharding.py tests/transformers/test_tensor_parallel.py tests/transformers/test_engines.py)
  step ranks "$PYTHON" -m pytest "${workers[@]}" --needs-device "${ranks[@]}"
fi
step bench "$PYTHON" -m liger_hw bench rms_norm swiglu cross_entropy fused_linear_cross_entropy \
  --shapes 8192x4096 8192x14336 8192x32000 8192x4096x128256 --modes full --against torch --report "$REPORT/bench"
step doctor "$PYTHON" -m liger_hw doctor --report "$REPORT/doctor"
step tables "$PYTHON" -m liger_hw tune --check
step evidence "$PYTHON" -m liger_hw evidence "$REPORT/evidence" "$REPORT/doctor" "$REPORT/bench" --report "$REPORT"

if [ ${#failed[@]} -gt 0 ]; then
  echo "=== failed: ${failed[*]}"
  exit 1
fi
[ -n "$DRY_RUN" ] || echo "=== all passed in $SECONDS s; results: $REPORT/evidence.html, $REPORT/bench/bench.html"
