import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def stand_in():
    """`import liger_kernel` gives this library, whatever is installed here."""
    from liger_hw import integrations

    integrations.install(replace=True)
    yield
    integrations.uninstall()
