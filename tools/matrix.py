"""`liger-hw matrix` from a checkout: `python tools/matrix.py --compile --archs gfx942 --report /tmp/report`."""

import sys

from liger_hw.cli import main

if __name__ == "__main__":  # the processes that compile import this file again
    sys.exit(main(["matrix", *sys.argv[1:]]))
