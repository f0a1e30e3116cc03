"""Run the command `liger-hw`."""

import sys

from liger_hw.cli import main

if __name__ == "__main__":  # the processes that compile import this file again
    sys.exit(main())
