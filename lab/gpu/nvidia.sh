#!/usr/bin/env bash
# Run all steps on a runner with an NVIDIA GPU; steps.sh explains --dry-run, NO_INSTALL and the rest.
# shellcheck source=lab/gpu/steps.sh
source "$(dirname "$0")/steps.sh" nvidia "$@"
