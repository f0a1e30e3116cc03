#!/usr/bin/env bash
# Run all steps on a runner with an AMD GPU; steps.sh explains --dry-run, NO_INSTALL and the rest. TORCH_INDEX is the
# index of PyTorch's ROCm builds.
# shellcheck source=lab/gpu/steps.sh
source "$(dirname "$0")/steps.sh" amd "$@"
