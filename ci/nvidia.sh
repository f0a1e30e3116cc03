#!/usr/bin/env bash
# A runner with an NVIDIA GPU: see steps.sh for --dry-run, NO_INSTALL and the rest.
# shellcheck source=ci/steps.sh
source "$(dirname "$0")/steps.sh" nvidia "$@"
