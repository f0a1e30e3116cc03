"""What stands in for Triton's launcher makes the call that it would have made."""

from types import SimpleNamespace

import pytest

from liger_hw.launch import _runner

NO_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}


class Flat:
    """As Triton 3.6's: whatever follows the kernel's handle is handed on in order."""

    def __init__(self, **sizes):
        self.__dict__.update(NO_SCRATCH | sizes)
        self.made, self.asked = [], 0

    def launch(self, *arguments):
        self.made.append(arguments)

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x, y, z, stream, function, False, None, *arguments)


class Nested(Flat):
    """As Triton 3.9's: the kernel's arguments are one tuple."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.asked += 1
        self.launch(False, x, y, z, stream, function, metadata, launch_metadata, enter, leave, [], arguments)


class Computes(Flat):
    """One that does something with a grid, which no mark can stand for."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x * y * z, stream, function, *arguments)


class Drops(Flat):
    """One that keeps something to itself, and tells it otherwise."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.stream = stream
        self.launch(x, y, z, function, *arguments)


@pytest.mark.parametrize(
    ("launcher", "around"),
    [(Flat(), 0), (Nested(), 0), (Computes(), 1), (Drops(), 1), (Flat(global_scratch_size=8), 1)],
    ids=["flat", "nested", "computes", "drops", "scratch"],
)
def test_the_same_call(launcher, around):
    compiled = SimpleNamespace(run=launcher, function=11, packed_metadata=(4, 1, 32))
    run = _runner(compiled, (128, 2))
    launcher.made.clear()
    launcher.asked = 0
    run(5, 6, 1, 99, (1000, None, 0.5))
    assert launcher.asked == around
    launcher(5, 6, 1, 99, 11, (4, 1, 32), None, None, None, 1000, None, 0.5, 128, 2)
    assert len(launcher.made) == 2 and launcher.made[0] == launcher.made[1]


def test_no_launcher_at_all():
    """As tests have it: what is asked for is the compiled kernel alone."""
    _runner(SimpleNamespace(run=None, function=None, packed_metadata=None), ())
