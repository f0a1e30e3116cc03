"""`liger-hw bench` from a checkout: `python tools/bench.py rms_norm --report /tmp/report`."""

import sys

from liger_hw.cli import main

if __name__ == "__main__":  # the processes that compile import this file again
    sys.exit(main(["bench", *sys.argv[1:]]))
