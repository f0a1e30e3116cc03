#!/usr/bin/env bash
# A runner with an AMD GPU: see steps.sh for --dry-run, NO_INSTALL and the rest. TORCH_INDEX names the ROCm builds.
# shellcheck source=ci/steps.sh
source "$(dirname "$0")/steps.sh" amd "$@"
