"""A kernel launch that costs little host time, on the device that holds the tensors."""

import torch

from liger_hw import backends
from liger_hw._triton import interpreting

_compiled = {}  # (kernel, config, what Triton specialises on, device index) -> compiled kernel
_plain = {torch.Tensor, torch.nn.Parameter}  # types whose memory a kernel may read
_INT32 = 2**31


def launch(kernel, grid, config, *args):
    """Launch `kernel` over `grid`, a 3-tuple, with its arguments in order and `config`'s meta-parameters last.

    Triton's own argument look-up costs 11 us for two arguments and more for each further one (on an H200's host); this
    one remembers the compiled kernel under the same facts that Triton specialises on: dtypes, 16-byte alignment,
    tensors over 2 GiB, integers that are 1, multiples of 16 or wider than 32 bits, and constants.

    A grid with a zero in it launches nothing.

    Raises:
        TypeError: an argument is a tensor subclass with its own dispatch, such as a DTensor, whose memory is not its own.
    """
    if 0 in grid:
        return
    key, index = [kernel, config], None
    for arg in args:
        kind = type(arg)
        if kind in _plain:
            if index is None:
                index = arg.get_device()
            key.append(arg.dtype)
            aligned, large = arg.data_ptr() & 15 == 0, arg.numel() * arg.element_size() >= _INT32
            if large or not aligned:
                key.append((aligned, large))
        elif kind is int:
            key.append(1 if arg == 1 else (arg & 15 == 0, -_INT32 <= arg < _INT32))
        elif kind is float:
            key.append(float)
        elif isinstance(arg, torch.Tensor):
            _accept(kind)
            return launch(kernel, grid, config, *args)
        else:
            key.append(arg)
    key.append(index)
    key = tuple(key)
    compiled = _compiled.get(key)
    if compiled is None:
        _first_launch(key, kernel, grid, config, args)
    elif index == torch.accelerator.current_device_index():
        compiled[grid](*args, *config.meta.values())
    else:
        with torch.accelerator.device_index(index):
            compiled[grid](*args, *config.meta.values())


def _first_launch(key, kernel, grid, config, args):
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    options = config.options(backends.detected(device))
    if interpreting():
        kernel[grid](*args, *config.meta.values(), **options)
    else:
        with torch.accelerator.device_index(device.index):
            _compiled[key] = kernel[grid](*args, *config.meta.values(), **options)


def _accept(kind):
    """A subclass without its own dispatch is an ordinary tensor; a DTensor's pointer is zero and its size another."""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a Triton kernel cannot read a {kind.__name__}; pass its local tensor")
    _plain.add(kind)
