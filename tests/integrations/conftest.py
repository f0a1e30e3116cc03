import os
import pathlib
import sys
from unittest import mock

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(pathlib.Path(__file__).parents[1] / "transformers"))  # for its tiny models


@pytest.fixture(autouse=True)
def environment():
    """Restore what trainers set: those of transformers 4 leave ACCELERATE_MIXED_PRECISION for the next one."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def stand_in():
    """Serve `import liger_kernel` by this library, even if the original is installed."""
    from liger_hw import integrations

    integrations.install(replace=True)
    yield
    integrations.uninstall()
