import made_up
import pytest

from liger_hw import tuning


@pytest.fixture(autouse=True)
def tables(monkeypatch, tmp_path):
    """Empty folders for local and shipped tables, and nothing remembered."""
    monkeypatch.setitem(tuning.choice.CONFIGS, "made_up", made_up.made_up_config)
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(tuning.entries, "shipped_file", lambda device: tmp_path / "shipped.json")
    monkeypatch.setattr(tuning.search, "_tried", set())
    tuning.choice.forget()
    tuning.entries.warn_once.cache_clear()
    yield tmp_path
    tuning.choice.forget()
