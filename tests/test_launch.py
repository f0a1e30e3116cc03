"""Launch twice: C receives the same arguments from Triton's launcher and from ours.

Triton's own stack compiles and launches, over a driver without a device: the launchers that its wheel ships for NVIDIA
and AMD, a stand-in with the form of Intel's, and a recorder in the place of the function in C.
"""

import contextlib
import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_hw import backends, launch, use_backend
from liger_hw._triton import AVAILABLE, interpreting, tl, triton
from liger_hw.backends import VENDORS
from liger_hw.dispatch import OPS
from liger_hw.hooks import hooks
from liger_hw.shortcut import shortcut
from liger_hw.tuning import Config
from liger_lab.cases import CASES, step, training_cases
from liger_lab.levels import evidence

NO_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}


class Flat:
    """As Triton 3.6's: C receives the kernel's arguments one by one, after all others."""

    def __init__(self, **sizes):
        self.__dict__.update(NO_SCRATCH | sizes)
        self.calls, self.asked = [], 0

    def launch(self, *arguments):
        self.calls.append(arguments)

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x, y, z, stream, function, False, None, *arguments)


class Nested(Flat):
    """As Triton 3.9's: the kernel's arguments are one tuple."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.asked += 1
        self.launch(False, x, y, z, stream, function, metadata, launch_metadata, enter, leave, self.calls, arguments)


class Computes(Flat):
    """Multiplies the grid, which no sentinel allows."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x * y * z, stream, function, *arguments)


class Drops(Flat):
    """Keeps the stream and tells C elsewhere."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.stream = stream
        self.launch(x, y, z, function, *arguments)


class Twice(Flat):
    """Pass C one argument twice: the right number of arguments, but wrong ones."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x, y, y, stream, function, False, *arguments)


class Swaps(Flat):
    """Gives C the kernel's arguments in another order."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, first, *rest):
        self.asked += 1
        self.launch(x, y, z, stream, function, metadata, launch_metadata, enter, leave, *rest, first)


class Converts(Flat):
    """Gives C another object for an argument of one type only, which no sentinel has."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x, y, z, stream, function, *(str(a) if isinstance(a, float) else a for a in arguments))


class Counts(Flat):
    """Gives C something new at every launch."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.asked += 1
        self.launch(x, y, z, stream, function, object(), *arguments)


class OneTuple(Flat):
    """As Intel's (driver.py of intel-xpu-backend-for-triton): C receives one tuple of everything."""

    def __call__(self, *arguments):
        self.asked += 1
        self.launch(arguments)


UNFORESEEN = [Computes, Drops, Twice, Swaps, Converts, Counts, OneTuple]


@pytest.mark.parametrize("launcher", [Flat(), Nested()], ids=lambda launcher: type(launcher).__name__)
def test_a_direct_call_is_the_launchers(launcher):
    compiled = SimpleNamespace(run=launcher, function=11, packed_metadata=(4, 1, 32))
    direct = shortcut(compiled, (128, 2), (1, 1, 1), 99, (1001, None, 0.25))
    assert launcher.calls == []  # asked of a copy
    launcher.asked = 0
    direct(5, 6, 1, 99, (1000, None, 0.5))
    assert launcher.asked == 0
    launcher(5, 6, 1, 99, 11, (4, 1, 32), None, None, None, 1000, None, 0.5, 128, 2)
    assert len(launcher.calls) == 2 and launcher.calls[0] == launcher.calls[1]


@pytest.mark.parametrize(
    "launcher",
    [*(form() for form in UNFORESEEN), Flat(global_scratch_size=8), Nested(profile_scratch_size=8), None, print],
    ids=lambda launcher: f"{type(launcher).__name__} {sum(getattr(launcher, name, 0) for name in NO_SCRATCH)}",
)
def test_no_direct_call(launcher):
    compiled = SimpleNamespace(run=launcher, function=11, packed_metadata=(4, 1, 32))
    assert shortcut(compiled, (128, 2), (1, 1, 1), 99, (1000, None, 0.5)) is None
    assert not getattr(launcher, "calls", [])


# through the whole of `launch` ---------------------------------------------------------------------------------------

needs_compilers = pytest.mark.skipif(not AVAILABLE or interpreting(), reason="compiles: needs Triton's wheel")
# the wheel has no compiler of Intel: another makes the code that nobody runs
TARGETS = {"nvidia": ("cuda", 90, 32), "amd": ("hip", "gfx942", 64), "intel": ("cuda", 90, 32)}


@triton.jit
def scale(X, WEIGHT, OUT, rows, odd, factor, cols: tl.constexpr, COLS: tl.constexpr):
    at = tl.program_id(0) * cols + tl.arange(0, COLS)
    x = tl.load(X + at, at < rows * cols) * factor + odd
    if WEIGHT is not None:
        x *= tl.load(WEIGHT + at)
    tl.store(OUT + at, x, at < rows * cols)


class XPULauncher:
    """A stand-in for Intel's: https://github.com/intel/intel-xpu-backend-for-triton, third_party/intel/backend."""

    def __init__(self, src, metadata):
        self.launch = triton.runtime.driver.active.utils.launch

    def __call__(self, *args):
        self.launch(args)


class GPU:
    """Fake Triton's driver of a GPU; `calls` are the arguments for C."""

    def __init__(self, vendor, monkeypatch, launcher=None):
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        self.calls, device = [], next(iter(VENDORS[vendor].ARCHS.values()))
        self.utils = SimpleNamespace(
            launch=self.record, build_signature_metadata=tuple, unload_module=lambda module: None,
            load_binary=lambda *args: ("module", 4242, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 2**16},
        )  # fmt: skip
        self.launcher_cls = launcher or XPULauncher
        if vendor != "intel":
            module = importlib.import_module(f"triton.backends.{vendor}.driver")
            self.launcher_cls = launcher or {"nvidia": "CudaLauncher", "amd": "HIPLauncher"}[vendor]
            if isinstance(self.launcher_cls, str):
                self.launcher_cls = getattr(module, self.launcher_cls)
            monkeypatch.setattr(module, "PyKernelArg", SimpleNamespace, raising=False)
            # Triton 3.6 writes a function in C for every kernel
            own = SimpleNamespace(launch=self.record)
            monkeypatch.setattr(module, "compile_module_from_src", lambda **source: own, raising=False)
            monkeypatch.setattr(module, "library_dirs", list, raising=False)
            monkeypatch.setattr(module, "make_launcher", lambda *facts: "", raising=False)
        self.get_current_target = lambda: GPUTarget(*TARGETS[vendor])
        self.get_current_device, self.get_current_stream = lambda: 0, lambda index: 7
        monkeypatch.setattr(driver, "_active", self)
        monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
        monkeypatch.setitem(backends._devices, torch.device("cpu"), device)
        for name, value in {"_kernels": {}, "_compiled": {}, "_runtime": launch._Runtime()}.items():
            monkeypatch.setattr(launch, name, value)
        self.config = Config({"COLS": 64}, num_warps=1, device=VENDORS["nvidia"].ARCHS["sm90"])
        self.x, self.out = torch.ones(4, 64), torch.empty(4, 64)

    def record(self, *arguments):
        self.calls.append(arguments)

    def launch(self, rows=4):
        launch.launch(scale, (4, 1, 1), self.config, self.x, None, self.out, rows, 3, 0.5, 64)


@pytest.fixture
def gpu(monkeypatch):
    yield lambda *args: GPU(*args[:1], monkeypatch, *args[1:])
    for compiled in launch._compiled.values():
        compiled.module = None  # which it would ask the driver to unload
    scale.device_caches.clear()


def values(arguments):
    """Return the arguments as C reads them: tensors as addresses, empty hooks as None."""
    if isinstance(arguments, (tuple, list)):
        return [values(argument) for argument in arguments]
    if torch.is_tensor(arguments):
        return arguments.data_ptr()
    no_hooks = (triton.knobs.HookChain, triton.compiler.LazyDict)
    return None if isinstance(arguments, no_hooks) else arguments


def flat(arguments):
    for argument in arguments:
        yield from flat(argument) if isinstance(argument, (tuple, list)) else (argument,)


def hands_over_tensors(arguments):
    return any(torch.is_tensor(argument) for argument in flat(arguments))


@needs_compilers
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_second_launch_passes_c_the_same_arguments(vendor, gpu):
    gpu = gpu(vendor)
    gpu.launch()
    gpu.launch()
    gpu.launch(rows=8)
    first, second, third = gpu.calls
    assert hands_over_tensors(first) and values(first) == values(second)
    assert hands_over_tensors(second) != VENDORS[vendor].LAUNCHER_SHORTCUT
    assert [pair for pair in zip(flat(values(first)), flat(values(third))) if pair[0] != pair[1]] == [(4, 8)]


@needs_compilers
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_direct_call_passes_c_the_arguments_of_the_wheels_launcher(vendor, gpu, monkeypatch):
    """AMD's too, though launches do not take it before it was executed there."""
    gpu = gpu(vendor)
    monkeypatch.setattr(VENDORS[vendor], "LAUNCHER_SHORTCUT", True)
    gpu.launch()
    gpu.launch()
    first, second = gpu.calls
    assert values(first) == values(second) and not hands_over_tensors(second)


@needs_compilers
@pytest.mark.parametrize("form", UNFORESEEN, ids=lambda form: form.__name__)
def test_a_launcher_of_an_unforeseen_form_is_called(form, gpu, monkeypatch):
    class Launcher(form):
        def __init__(self, src, metadata):
            super().__init__()
            self.calls = calls

    calls, gpu = [], gpu("nvidia", Launcher)
    gpu.launch()
    gpu.launch()
    first, second = (list(flat(call)) for call in calls)
    assert len(first) == len(second) and hands_over_tensors(first) and hands_over_tensors(second)
    assert [torch.is_tensor(x) and x is y for x, y in zip(first, second)].count(True) == 2


@needs_compilers
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("how", ["added", "replaced"])
def test_tritons_hooks_run(name, how, gpu, monkeypatch):
    gpu, hook = gpu("nvidia"), lambda metadata: None
    gpu.launch()
    gpu.launch()
    assert not hands_over_tensors(gpu.calls[-1])
    chain = getattr(triton.knobs.runtime, name)
    if how == "added":
        chain.add(hook)
        try:
            gpu.launch()
        finally:
            chain.remove(hook)
        assert any(argument is chain for argument in gpu.calls[-1])
    else:
        with monkeypatch.context() as replaced:
            replaced.setattr(triton.knobs.runtime, name, hook)
            gpu.launch()
        assert any(argument is hook for argument in gpu.calls[-1])
    gpu.launch()
    assert len(gpu.calls) == 4 and not hands_over_tensors(gpu.calls[-1])


@needs_compilers
def test_tensors_of_another_device_than_the_current_one(gpu, monkeypatch):
    current = SimpleNamespace(index=5)

    @contextlib.contextmanager
    def device_index(index):
        before, current.index = current.index, index
        yield
        current.index = before

    gpu = gpu("nvidia")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current.index)
    monkeypatch.setattr(gpu, "get_current_stream", lambda index: (index, current.index))
    gpu.launch()
    gpu.launch()
    first, second = gpu.calls
    index = gpu.x.get_device()
    assert (index, index) in second and not hands_over_tensors(second) and current.index == 5


def test_only_executed_vendors_bypass_tritons_launcher_and_ops():
    """A vendor's constants may be set once its kernels ran on its hardware."""
    _, cells = evidence.read([Path(__file__).parent.parent / "lab/results" / "evidence"])
    executed = {cell.backend.partition(":")[0] for cell in cells if cell.level == evidence.EXECUTED and cell.passed}
    assert {name for name, vendor in VENDORS.items() if vendor.LAUNCHER_SHORTCUT or vendor.INLINED_LAUNCHES} <= executed


# hooks ---------------------------------------------------------------------------------------------------------------


@needs_compilers
def test_replaced_launches_launch_nothing(gpu):
    gpu, recorded, inner = gpu("nvidia"), [], []
    gpu.launch()
    with hooks.replace_launches(lambda *launched: recorded.append(launched)):
        gpu.launch()
        with hooks.replace_launches(lambda *launched: inner.append(launched)):
            gpu.launch()
        gpu.launch(rows=5)
        launch.launch(scale, (0, 1, 1), gpu.config, gpu.x, None, gpu.out, 4, 3, 0.5, 64)
    assert len(gpu.calls) == 1 and len(recorded) == 2 and len(inner) == 1
    kernel, grid, config, *args = recorded[1]
    assert (kernel, grid, config, args[3]) == (scale, (4, 1, 1), gpu.config, 5) and args[0] is gpu.x
    gpu.launch()
    assert len(gpu.calls) == 2


@needs_compilers
def test_kernels_are_collected_once(gpu):
    gpu = gpu("nvidia")
    with hooks.collect_kernels() as outer:
        gpu.launch()
        with hooks.collect_kernels() as inner:
            gpu.launch()
            gpu.launch(rows=1)
        gpu.launch(rows=5)  # another key of the kernel that the first launch compiled
    gpu.launch(rows=2**40)
    assert len(outer) == 2 and len(inner) == 1 and inner[0] is outer[1] and outer[0].n_spills == 0


@pytest.mark.parametrize("hook", [("launch", "replace_launches"), ("observer", "observe"),
                                  ("check_observer", "observe_checks")], ids=str)  # fmt: skip
def test_a_hook_is_put_back_after_an_error(hook):
    name, within = hook
    before = getattr(hooks, name)
    with pytest.raises(KeyError), getattr(hooks, within)(print):
        with getattr(hooks, within)(len):
            assert getattr(hooks, name) is len
        assert getattr(hooks, name) is print
        raise KeyError
    assert getattr(hooks, name) is before
    with pytest.raises(KeyError), hooks.collect_kernels() as kernels:
        raise KeyError
    hooks.add_kernel("late")
    assert kernels == []


# keys ----------------------------------------------------------------------------------------------------------------


def keys(op, inputs, options):
    """Return the kernel and the key of each launch of one step."""
    launched = []

    def record(kernel, grid, config, *args):
        read_key = launch._key_reader(kernel, len(args))
        launched.append((kernel.fn.__name__, read_key(config, -1, *args)[0]))

    with use_backend("nvidia"), hooks.replace_launches(record):
        step(OPS[op], inputs, options)
    return launched


def float_options(op, inputs, options):
    """Yield options with one float replaced by values that kernels or Triton could treat as constants."""
    for name, parameter in list(inspect.signature(OPS[op]).parameters.items())[len(inputs) :]:
        if "float" in str(parameter.annotation):
            for value in (0, 0.0, 1, 1.0, 0.25):
                with contextlib.suppress(ValueError):  # a softcap or a temperature of 0
                    keys(op, inputs, options | {name: value})
                    yield options | {name: value}


@needs_compilers
@pytest.mark.parametrize("op", CASES)
def test_a_repeated_call_finds_its_kernels(op):
    """A key with a value that is new in every call would compile again and grow without end."""
    cases = list(training_cases(op, torch.float16, "meta"))
    first_inputs, first_options = cases[0]
    cases += [(first_inputs, options) for options in float_options(op, first_inputs, first_options)]
    launches = 0
    for inputs, options in cases:
        first = keys(op, inputs, options)
        assert first == keys(op, inputs, options), options
        launches += len(first)
    assert launches


@needs_compilers
@pytest.mark.parametrize("op", CASES)
def test_the_value_of_a_float_compiles_nothing(op):
    inputs, options = next(iter(training_cases(op, torch.float16, "meta")))
    for name, parameter in list(inspect.signature(OPS[op]).parameters.items())[len(inputs) :]:
        if "float" in str(parameter.annotation):
            assert keys(op, inputs, options | {name: 0.25}) == keys(op, inputs, options | {name: 0.375}), name


def test_equal_configurations_are_one_in_a_key():
    device = VENDORS["amd"].ARCHS["gfx942"]
    one, two = (Config({"ROWS": 1}, num_warps=8, device=device, key="rms_norm_forward(64, 2)") for _ in range(2))
    assert one == two and hash(one) == hash(two) and one.compiled_as == two.compiled_as
    others = [{"meta": {"ROWS": 2}}, {"num_warps": 4}, {"num_stages": 2}, {"knobs": {"waves_per_eu": 2}}]
    others += [{"fp_fusion": False}, {"device": VENDORS["nvidia"].ARCHS["sm90"]}]
    for change in others:
        assert replace(one, **change) != one and replace(one, **change).compiled_as != one.compiled_as, change
