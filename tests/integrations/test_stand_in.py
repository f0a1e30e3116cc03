"""`liger_kernel` without liger_kernel: imports, metadata, other processes, and back."""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest

from liger_hw import integrations
from liger_hw.stand_in.finder import SITE, VERSION


@pytest.fixture
def clean():
    """No liger_kernel here."""
    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("the package liger_kernel is installed here")
    integrations.uninstall()  # transformers looks again: another test may have left it with another answer
    yield
    integrations.uninstall()


@pytest.fixture
def original(tmp_path, monkeypatch):
    """An installed package liger_kernel 0.9, which is not this library."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel/__init__.py").write_text("__version__ = '0.9'\nORIGINAL = True\n")
    (tmp_path / "liger_kernel-0.9.dist-info").mkdir()
    (tmp_path / "liger_kernel-0.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.9\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    integrations.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_install_and_uninstall(clean):
    assert not integrations.is_installed()
    integrations.install()
    integrations.install()  # nothing new
    import liger_kernel
    import liger_kernel.transformers.rms_norm

    assert liger_kernel.__version__ == VERSION and integrations.is_installed()
    assert importlib.metadata.version("liger-kernel") == importlib.metadata.version("liger_kernel") == VERSION
    assert importlib.metadata.packages_distributions()["liger_kernel"] == ["liger-kernel"]
    assert importlib.util.find_spec("liger_kernel") is not None
    integrations.uninstall()
    assert not any(name.split(".")[0] == "liger_kernel" for name in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        import liger_kernel  # noqa: F811
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("liger-kernel")


@pytest.mark.parametrize("variable", ["LIGER_KERNEL_IMPL", "LIGER_KERNEL_IMPL_RMS_NORM", "LIGER_KERNEL_BACKEND"])
def test_refuses_another_implementation_that_the_environment_names(variable, monkeypatch):
    monkeypatch.setenv(variable, "nonsense")
    integrations.install(replace=True)
    try:
        with pytest.raises(ImportError, match=f"^{variable}: got 'nonsense'"):
            import liger_kernel  # noqa: F401
        monkeypatch.setenv(variable, "triton")
        import liger_kernel  # noqa: F401, F811
    finally:
        integrations.uninstall()


def test_the_environment_asks_to_hide_an_installed_one(original, monkeypatch):
    """The plug-ins of trainers that require liger-kernel call `install()`."""
    monkeypatch.setenv("LIGER_HW_STAND_IN", "yes")
    with pytest.raises(ValueError, match="^LIGER_HW_STAND_IN: got 'yes'"):
        integrations.install()
    monkeypatch.setenv("LIGER_HW_STAND_IN", "replace")
    with pytest.raises(RuntimeError, match="LIGER_HW_STAND_IN=replace"):
        integrations.install(replace=False)
    integrations.install()
    import liger_kernel

    assert liger_kernel.__version__ == VERSION


def test_does_not_hide_an_installed_one_unasked(original):
    with pytest.raises(RuntimeError, match="replace=True"):
        integrations.install()
    import liger_kernel as real

    assert real.ORIGINAL
    integrations.install(replace=True)
    import liger_kernel as ours

    assert ours.__version__ == VERSION and not hasattr(ours, "ORIGINAL")
    assert importlib.metadata.version("liger-kernel") == VERSION
    integrations.uninstall()
    import liger_kernel as again

    assert again is real and importlib.metadata.version("liger-kernel") == "0.9"


def test_transformers_looks_again(clean):
    utils = pytest.importorskip("transformers.utils.import_utils")
    assert not utils.is_liger_kernel_available()
    integrations.install()
    assert utils.is_liger_kernel_available()
    integrations.uninstall()
    assert not utils.is_liger_kernel_available()


def test_imported_names_are_those_of_this_package(stand_in):
    from liger_kernel.transformers import LigerRMSNorm

    pickled = pickle.dumps(LigerRMSNorm(8))
    integrations.uninstall()
    assert b"liger_kernel" not in pickled and type(pickle.loads(pickled)) is LigerRMSNorm


def test_assignments_to_its_modules_hold(stand_in, monkeypatch):
    from liger_kernel.transformers.model import loss_utils

    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", len)
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    assert LigerForCausalLMLoss is len


def test_a_loss_that_patched_models_do_not_call(stand_in, monkeypatch):
    """Axolotl assigns one for liger_use_token_scaling."""
    from liger_kernel.transformers import functional
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", len)
    with pytest.raises(ValueError, match="use_token_scaling=True"):
        functions["llama"]()


def _see(queue):
    import liger_kernel

    queue.put(liger_kernel.__version__)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_forked_processes_have_it(stand_in):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    context.Process(target=_see, args=(queue,)).start()
    assert queue.get(timeout=30) == VERSION


PROGRAM = """
import multiprocessing, subprocess, sys
import liger_kernel

def see(queue):
    import liger_kernel
    queue.put(liger_kernel.__version__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=see, args=(queue,)).start()
    child = [sys.executable, "-c", "import liger_kernel; print(liger_kernel.__version__)"]
    others = queue.get(timeout=60), subprocess.check_output(child, text=True)
    print(sys.argv[1:], __name__, liger_kernel.__version__, *others)
"""


def run(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "liger_hw.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


@pytest.mark.parametrize("form", ["script", "module"])
def test_run_reaches_every_process(form, tmp_path, clean):
    (tmp_path / "program.py").write_text(PROGRAM)
    what = [str(tmp_path / "program.py")] if form == "script" else ["-m", "program"]
    found = run(*what, "--flag", "-m", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[0] == f"['--flag', '-m'] __main__ {VERSION} {VERSION} {VERSION}"


def test_run_plans_activations(tmp_path, clean):
    """The budget reaches every process; a wrong one ends the command before the program."""
    child = (
        "subprocess.check_output([sys.executable, '-c', 'import os; print(os.environ[name])'.replace('name', repr(N))])"
    )
    (tmp_path / "program.py").write_text(f"import subprocess, sys\nN = 'LIGER_HW_ACTIVATIONS'\nprint({child})")
    found = run("--activations", "0.9", "program.py", cwd=tmp_path)
    assert found.returncode == 0 and "0.9" in found.stdout, found.stderr
    refused = run("--activations", "much", "program.py", cwd=tmp_path)
    assert refused.returncode == 2 and "budget: got 'much', allowed: bytes" in refused.stderr and not refused.stdout


def test_run_explains_errors(tmp_path, original):
    (tmp_path / "program.py").write_text("import liger_kernel; print(liger_kernel.__version__)")
    assert "no such file: nothing.py" in run("nothing.py", cwd=tmp_path).stderr
    refused = run("program.py", cwd=tmp_path)
    assert refused.returncode == 2 and "--replace" in refused.stderr
    assert run("--replace", "program.py", cwd=tmp_path).stdout.strip() == VERSION


def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path, clean):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = 1")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SITE, str(tmp_path), *sys.path])}
    code = "import sys, liger_kernel; print(sys.mine, liger_kernel.__version__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert found.stdout.split() == ["1", VERSION], found.stderr


def test_children_get_and_lose_the_stand_in(clean, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    integrations.install(children=True)
    integrations.install(children=True)
    assert os.environ["PYTHONPATH"] == os.pathsep.join([SITE, "somewhere"])
    integrations.uninstall()
    assert os.environ["PYTHONPATH"] == "somewhere"


def test_functions_that_choose_an_implementation(stand_in):
    torch = pytest.importorskip("torch")
    from liger_kernel import functional

    x, w, target = torch.randn(6, 8), torch.randn(31, 8), torch.randint(31, (6,))
    assert functional.rms_norm.__name__ == "rms_norm"
    expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
    torch.testing.assert_close(functional.rms_norm(x, torch.ones(8), impl="nvidia-triton"), expected)
    loss, *others = functional.fused_linear_cross_entropy(x, w, target, mode=None)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.T, target))
    assert others == [None] * 3
    torch.testing.assert_close(functional.swiglu(x, x, 2.0, 3.0), 3 * torch.nn.functional.silu(2 * x) * x)
    with pytest.raises(ValueError, match="backend"):
        functional.softmax(x, backend="cutile")


def test_environment_report(tmp_path, clean):
    found = run("-m", "liger_kernel.env_report", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "Python: " in found.stdout and "torch: " in found.stdout and "Accelerators: " in found.stdout
    assert f"liger_kernel: {VERSION}" in found.stdout
