#!/usr/bin/env bash
# Run all steps on a runner with an Intel GPU; steps.sh explains --dry-run, NO_INSTALL and the rest. TORCH_INDEX is the
# index of PyTorch's XPU builds.
# oneAPI's compiler compiles Triton's Intel driver at its first use.
ONEAPI=${ONEAPI:-/opt/intel/oneapi/setvars.sh}
if [ -e "$ONEAPI" ]; then
  # shellcheck source=/dev/null
  source "$ONEAPI" --force >/dev/null
fi
# shellcheck source=lab/gpu/steps.sh
source "$(dirname "$0")/steps.sh" intel "$@"
