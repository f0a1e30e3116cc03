"""`liger-hw tune` from a checkout: `python tools/tune.py --output liger_hw/backends/nvidia-sm90.json`."""

import sys

from liger_hw.cli import main

sys.exit(main(["tune", *sys.argv[1:]]))
