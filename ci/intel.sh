#!/usr/bin/env bash
# A runner with an Intel GPU: see steps.sh for --dry-run, NO_INSTALL and the rest. TORCH_INDEX names the XPU builds.
# Triton's Intel driver is compiled at its first use, by oneAPI's compiler.
ONEAPI=${ONEAPI:-/opt/intel/oneapi/setvars.sh}
if [ -e "$ONEAPI" ]; then
  # shellcheck source=/dev/null
  source "$ONEAPI" --force >/dev/null
fi
# shellcheck source=ci/steps.sh
source "$(dirname "$0")/steps.sh" intel "$@"
