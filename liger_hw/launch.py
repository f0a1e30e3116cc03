"""Kernel launches that cost little host time."""

import torch

from liger_hw import backends, tuning
from liger_hw._torch import is_zerotensor
from liger_hw._triton import interpreting, triton
from liger_hw.checks import UnreadableTensor
from liger_hw.hooks import hooks
from liger_hw.inlining import is_traced, launch_later
from liger_hw.shortcut import shortcut


def launch(kernel, grid, config, *args):
    """Launch `kernel` over `grid`, a 3-tuple, on the device of its first argument, a tensor.

    Triton's own look-up costs 11 us for two arguments and more for each further one (an H200's host). This one
    remembers compiled kernels under the facts that Triton specialises on: dtypes, 16-byte alignment, tensors over
    2 GiB, integers that are 1, multiples of 16 or wider than 32 bits, and constants.

    Args:
        kernel: a Triton kernel whose pointers have names in capitals.
        grid: nothing is launched if one of the three is 0.
        config: its meta-parameters follow `args` as the kernel's last arguments.
        *args: the kernel's other arguments in order.

    Raises:
        UnreadableTensor: an argument is a tensor subclass with its own dispatch, such as a DTensor, a view with the
            opposite sign of its memory, as the imaginary part of a conjugate, or zeros without memory, as a gradient of
            torch.sgn: torch resolves those for registered ops.
        LaunchFailed: a configuration of a table cannot be launched here, or spills by this version of Triton.
    """
    if 0 in grid:
        return
    if hooks.launch is not None:
        hooks.launch(kernel, grid, config, *args)
        return
    known = _kernels.get(id(kernel))  # a kernel's own hash is computed from its source
    if known is None:
        known = _kernels[id(kernel)] = _key_reader(kernel, len(args)), {}, kernel
    read_key, launchers, _ = known
    index = args[0].get_device()
    try:
        key, values = read_key(config, index, *args)
    except RuntimeError:  # torch's, of a tensor without memory
        if not is_traced(args[0]):
            raise
        launch_later(kernel, grid, config, args)
        return
    launcher = launchers.get(key)
    if launcher is None:
        _first_launch(launchers, key, values, kernel, grid, config, args)
        return
    direct, by_triton = launcher
    try:
        hooked = _runtime.knobs.launch_enter_hook.calls or _runtime.knobs.launch_exit_hook.calls
    except AttributeError:  # a program has put None or a function in the place of Triton's chain of hooks
        hooked = True
    if _runtime.several_devices and index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(index):
            launch(kernel, grid, config, *args)
    elif hooked or direct is None:  # a profiler's hooks, for example, must run
        by_triton(grid, args)
    else:
        direct(*grid, _runtime.current_stream(index), values)


_kernels = {}  # id(kernel) -> (its key reader, {key: (direct call or None, call by Triton)}, it, so that its id stays)
_compiled = {}  # id -> Triton's compiled kernel, which unloads its code when nothing refers to it


def _key_reader(kernel, count):
    """Make a function of (config, index, `count` arguments) that returns (key, values).

    The key holds every fact that a compiled kernel depends on. The values are the arguments, tensors as addresses:
    given a tensor, Triton asks it for its address and the driver whether that is a device's, 0.9 us for three (an
    H200's host). The function is generated, as a loop takes twice as long.
    """
    if interpreting():
        return lambda *args: (None, None)
    # compilers for AMD's and Intel's GPUs ask whether a tensor is larger than 2 GiB
    size = "" if torch.version.cuda else ", {0}.nbytes >> 31"
    facts, values = ["config.compiled_as", "index"], []
    params = kernel.params[:count]  # the configuration's meta-parameters follow
    for p in params:
        name = p.name
        if p.is_constexpr:
            fact = name
        elif name.isupper():  # a pointer; with its type, so that every new subclass is met once and checked
            known = f"type({name}), {name}.is_neg(), {name}.dtype, ({name}_ := {name}.data_ptr()) & 15"
            known += f" or not {name}_ and is_zerotensor({name}) and 16"  # an empty tensor's address is 0, too
            known += size.format(name)
            fact, name = f"({name}_ := None) if {name} is None else ({known})", f"{name}_"
        else:
            # one fact, n & 15, for most integers, those from 2 to 2^31: three facts cost twice as much
            special = f"({name} & 15 if 1 < {name} < {2**31} else ({name} == 1, {name} & 15, {name} >> 31))"
            integer = f"{name} >> 31" if p.do_not_specialize else special
            fact = f"{integer} if type({name}) is int else type({name})"  # of a float, or of None for an absent number
        facts.append(fact)
        values.append(name)
    names = ", ".join(p.name for p in params)
    source = f"lambda config, index, {names}: (({', '.join(facts)}), ({', '.join(values)},))"
    return eval(source, {"is_zerotensor": is_zerotensor})


def _first_launch(launchers, key, values, kernel, grid, config, args):
    """Check the arguments, compile and launch, and remember how to launch again."""
    for arg in args:
        # a subclass without its own dispatch is an ordinary tensor; a DTensor's pointer is zero and its size another
        if isinstance(arg, torch.Tensor) and type(arg).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UnreadableTensor(f"a Triton kernel cannot read a {type(arg).__name__}; pass its local tensor")
        if isinstance(arg, torch.Tensor) and (arg.is_neg() or is_zerotensor(arg)):
            raise UnreadableTensor("a Triton kernel cannot read a view of negated memory, or zeros without memory")
    device, meta = args[0].device, tuple(config.meta.values())
    if device.type == "meta":  # shapes without data, as `liger-hw launches` and the tuner ask with: nothing to compute
        return
    here = backends.detected(device)
    options = config.options(here)

    def by_triton(grid, args):
        return kernel[grid](*args, *meta, **options)

    if interpreting():
        by_triton(grid, args)
        return
    with torch.accelerator.device_index(device.index):
        try:
            if config.triton not in ("", triton.__version__):
                _check_resources(kernel.warmup(*args, *meta, grid=grid, **options), here, config.triton)
            compiled = by_triton(grid, args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each compiler and driver has its own; a heuristic's is a mistake of ours
            if config.source == tuning.HEURISTIC:
                raise
            raise tuning.withdraw(config, error) from error
    if id(compiled) not in _compiled:
        _compiled[id(compiled)] = compiled
        hooks.add_kernel(compiled)
    _runtime.load()
    direct = None
    if here.vendor in backends.VENDORS and backends.VENDORS[here.vendor].LAUNCHER_SHORTCUT:
        direct = shortcut(compiled, meta, grid, _runtime.current_stream(device.index), values)
    launchers[key] = direct, by_triton


def _check_resources(compiled, device, version) -> None:
    """Raise a RuntimeError if a compiled kernel spills registers or exceeds shared memory.

    This checks configurations that a table found with another version of Triton. It runs before the first launch,
    because a launch that writes over its arguments cannot be repeated.
    """
    if compiled.metadata.shared > device.shared_memory:
        raise RuntimeError(f"{compiled.metadata.shared} bytes of shared memory, allowed: {device.shared_memory}")
    compiled._init_handles()  # the driver tells n_spills when it loads the code
    if compiled.n_spills:
        raise RuntimeError(f"spills {compiled.n_spills} registers by Triton {triton.__version__}, not by {version}")


class _Runtime:
    """What every launch asks of Triton's runtime, kept at hand from the first launch on."""

    def __init__(self):
        self.knobs = self.current_stream = self.several_devices = None

    def load(self):
        from triton import knobs
        from triton.runtime import driver

        self.knobs, self.current_stream = knobs.runtime, driver.active.get_current_stream
        self.several_devices = torch.accelerator.device_count() > 1


_runtime = _Runtime()
