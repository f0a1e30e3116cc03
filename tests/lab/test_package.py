"""Check version, changelog and metadata of a release; `make package` builds and installs it."""

import datetime
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import liger_hw

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def package():
    if not (ROOT / ".git").exists():
        pytest.skip("lab/liger_lab/tools/package.py lists files by git, and this is no checkout")
    return importlib.import_module("liger_lab.tools.package")


def test_the_newest_entry_of_the_changelog_is_this_version():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == liger_hw.__version__


def test_the_citation_has_the_version_and_the_date_of_a_release():
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {liger_hw.__version__}\n" in citation
    date = re.search(r"^## \S+ \((.*)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert (f"\ndate-released: {date}\n" in citation) == (date != "unreleased")


def test_the_page_of_versions_lists_the_requirements_of_the_package():
    page = (ROOT / "docs" / "versions.md").read_text()
    needed = [f"python>={PROJECT['requires-python'].removeprefix('>=')}", *PROJECT["dependencies"]]
    needed += PROJECT["optional-dependencies"]["transformers"]
    for requirement in needed:
        name, _, least = requirement.partition(";")[0].partition(">=")
        assert not least or re.search(rf"^\| {name} \| {re.escape(least)} ", page, re.MULTILINE | re.IGNORECASE), name


def test_files_of_an_archive(package):
    release = liger_hw.__version__
    wheel, sdist = package.wheel_files(release), package.sdist_files(release)
    assert "liger_hw/py.typed" in wheel and "liger_hw/tuning/tables/nvidia-sm90.json" in wheel
    assert not any(name.startswith(("tests/", "lab/", "liger_lab/", "docs/")) for name in wheel)
    lab = package.lab_wheel_files(release)
    assert "liger_lab/levels/doctor.py" in lab and not any(name.startswith("liger_hw/") for name in lab)
    assert {f"liger_hw-{release}/{name}" for name in ("pyproject.toml", "Makefile", "tests/conftest.py")} <= sdist
    assert package.unexpected("w", wheel, wheel) == []
    lines = package.unexpected("w", wheel - {"liger_hw/py.typed"} | {"liger_hw/left.pyc"}, wheel)
    assert lines == ["w: lacks liger_hw/py.typed", "w: has liger_hw/left.pyc, which does not belong there"]


def test_a_nightly_build_is_older_than_its_release(package):
    from packaging.version import Version

    name = package.nightly("0.2.0", datetime.date(2026, 11, 22))
    assert name == "0.2.0.dev20261122" and Version("0.1.9") < Version(name) < Version("0.2.0")


def test_project_urls(package):
    text = package.with_urls((ROOT / "pyproject.toml").read_text(), "https://example.org/r")
    assert tomllib.loads(text)["project"]["urls"]["Repository"] == "https://example.org/r"


def test_links_of_the_page_on_the_package_index(package):
    text = "[a](docs/a.md#b) ![p](lab/results/p.png) [t](#top) [o](https://example.org/x)"
    assert package.absolute_links(text, "https://example.org/r", "v1") == (
        "[a](https://example.org/r/blob/v1/docs/a.md#b) ![p](https://example.org/r/raw/v1/lab/results/p.png) "
        "[t](#top) [o](https://example.org/x)"
    )


def test_a_tag_must_name_the_version(package, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["package.py", "--tag", "v9.9.9", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"got v9.9.9, allowed: v{liger_hw.__version__}"):
        package.main()
    assert not any(tmp_path.iterdir())
