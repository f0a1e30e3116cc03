import sys

from liger_hw.cli import main

if __name__ == "__main__":  # processes that compile import this file again
    sys.exit(main())
