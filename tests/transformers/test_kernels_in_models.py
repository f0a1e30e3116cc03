"""A patched model whose ops run as Triton kernels, on whatever can run them here, against the plain model."""

import pytest
import tiny
import torch

import liger_hw


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "stablelm"])
def test_model_learns_as_theirs(family, backend, device):
    plain, patched = (m.to(device) for m in tiny.pair(family))
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)


def test_half_precision(backend, device):
    plain, patched = (m.to(device) for m in tiny.pair("llama", torch.float16))
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    expected = tiny.call(plain, **inputs)
    with liger_hw.use_backend(backend):
        found = tiny.call(patched, **inputs)
        found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=0)
    assert all(p.grad.isfinite().all() for p in patched.parameters())


def test_a_second_backward_says_why_it_cannot(backend, device):
    _, patched = tiny.pair("llama", num_hidden_layers=1)
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        loss = patched.to(device)(**inputs).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second"):
            loss.backward()
