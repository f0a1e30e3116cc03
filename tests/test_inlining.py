"""Test which launches compiled code makes itself; a GPU's tests run such code."""

import dataclasses
import logging

import pytest
import torch
from old_torch import traces_fake_tensors
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import liger_hw
from liger_hw import backends, inlining
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.hooks import hooks

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
INLINED, OPS = "triton_kernel_wrapper", "liger_hw."

pytestmark = [
    pytest.mark.skipif(not AVAILABLE or interpreting(), reason="compiled code launches no interpreted kernel"),
    traces_fake_tensors,
]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Trace for an H100 without a GPU: fake tensors of the CPU, for which the ops choose kernels."""
    torch._dynamo.reset()
    monkeypatch.setitem(backends._devices, CPU, backends.nvidia.ARCHS["sm90"])
    monkeypatch.setattr(backends, "backends_for", lambda device: ("triton", "reference"))
    monkeypatch.setattr(inlining, "_default_fusion", lambda: True)
    torch_logger = logging.getLogger("torch._higher_order_ops.triton_kernel_wrap")  # it wants a driver
    monkeypatch.setattr(torch_logger, "disabled", True)


def lora(x, weight, lora_a, lora_b):
    return liger_hw.lora_linear(x, weight, None, lora_a, lora_b, 2.0)


def tensors(rows=128, cols=64, features=96, rank=16, adapter=FP32, weight_grad=False):
    shapes = (rows, cols), (features, cols), (rank, cols), (features, rank)
    dtypes, learns = (BF16, BF16, adapter, adapter), (True, weight_grad, True, True)
    return [torch.empty(s, dtype=d, requires_grad=g) for s, d, g in zip(shapes, dtypes, learns)]


def traced(function, dynamic=False, **shape):
    """Return the names of what the compiled forward and backward call."""
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    with FakeTensorMode():
        compiled = torch.compile(function, backend=aot_autograd(fw_compiler=compiler), dynamic=dynamic)
        compiled(*tensors(**shape)).sum().backward()
    assert len(graphs) == 2
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


def count(names, text):
    return sum(text in name for name in names)


@pytest.mark.parametrize("adapter", [FP32, BF16])
def test_few_rows_launch_kernels(adapter):
    names = traced(lora, adapter=adapter)
    # u and u B^T in the forward; du, du A and both gradients of the adapter in the backward
    assert count(names, INLINED) == 5 and not count(names, OPS)


@pytest.mark.parametrize("adapter", [FP32, BF16])
def test_products_of_torch_are_traced(adapter):
    names = traced(lora, adapter=adapter, rank=128)  # which no kernel multiplies
    assert count(names, "aten.mm") + count(names, "aten.addmm") + count(names, "wide_product") >= 4


@pytest.mark.parametrize("shape", [{"rows": 2049}, {"rows": 1}], ids=str)
def test_others_call_ops(shape):
    """More rows take torch's products, and a kernel takes one row as any number of them."""
    names = traced(lora, **shape)
    assert not count(names, INLINED) and count(names, OPS)


def test_sizes_that_may_change_call_ops():
    names = traced(lora, dynamic=True)
    assert not count(names, INLINED) and count(names, OPS)


@pytest.mark.parametrize("vendor, arch", [("amd", "gfx942"), ("intel", "xe2")])
def test_a_vendor_without_executed_inlining_calls_ops(vendor, arch, monkeypatch):
    known = backends.VENDORS[vendor].ARCHS
    monkeypatch.setitem(backends._devices, CPU, known.get(arch) or next(iter(known.values())))
    names = traced(lora)
    assert not count(names, INLINED) and count(names, OPS)


def test_replaced_launches_call_ops():
    with hooks.replace_launches(lambda *args: None):
        names = traced(lora)
    assert not count(names, INLINED) and count(names, OPS)


@pytest.mark.parametrize("change", [{"triton": "0.1"}, {"fp_fusion": False}], ids=str)
def test_a_configuration_that_the_compiler_does_not_know_calls_the_op(change, monkeypatch):
    from liger_hw.kernels.linear.lora_linear import products

    for name in ("lora_project_config", "lora_expand_config", "lora_gradients_config"):
        config = getattr(products, name)
        changed = lambda *args, config=config: dataclasses.replace(config(*args), **change)  # noqa: E731
        monkeypatch.setattr(products, name, changed)
    names = traced(lora)
    assert not count(names, INLINED) and count(names, OPS)


def test_exported_programs_call_ops():
    class Layer(torch.nn.Module):
        def forward(self, *args):
            return lora(*args)

    with torch.no_grad():  # else it would have PyTorch's operations, with their backwards
        program = torch.export.export(Layer(), tuple(x.detach() for x in tensors()))
    for exported in (program, program.run_decompositions()):
        names = [str(node.target) for node in exported.graph.nodes]
        assert not count(names, INLINED) and count(names, OPS)


def test_the_compilers_cache_knows_the_kernels():
    """Else a later version with other kernels would get the code of this one from the disk."""
    for name in ("adapted_product", "adapter_project", "adapter_expand", "adapter_gradients"):
        kernels = torch._library.triton.get_triton_kernels_for_op(f"liger_hw::{name}")
        assert {"lora_project", "lora_expand", "lora_gradients", "lora_split"} <= {k.__name__ for k in kernels}
