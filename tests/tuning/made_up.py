"""A kernel with a configuration of its own, and a winner of it."""

import json

import pytest

from liger_hw import tuning
from liger_hw._triton import AVAILABLE, tl, triton
from liger_hw.backends import nvidia
from liger_hw.kernels import load_all
from liger_hw.tuning import Config, tuned

NEEDS_TRITON = pytest.mark.skipif(
    not AVAILABLE, reason="tables hold only for a version of Triton, and there is none here"
)
H200 = nvidia.ARCHS["sm90"]
FACTOR = 3
load_all()


@triton.jit
def _twice(x):
    return FACTOR * x


@triton.jit
def made_up(X, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, COLS)
    tl.store(X + at, _twice(tl.load(X + at)))


@tuned
def made_up_config(cols, itemsize, device):
    return Config({"ROWS": 2, "COLS": cols}, num_warps=4, programs=2)


del tuning.choice.CONFIGS["made_up"]  # it is there for the tests below alone


def entry(**changes):
    found = Config({"ROWS": 4, "COLS": 512}, num_warps=8, device=H200)
    return tuning.search.measured_entry(made_up_config, found, 1e-3, 2e-3) | changes


KEY = made_up_config.key(1024, 2)


def ship(table):
    tuning.entries.shipped_file(H200).write_text(json.dumps(table))
    tuning.choice.forget()
