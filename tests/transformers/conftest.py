import importlib

import pytest
import torch

from liger_hw.patching.recognition import Memory

PATCH = importlib.import_module("liger_hw.patching.patch")
MEMORY = Memory()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def recognised_once(monkeypatch):
    """Let all patches share one memory: a tiny Llama takes 0.7 s to recognise, and these tests replace no code."""
    monkeypatch.setattr(PATCH, "Memory", lambda: MEMORY)
