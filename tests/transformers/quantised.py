"""Linear layers with quantised weights, as those of libraries: of 8 bits, and of 4 with bitsandbytes' attributes."""

from types import SimpleNamespace

import torch

from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit, dequantize_arguments


class Int8Linear(torch.nn.Linear):
    """A Linear whose weight is neither floating point nor trainable, like a quantised layer."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.weight = torch.nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T


class Packed(torch.nn.Parameter):
    """A weight that keeps its attributes in a copy, as bitsandbytes' does."""

    def __deepcopy__(self, memo):
        copied = Packed(self.data.clone(), requires_grad=False)
        copied.quant_state = self.quant_state
        return copied


class FourBits(torch.nn.Linear):
    """A layer with the arithmetic and the attributes of bitsandbytes' Linear4bit."""

    def __init__(self, linear, compute_dtype):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias = linear.bias
        self.compute_dtype, self.compute_type_is_set = compute_dtype, True
        blocks = linear.weight.detach().float().view(-1, 32)
        absmax = blocks.abs().amax(1)
        numbers = (7.5 + 7.5 * blocks / absmax[:, None]).round().to(torch.uint8).view(-1, 2)
        self.weight = Packed(numbers[:, :1] << 4 | numbers[:, 1:], requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            quant_type="nf4", absmax=absmax, code=torch.linspace(-1, 1, 16, device=absmax.device), blocksize=32,
            state2=None, offset=None, dtype=linear.weight.dtype, shape=linear.weight.shape,
        )  # fmt: skip

    def forward(self, x):
        weight = dequantize_4bit.reference(*dequantize_arguments(self.weight)).to(self.compute_dtype)
        return torch.nn.functional.linear(x.to(self.compute_dtype), weight, self.bias).to(x.dtype)


def in_8_bits(model, head=False):
    """Quantise every projection of `model`, and its head on request."""
    model.is_loaded_in_8bit = True
    return _replaced(model, Int8Linear, head)


def in_4_bits(model, make=FourBits):
    """Quantise every projection of `model`."""
    model.is_loaded_in_4bit = True
    return _replaced(model, lambda linear: make(linear, torch.float32), False)


def _replaced(model, make, head):
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and (head or "lm_head" not in name):
            model.set_submodule(name, make(module))
    return model
