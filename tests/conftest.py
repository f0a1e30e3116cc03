import os
import random
import zlib
from pathlib import Path

import fast_interpreter  # noqa: F401
import pytest
import torch
from poisoned import poisoned
from ranks import Ranks

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.backends import ARCHITECTURES, VENDORS, detected
from liger_hw.hooks import hooks
from liger_hw.patching import pins

# The other architectures of the compile matrix are these but for the last stages of compilation: sm80 has sm90's code
# and sm120's matrix instructions.
ONE_OF_EACH_KIND = ("sm90", "sm100", "sm120", "gfx942", "gfx1100", "gfx1201")
ARCHS_OF_TESTS = ("backend", "compiled_arch")  # the fixtures that name one
WORKERS_A_GPU = 8  # they share its memory, and compile on the host

if not torch.accelerator.is_available():
    # torch's own writes down the stack for three kinds of GPU that never start: 3 ms a call under pytest
    torch.manual_seed = torch.random.manual_seed = torch.default_generator.manual_seed


def pytest_addoption(parser):
    parser.addoption("--evidence", type=Path, metavar="FILE", help="write which op was right on which backend as JSON")
    parser.addoption(
        "--archs",
        choices=("turns", "kinds", "all"),
        default="kinds",
        help="what each test of kernels interprets or compiles for: one vendor or kind of architecture, in turn; every "
        "vendor and one architecture of each kind; every architecture",
    )
    parser.addoption("--needs-device", action="store_true", help="fail where no accelerator is, instead of skipping")
    parser.addoption("--models", choices=("few", "all"), default="few", help="models of transformers to patch")
    parser.addoption("--shard", default="1/1", metavar="I/N", help="the I-th of N parts of --models")


def pytest_configure(config):
    if config.getoption("--needs-device"):
        if interpreting():
            raise pytest.UsageError("--needs-device: TRITON_INTERPRET is set, so no test would run on a device")
        if not torch.accelerator.is_available():
            raise pytest.UsageError("--needs-device: torch finds no accelerator here, so every test of one would skip")
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if worker and not interpreting() and torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        torch.accelerator.set_device_index(int(worker.removeprefix("gw")) % torch.accelerator.device_count())
    if worker and not torch.accelerator.is_available():
        # workers with a thread for every core wait for each other: 156 CPU s for two files on two cores, now 121
        threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of programs that tests start
    if config.getoption("--evidence"):
        config.pluginmanager.register(_Evidence(config), "evidence")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    if not interpreting() and torch.accelerator.is_available():
        return min(os.cpu_count() or 1, WORKERS_A_GPU * torch.accelerator.device_count())
    return None


class _Evidence:
    """Count parity checks in this process and in xdist's workers; write evidence at the end."""

    def __init__(self, config):
        from liger_lab.levels import evidence

        self.config, self.evidence, self.recorder, self.tests = config, evidence, evidence.Recorder(), {}
        self.level = evidence.INTERPRETED if interpreting() else evidence.EXECUTED
        self.observing = hooks.observe_checks(self.recorder.add)
        self.observing.__enter__()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.outcome] = self.tests.get(report.outcome, 0) + 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.recorder.load(getattr(node, "workeroutput", {}).get("evidence", []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        self.observing.__exit__(None, None, None)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["evidence"] = self.recorder.dump()
            return
        here = (
            torch.accelerator.current_accelerator(check_available=True)
            if self.level == self.evidence.EXECUTED
            else None
        )
        run, facts = self.evidence.about(self.level, here)
        file = self.config.getoption("--evidence")
        arguments = [word.replace(str(file), file.name) for word in map(str, self.config.invocation_params.args)]
        facts |= {"command": " ".join(["pytest", *arguments]), "tests": self.tests}
        self.evidence.write(file, {run: facts}, self.recorder.cells(run))


def _backends(config):
    """The backends that can run here, or one skip that says why none can."""
    forced = os.environ.get("LIGER_HW_BACKEND")
    if forced:
        return [forced]
    if interpreting() and config.getoption("--archs") == "all":
        return list(ARCHITECTURES)
    if interpreting():
        return list(VENDORS)
    if torch.accelerator.is_available():
        return [detected(torch.device(torch.accelerator.current_accelerator(check_available=True).type, 0)).vendor]
    return [pytest.param(None, marks=pytest.mark.skip(reason="no accelerator here and TRITON_INTERPRET is not set"))]


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _backends(metafunc.config), indirect=True)
    if "compiled_arch" in metafunc.fixturenames:
        from liger_lab.levels import compiled

        every = metafunc.config.getoption("--archs") == "all"
        metafunc.parametrize("compiled_arch", compiled.ARCHS if every else ONE_OF_EACH_KIND)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--archs") == "turns":
        kept = _in_turn(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _in_turn(items):
    """Drop items that differ from a kept one only in backend or architecture.

    The same items every time, each backend and architecture as often as any other within a test function.
    """
    functions = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        others = frozenset((name, id(value)) for name, value in params.items() if name not in ARCHS_OF_TESTS)
        functions.setdefault((item.parent, item.originalname), {}).setdefault(others, []).append(item)
    kept = set()
    for (_, name), groups in functions.items():
        drawn, turns = random.Random(name), list(range(len(groups)))
        drawn.shuffle(turns)  # in order, every third dtype would meet every third vendor
        first = drawn.randrange(len(items))
        kept |= {group[(first + turn) % len(group)] for group, turn in zip(groups.values(), turns)}
    return kept


@pytest.fixture
def backend(request):
    """The name of a backend that runs Triton kernels here."""
    return request.param


@pytest.fixture
def device():
    """Where that backend's tensors live."""
    return (
        "cpu"
        if interpreting() or not torch.accelerator.is_available()
        else torch.accelerator.current_accelerator(check_available=True).type
    )


@pytest.fixture(autouse=True)
def seed(request):
    """Seed each test by its name: the same random numbers in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def nothing_forced():
    """Hide LIGER_HW_BACKEND from tests that do not use the fixture `backend`."""
    with use_backend(None):
        yield


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    # a patched module would take `new_empty` for a program's own method of tensors, and run its own forward
    members, known, base = pins.TENSORS[0]
    monkeypatch.setattr(pins, "TENSORS", [(members, known | {"new_empty"}, base), *pins.TENSORS[1:]])


@pytest.fixture(scope="session")
def ranks():
    """Run a function on processes of their own: `ranks(2, function, *args)`."""
    pools = {}

    def run(count, function, *args, backend=None):
        pool = pools.get(count)
        if pool is None or not pool.alive():
            pool = pools[count] = Ranks(count)
        pool.run(function, args, backend)

    yield run
    for pool in pools.values():
        pool.stop()
