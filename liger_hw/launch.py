"""A kernel launch that costs little host time, on the device that holds the tensors."""

import copy

import torch

from liger_hw import backends, tuning
from liger_hw._triton import interpreting


def launch(kernel, grid, config, *args):
    """Launch `kernel` over `grid`, a 3-tuple, with its arguments in order and `config`'s meta-parameters last.

    Triton's own look-up costs 11 us for two arguments and more for each further one (on an H200's host); this one
    remembers the compiled kernel under the same facts that Triton specialises on: dtypes, 16-byte alignment, tensors
    over 2 GiB, integers that are 1, multiples of 16 or wider than 32 bits, and constants.

    The first argument is a tensor. A grid with a zero in it launches nothing.

    Raises:
        TypeError: an argument is a tensor subclass with its own dispatch, such as a DTensor, whose memory is elsewhere.
    """
    if 0 in grid:
        return
    known = _kernels.get(id(kernel))  # not the kernel: its hash is computed from its source
    if known is None:
        known = _kernels[id(kernel)] = _reader(kernel, len(args)), {}
    read, launchers = known
    index = args[0].get_device()
    key, values = read(config, index, *args)
    launcher = launchers.get(key)
    if launcher is None:
        _first_launch(launchers, key, kernel, grid, config, args)
        return
    run, compiled, meta = launcher
    if _triton.several_devices and index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(index):
            compiled[grid](*args, *meta)
    elif getattr(_triton.knobs.launch_enter_hook, "calls", True):  # a profiler wants to be told
        compiled[grid](*args, *meta)
    else:
        run(*grid, _triton.current_stream(index), values)


def compiled_kernels() -> list:
    """Triton's object of every kernel that this process has compiled for a device."""
    return [launcher[1] for _, launchers in _kernels.values() for launcher in launchers.values()]


tuning.search.compiled_kernels = compiled_kernels

_kernels = {}  # id(kernel) -> (its reader, {key: what a further launch needs})


def _reader(kernel, count):
    """(config, index, `count` arguments) -> what a compiled kernel depends on, and the arguments, tensors as addresses.

    Generated: a loop takes twice as long. Given a tensor, Triton asks it for its address and the driver whether that is
    a device's, which for three takes 0.9 us (an H200's host).
    """
    if interpreting():
        return lambda *args: (None, None)
    # compilers for AMD's and Intel's GPUs ask whether a tensor is larger than 2 GiB
    size = "" if torch.version.cuda else ", {0}.nbytes >> 31"
    facts, values = ["config", "index"], []
    params = kernel.params[:count]  # the configuration's meta-parameters follow
    for p in params:
        name = p.name
        if p.is_constexpr:
            fact = name
        elif name.isupper():  # a pointer; with its type, so that every new subclass is met once and checked
            known = f"type({name}), {name}.dtype, ({name}_ := {name}.data_ptr()) & 15{size.format(name)}"
            fact, name = f"({name}_ := None) if {name} is None else ({known})", f"{name}_"
        else:
            # most integers fall between: telling one number of them costs half of what telling three does
            special = f"({name} & 15 if 1 < {name} < {2**31} else ({name} == 1, {name} & 15, {name} >> 31))"
            integer = f"{name} >> 31" if p.do_not_specialize else special
            fact = f"{integer} if type({name}) is int else type({name})"  # None: the kernel does without
        facts.append(fact)
        values.append(name)
    names = ", ".join(p.name for p in params)
    return eval(f"lambda config, index, {names}: (({', '.join(facts)}), ({', '.join(values)},))")


def _first_launch(launchers, key, kernel, grid, config, args):
    for arg in args:
        # a subclass without its own dispatch is an ordinary tensor; a DTensor's pointer is zero and its size another
        if isinstance(arg, torch.Tensor) and type(arg).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"a Triton kernel cannot read a {type(arg).__name__}; pass its local tensor")
    device, meta = args[0].device, tuple(config.meta.values())
    if device.type == "meta":  # shapes without data, as `liger-hw info` and the tuner ask with: nothing to compute
        return
    options = config.options(backends.detected(device))
    if interpreting():
        kernel[grid](*args, *meta, **options)
        return
    with torch.accelerator.device_index(device.index):
        if tuning.search.compiling_ahead:
            kernel.warmup(*args, *meta, grid=grid, **options)
            return
        try:
            compiled = kernel[grid](*args, *meta, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each compiler and driver has its own; a heuristic's is a mistake of ours
            if config.source == tuning.HEURISTIC:
                raise
            raise tuning.refuse(config, error) from error
    launchers[key] = _runner(compiled, meta), compiled, meta
    _triton.load()


def _runner(compiled, meta):
    """(x, y and z of a grid, stream, arguments) -> a launch of the compiled kernel, without hooks.

    Triton's launcher asks at every launch what a kernel has once and for all, such as no scratch memory, and then calls
    a function in C: 1.1 of 4.7 us (an H200's host). What it hands on is seen from marks given to a copy of it, and from
    then on handed on without it. Where that cannot be seen, or a kernel needs scratch memory, the launcher is called.
    """
    launcher = compiled.run
    always = compiled.function, compiled.packed_metadata, None, None, None

    def by_triton(x, y, z, stream, values):
        launcher(x, y, z, stream, *always, *values, *meta)

    marks = {"x": object(), "y": object(), "z": object(), "stream": object(), "*values, *meta": object()}
    *where, values = marks.values()
    calls, words = [], []
    try:
        if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
            return by_triton
        recorder = copy.copy(launcher)
        recorder.launch = lambda *arguments: calls.append(arguments)
        recorder(*where, *always, values)
        (arguments,) = calls
        inner = launcher.launch
    except Exception:  # another version's, which does something with its arguments, or another vendor's
        return by_triton
    known = {"launch": inner, "meta": meta}
    for place, argument in enumerate(arguments):
        word = next((word for word, mark in marks.items() if mark is argument), None)
        if argument == (values,):
            word = "(*values, *meta)"
        if word is None:
            word = f"constant_{place}"
            known[word] = argument
        words.append(word)
    if len(words) - len(known) + 2 != len(marks):  # one of them went elsewhere
        return by_triton
    return eval(f"lambda x, y, z, stream, values: launch({', '.join(words)})", known)


class _triton:
    """What every launch asks of Triton's runtime, kept at hand from the first launch on."""

    knobs = current_stream = several_devices = None

    @classmethod
    def load(cls):
        from triton import knobs
        from triton.runtime import driver

        cls.knobs, cls.current_stream = knobs.runtime, driver.active.get_current_stream
        cls.several_devices = torch.accelerator.device_count() > 1
