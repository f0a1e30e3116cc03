"""Run the project's checks, each by its name: `python -m liger_lab.tools.check NAME [ARG ...]`.

`make test` and `make all` run them from here, and so do the jobs of .github/workflows. Further arguments go to pytest
or to the program of the check; `check list` prints the names.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OPS = ["tests/kernels", "tests/test_dispatch.py"]


def files(**folders: str) -> list[str]:
    """Return the paths of files of tests, by folder and the middle of their names."""
    names = [(folder, name) for folder in folders for name in folders[folder].split()]
    return [str(Path("tests", folder.removeprefix("tests"), f"test_{name}.py")) for folder, name in names]


SLOW_OPS = files(kernels="huge_logits incoming_gradients vocabulary_parallel", tests="tracing")
CALLERS = ["tests/losses", *files(transformers="kernels_in_models lora_layers")]
PROGRAMS = files(
    tests="cli examples imports new_op sharding",
    fuzz="programs",
    lab="bench distributed_bench documentation emulation loss_bench",
    transformers="activations adapters_on_ranks autocast_cache compiled_models context_parallel converge engines "
    "lazy_logits_everywhere monkey_patch tensor_parallel training unusual_models",
    integrations="plugins token_metrics trainer_matrix trainers trainers_as_documented",
)
MODELS = files(transformers="models parts")
COMPILED = files(lab="targets", losses="losses_on_targets")
MUTANTS = ["rms_norm", "glu", "logits_divergence", "sequences"]
# an op of each folder of kernels: all take five minutes, which the nightly job has
EMULATED = "cross_entropy", "experts", "geglu", "lora_linear", "mhc_pre", "rms_norm", "rope"
INTERPRETED = {"TRITON_INTERPRET": "1"}
NO_TESTS = 5  # pytest's status where -k selects none
NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"
OLDEST_NUMPY = "numpy<2.4"  # the interpreter of Triton 3.6 fails with a newer one
QUIET_TRL = {"TRL_EXPERIMENTAL_SILENCE": "1"}


def run(*words: str, **variables: str) -> int:
    """Run `python WORDS` in the checkout and return its status."""
    print("+", *variables, "python", *words, flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | variables).returncode


def pytest(*words: str, **variables: str) -> int:
    """Run pytest on every core."""
    return run("-m", "pytest", "-n", "auto", *words, **variables)


def each(*statuses: int) -> int:
    """Return 1 if one of several runs of pytest failed, or none had a test."""
    return int(any(status not in (0, NO_TESTS) for status in statuses) or set(statuses) == {NO_TESTS})


def install(*requirements: str, keep_torch: bool = True, **variables: str) -> int:
    """Install packages beside the torch of this environment, unless NO_VENV says to change nothing."""
    if os.environ.get("NO_VENV"):
        return 0
    constraints = Path(sys.prefix, "constraints.txt")
    kept = ["--constraint", str(constraints)] if keep_torch and constraints.exists() else []
    return run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *kept, *requirements, **variables)


def test(*args):
    """Run the tests for this machine, a few of each matrix."""
    whole = [f"--ignore={path}" for path in (*PROGRAMS, *MODELS, *COMPILED)]
    # A test of kernels takes one vendor or architecture, in turn. Two runs, because the import of Triton chooses its
    # interpreter; the second has the tests that need it.
    return each(
        pytest("--archs", "turns", *whole, *args),
        pytest(*OPS, "--archs", "turns", *(f"--ignore={path}" for path in SLOW_OPS), *args, **INTERPRETED),
    )


def programs(*args):
    """Run the tests of whole programs: examples, commands, training, ranks, compiled models, the benchmark."""
    return pytest("--archs", "turns", *PROGRAMS, *args)


def models(*args):
    """Compare every class of language models with its patched copy; interpret slow tests of kernels."""
    return each(
        pytest("--models", "all", *MODELS, *args),
        pytest(*SLOW_OPS, *CALLERS, "--archs", "turns", *args, **INTERPRETED),
    )


def compile(*args):
    """Compile every kernel for one architecture of each kind; --archs all: for every one."""
    return pytest(*COMPILED, *args)


def interpret(*args):
    """Run kernels in Triton's interpreter for every vendor, or for LIGER_HW_BACKEND."""
    return pytest(*OPS, *files(tests="tracing"), *CALLERS, *args, **INTERPRETED)


def mutants(*args):
    """Plant mistakes in kernels; their tests must fail."""
    return run("-m", "liger_lab.tools.mutants", *(args or MUTANTS))


def emulate(*args):
    """Execute AMD machine code of one op of each folder, loop and tail once."""
    few = "--few", "--archs", "gfx942", "--ops", *EMULATED
    return run("-m", "liger_hw", "emulate", *(args or few))


def fuzz(*args):
    """Run random programs on tiny models, plain and patched; LIGER_HW_FUZZ=10000 sets how many."""
    return run("tests/fuzz/run.py", *args)


def converge(*args):
    """Train mini models of every family of liger-kernel's list, plain and patched, and compare."""
    return run("-m", "liger_lab.tools.converge", *args)


def versions(*args):
    """Test models and trainers on the oldest and the newest transformers; --all: on all."""
    return run("-m", "liger_lab.tools.transformers_versions", *args)


def notebook(*args):
    """Execute the notebook of the examples, in about a minute."""
    return run("-m", "liger_lab.tools.notebook", *args)


def distributed(*args):
    """Test DeepSpeed, small optimizers and the launch of examples on two ranks; installs their packages."""
    packages = "lightning", "bitsandbytes", "galore-torch"
    # DeepSpeed's operators compile at their first use, not here
    if status := install("--no-build-isolation", "setuptools", "deepspeed", *packages, DS_BUILD_OPS="0"):
        return status
    paths = files(transformers="deepspeed small_optimizers", lab="bench distributed_bench", tests="examples")
    names = "deepspeed or small_optimizers or launch or two_ranks or offloaded or every_optimizer"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix, "torch_extensions"))
    for lock in cache.glob("*/lock"):  # a run that ended while it compiled leaves it, and the next waits for ever
        lock.unlink()
    words = "-m", "pytest", *paths, "-k", names
    return run(*words, *args, TORCH_EXTENSIONS_DIR=str(cache))


def prerelease(*args):
    """Run test, programs and models with torch's newest pre-release, installed from TORCH_INDEX_NIGHTLY."""
    index = os.environ.get("TORCH_INDEX_NIGHTLY") or NIGHTLY
    if status := install("--pre", "--upgrade", "--index-url", index, "torch", keep_torch=False):
        return status
    return test(*args) or programs(*args) or pytest(*MODELS, *args)


def oldest(*args):
    """Run test and models with pyproject.toml's oldest torch and Triton, installed also from TORCH_INDEX."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [line.partition(";")[0].replace(">=", "==") for line in dependencies if ">=" in line]
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    if status := install(*index, *bounds, OLDEST_NUMPY, keep_torch=False):
        return status
    others = files(tests="imports sharding", transformers="compiled_models")
    return test(*args) or pytest(*MODELS, *others, *args)


def trl(*args):
    """Test losses and examples with the newest TRL; installs TRL, Lightning and bitsandbytes."""
    if status := install("trl>=1.16", "requests", "lightning", "bitsandbytes"):
        return status
    paths = files(losses="trl", integrations="trl_steps", tests="examples")
    return run("-m", "pytest", "-n", "2", "-k", "trl or example", *paths, *args, **QUIET_TRL)


def hub(*args):
    """Test layers for the Hub's kernels in a local folder; installs kernels."""
    if status := install("kernels"):
        return status
    return run("-m", "pytest", "-rs", "tests/integrations/test_plugins.py", "-k", "hub", *args)


def trainers(*args):
    """Test trainers as documented, each in an environment of its own; NAME ...: these alone."""
    return run("-m", "liger_lab.tools.trainers", *args)


CHECKS: dict[str, Callable[..., int]] = {
    function.__name__: function
    for function in (
        test, programs, models, compile, interpret, mutants, emulate, fuzz, converge, versions, notebook, distributed,
        prerelease, oldest, trl, trainers, hub,
    )
}  # fmt: skip
ALL = ("programs", "models", "compile", "mutants", "emulate")  # of `make all`, after lint and test


def main(argv: list[str]) -> int:
    """Run a check with its arguments, or all of ALL until one fails."""
    name, *args = argv or ["list"]
    if name == "list":
        print("\n".join(f"{check:12} {function.__doc__.splitlines()[0]}" for check, function in CHECKS.items()))
        return 0
    if name == "all" and not args:
        return next((status for status in (CHECKS[check]() for check in ALL) if status), 0)
    if name not in CHECKS:
        allowed = "all (without arguments), list" if name == "all" else f"all, list, {', '.join(CHECKS)}"
        print(f"check: got {' '.join(argv)}, allowed: {allowed}", file=sys.stderr)
        return 2
    return CHECKS[name](*args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
