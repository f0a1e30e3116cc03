"""Run the runners' scripts without GPUs: every step, its command and its failure."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import liger_hw
from liger_hw import backends, cli
from liger_hw.backends import amd, intel, nvidia
from liger_lab.cases import CASES
from liger_lab.tools import check, mutants, trainers, transformers_versions

ROOT = Path(__file__).parents[2]
VENDORS = tuple(backends.VENDORS)
STEPS = ["device", "info", "tests", "ranks", "bench", "doctor", "tables", "evidence"]

pytestmark = pytest.mark.skipif(
    not (ROOT / "lab" / "gpu").is_dir() or shutil.which("bash") is None, reason="no scripts or no bash"
)


@pytest.mark.parametrize(
    "key, values", [("version", transformers_versions.VERSIONS), ("framework", trainers.FRAMEWORKS)]
)
def test_every_version_is_tested(key, values):
    (matrix,) = re.findall(rf"{key}: (\[.*])", (ROOT / ".github/workflows/cpu.yml").read_text())
    assert json.loads(matrix) == list(values)


def test_mutants_are_of_the_present_source():
    gone = [
        f"{name}: {description}"
        for name, pieces in mutants.MUTANTS.items()
        for description, old, _ in pieces
        if not any(old in file.read_text() for file in mutants.sources(name, ROOT / "liger_hw"))
    ]
    assert not gone


def script(vendor, *arguments, **variables):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV", "NO_INSTALL", "REPORT")
    }
    environment |= {"ONEAPI": "/nowhere", **variables}
    command = ["bash", ROOT / "lab" / "gpu" / f"{vendor}.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def planned(vendor, **variables):
    done = script(vendor, "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
    steps = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    return {name: shlex.split(command) for name, command in steps.items()}


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_step_of_a_dry_run_is_a_command_that_exists(vendor, pytestconfig, tmp_path):
    steps = planned(vendor, REPORT=str(tmp_path))
    assert list(steps) == ["install", *STEPS]
    assert steps["install"][:3] == ["make", "setup", f"ACCELERATOR={vendor}"]
    for name, (python, *command) in list(steps.items())[1:]:
        assert python == ".venv/bin/python"
        if command[0] == "-m" and command[1] == "liger_hw":
            assert cli._parse(command[2:]).command == command[2]
        elif command[0] == "-m":
            assert command[1] == "pytest"
            for option in (word for word in command if word.startswith("--") and word != "--dist"):
                pytestconfig.getoption(option)  # a ValueError if there is none
        else:
            assert command == ["lab/gpu/device.py", vendor] and (ROOT / command[0]).exists(), name
    assert {"--needs-device", "--evidence"} <= set(steps["tests"])
    kept = [word for name in ("tests", "doctor", "bench") for word in steps[name] if word.startswith(str(tmp_path))]
    read = [word for word in steps["evidence"][:-1] if word.startswith(str(tmp_path))]
    assert sorted(read[:3]) == sorted({str(Path(p).parent) if p.endswith(".json") else p for p in kept})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("vendor", VENDORS)
def test_no_install_uses_the_installed_packages(vendor):
    steps = planned(vendor, NO_INSTALL="1", PYTHON="/opt/their/python")
    assert list(steps) == STEPS and {command[0] for command in steps.values()} == {"/opt/their/python"}


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_install_is_that_vendors(vendor, tmp_path):
    command = planned(vendor, VENV=str(tmp_path / "venv"))["install"]
    make = ["make", "-n", *command[1:], "TORCH_INDEX=https://example.org/whl"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"--index-url https://example.org/whl 'torch==\S+'", done.stdout)
    assert f'"{vendor}" in ("amd", "intel")' in done.stdout  # whose Triton PyPI's may not replace


def stub(folder, *failing):
    """A Python that records its commands and fails at some."""
    file = folder / "python"
    cases = "".join(f"  *{shlex.quote(words)}*) exit 1 ;;\n" for words in failing)
    file.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\necho "output of $*"\ncase "$*" in\n{cases}esac\nexit 0\n')
    file.chmod(0o755)
    return {"NO_INSTALL": "1", "PYTHON": str(file), "REPORT": str(folder / "report")}


def asked(folder):
    return (folder / "asked").read_text().splitlines()


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_run_in_which_all_passes(vendor, tmp_path):
    done = script(vendor, **stub(tmp_path), LIGER_HW_BACKEND="reference", TRITON_INTERPRET="1")
    assert done.returncode == 0 and "all passed" in done.stdout, done.stdout + done.stderr
    lines = asked(tmp_path)
    assert next(line for line in lines if "import xdist" not in line) == f"lab/gpu/device.py {vendor}"
    assert len(lines) == 10
    assert "-n auto --dist loadgroup" in " ".join(lines)
    kept = {file.stem for file in (tmp_path / "report").glob("*.txt")}
    assert kept == set(STEPS) and "output of" in (tmp_path / "report" / "tests.txt").read_text()


def test_a_failed_step_is_reported_and_the_next_ones_run(tmp_path):
    done = script("amd", **stub(tmp_path, "-m pytest", "liger_hw bench"))
    assert done.returncode == 1 and "=== failed: tests ranks bench" in done.stdout
    assert asked(tmp_path)[-1].startswith("-m liger_hw evidence")


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_runner_without_its_device_stops(vendor, tmp_path):
    done = script(vendor, **stub(tmp_path, "lab/gpu/device.py"))
    assert done.returncode == 1 and "=== stopped: device failed" in done.stderr
    assert asked(tmp_path) == [f"lab/gpu/device.py {vendor}"]


def test_without_xdist_the_tests_run_in_one_process(tmp_path):
    done = script("nvidia", **stub(tmp_path, "import xdist"))
    assert done.returncode == 0 and "no pytest-xdist here" in done.stdout
    of_pytest = [line for line in asked(tmp_path) if "-m pytest" in line]
    assert len(of_pytest) == 2
    assert all("-n" not in line.split() and "--needs-device" in line for line in of_pytest)


def test_one_gpu_runs_no_tests_of_several(tmp_path):
    done = script("amd", **stub(tmp_path, "device_count() < 2"))
    assert done.returncode == 0 and not any("test_sharding" in line for line in asked(tmp_path))


def test_unknown_arguments_are_refused(tmp_path):
    done = script("intel", "--dry", **stub(tmp_path))
    assert done.returncode == 2 and "got --dry, allowed: --dry-run" in done.stderr


def test_the_scripts_are_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", "-x", *map(str, (ROOT / "lab" / "gpu").glob("*.sh"))], cwd=ROOT, check=True)


# the device ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def check_device():
    spec = importlib.util.spec_from_file_location("ci_device", ROOT / "lab" / "gpu" / "device.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_no_accelerator_is_a_failure(check_device, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="finds no accelerator, expected one of amd"):
        check_device("amd")


@pytest.mark.parametrize(
    "device", [nvidia.ARCHS["sm90"], amd.ARCHS["gfx942"], intel.ARCHS["bmg"]], ids=lambda d: d.arch
)
def test_another_vendors_gpu_is_a_failure(device, check_device, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **kwargs: torch.device("cpu"))
    monkeypatch.setitem(backends._devices, torch.device("cpu", 0), device)
    monkeypatch.setattr(liger_hw, "rms_norm", lambda x: x * 1, raising=False)  # a kernel that any device runs
    for vendor in VENDORS:
        if vendor == device.vendor:
            check_device(vendor)
            assert f"{vendor} {device.arch}" in (shown := capsys.readouterr().out) and "compiled a kernel" in shown
        else:
            with pytest.raises(SystemExit, match=f"finds a GPU of {device.vendor}, expected one of {vendor}"):
                check_device(vendor)


# the workflows -------------------------------------------------------------------------------------------------------


def workflow(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize("vendor, image, device", [
    ("nvidia", "nvidia/", "--gpus all"), ("amd", "rocm/", "/dev/kfd"), ("intel", "intel/", "/dev/dri"),
])  # fmt: skip
def test_a_vendors_workflow(vendor, image, device):
    (job,) = workflow(vendor)["jobs"].values()
    assert {"self-hosted", vendor} <= set(job["runs-on"])
    assert job["container"]["image"].startswith(image) and device in job["container"]["options"]
    assert f"lab/gpu/{vendor}.sh" in [step.get("run") for step in job["steps"]]
    upload = job["steps"][-1]
    assert upload["if"] == "always()" and upload["with"]["path"] == "report"


def test_the_workflow_of_cpus():
    jobs = workflow("cpu")["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["checks"]["steps"]] and (ROOT / ".ci" / "run").exists()
    assert {version[:3] for version in jobs["compile"]["strategy"]["matrix"]["triton"]} == {"3.6", "3.9"}
    for job in jobs.values():
        for step in job["steps"]:
            words = shlex.split(step.get("run", "").partition(" > ")[0])
            if "liger_lab.tools.check" in words:
                assert words[words.index("liger_lab.tools.check") + 1] in check.CHECKS
            if "liger_hw" in words:
                assert cli._parse(words[words.index("liger_hw") + 1 :])


@pytest.fixture
def started(monkeypatch):
    """The commands that a check would run."""
    commands = []
    monkeypatch.setattr(check, "run", lambda *words, **variables: commands.append(words) or 0)
    monkeypatch.delenv("NO_VENV", raising=False)
    return commands


def test_the_newest_torch_is_tested_every_night(started):
    job = workflow("cpu")["jobs"]["prerelease"]
    assert job["if"] == "github.event_name == 'schedule'"
    assert job["steps"][-1]["run"].endswith("check prerelease")
    assert check.main(["prerelease"]) == 0
    install, *tests = started
    assert {"--pre", "--upgrade", "torch"} <= set(install) and "--constraint" not in install
    assert tests and all("pytest" in words for words in tests)
    assert {*check.PROGRAMS, *check.MODELS} <= {word for words in tests for word in words}


def test_the_oldest_torch_is_tested(started, monkeypatch):
    """It is the one that the package's metadata names."""
    assert workflow("cpu")["jobs"]["oldest"]["steps"][-1]["run"].endswith("check oldest")
    monkeypatch.setenv("TORCH_INDEX", "https://index")
    assert check.main(["oldest"]) == 0
    install, *tests = started
    bounds = re.findall(r'"(torch|triton)>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert len(bounds) == 2 and {f"{name}=={version}" for name, version in bounds} <= set(install)
    assert "https://index" in install and "--constraint" not in install
    assert tests and all("pytest" in words for words in tests)


def test_the_workflow_interprets_for_every_architecture(tmp_path):
    """A job's matrix is the output of the job before it, whose steps run here."""
    jobs = workflow("cpu")["jobs"]
    assert jobs["interpret"]["needs"] == "backends"
    assert jobs["interpret"]["strategy"]["matrix"]["backend"] == "${{ fromJSON(needs.backends.outputs.names) }}"
    assert jobs["backends"]["outputs"]["names"] == "${{ steps.names.outputs.names }}"
    command, output = jobs["backends"]["steps"][-2:]
    assert output["id"] == "names"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/lab", "GITHUB_OUTPUT": str(tmp_path / "output")}
    for step in (command, output):
        subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
    name, _, names = (tmp_path / "output").read_text().partition("=")
    assert name == "names" and json.loads(names) == list(backends.ARCHITECTURES)


def test_checks_name_files_that_exist_and_run_them_all(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(check, "run", lambda *words, **variables: started.append((words, variables)) or 0)
    monkeypatch.setattr(check, "install", lambda *requirements, **variables: 0)
    for name in check.CHECKS:
        assert check.main([name, "--flag"]) == 0
    paths = {word.removeprefix("--ignore=") for words, _ in started for word in words}
    assert all((ROOT / path).exists() for path in paths if path.startswith("tests/"))
    assert all("--flag" in words for words, _ in started)
    started.clear()
    assert check.main(["emulate"]) == 0 and CASES.keys() > {*check.EMULATED}
    assert {"rms_norm", "rope"} < set(started.pop()[0])
    assert check.main(["test"]) == 0
    (plain, nothing), (kernels, variables) = started
    assert nothing == {} and variables == {"TRITON_INTERPRET": "1"} and "tests/kernels" in kernels
    assert {f"--ignore={path}" for path in check.PROGRAMS} <= set(plain)
    for plain, kernels, status in ((0, 5, 0), (5, 0, 0), (5, 5, 1), (1, 0, 1), (0, 1, 1)):  # 5: no test was selected
        assert check.each(plain, kernels) == status
    monkeypatch.setattr(check, "run", lambda *words, **variables: "liger_lab.tools.mutants" in words)
    assert check.main(["programs"]) == 0 and check.main(["all"]) == 1
    assert check.main(["program"]) == 2 and "got program, allowed: all, list, test" in capsys.readouterr().err


def test_the_makefile_has_a_target_for_each_common_task():
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets.split() == ["setup", "demo", "test", "lint", "gpu", "docs", "package", "all"]
    assert "make all" in (ROOT / ".ci" / "run").read_text()


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_package_and_the_site_are_built_on_every_change():
    jobs = workflow("cpu")["jobs"]
    assert "make package" in commands(jobs["package"]) and "make docs" in commands(workflow("site")["jobs"]["build"])
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f">={jobs['package']['strategy']['matrix']['python'][0]}" == least


def test_a_release_is_published_for_a_tag_without_a_secret():
    content = workflow("release")
    assert content[True]["push"]["tags"] == ["v*"] and "schedule" in content[True]  # YAML reads the key "on" as True
    package, publish = content["jobs"]["package"], content["jobs"]["publish"]
    assert "--tag $GITHUB_REF_NAME" in commands(package) and "--nightly" in commands(package)
    assert publish["needs"] == "package" and publish["permissions"] == {"id-token": "write"}
    assert content["permissions"] == {"contents": "read"} and "permissions" not in package
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_an_issue_asks_for_the_doctors_report():
    yaml = pytest.importorskip("yaml")
    forms = [file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml"]
    assert len(forms) == 3
    for file in forms:
        form = yaml.safe_load(file.read_text())
        assert form["name"] and form["description"] and "liger-hw doctor" in file.read_text()
        names = [field["id"] for field in form["body"]]
        assert len(set(names)) == len(names)
