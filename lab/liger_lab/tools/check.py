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
SLOW_OPS = [
    "tests/kernels/test_huge_logits.py", "tests/kernels/test_incoming_gradients.py",
    "tests/kernels/test_vocabulary_parallel.py", "tests/test_tracing.py",
]  # fmt: skip
CALLERS = [
    "tests/losses", "tests/transformers/test_kernels_in_models.py", "tests/transformers/test_lora_layers.py",
]  # fmt: skip
PROGRAMS = [
    "tests/test_cli.py", "tests/test_examples.py", "tests/test_imports.py", "tests/test_new_op.py",
    "tests/test_sharding.py", "tests/fuzz/test_programs.py", "tests/lab/test_bench.py",
    "tests/lab/test_distributed_bench.py", "tests/lab/test_documentation.py", "tests/lab/test_emulation.py",
    "tests/lab/test_loss_bench.py", "tests/transformers/test_activations.py",
    "tests/transformers/test_adapters_on_ranks.py", "tests/transformers/test_autocast_cache.py",
    "tests/transformers/test_compiled_models.py", "tests/transformers/test_context_parallel.py",
    "tests/transformers/test_converge.py", "tests/transformers/test_engines.py",
    "tests/transformers/test_lazy_logits_everywhere.py", "tests/transformers/test_monkey_patch.py",
    "tests/transformers/test_tensor_parallel.py", "tests/transformers/test_training.py",
    "tests/transformers/test_unusual_models.py", "tests/integrations/test_plugins.py",
    "tests/integrations/test_token_metrics.py", "tests/integrations/test_trainer_matrix.py",
    "tests/integrations/test_trainers.py", "tests/integrations/test_trainers_as_documented.py",
]  # fmt: skip
MODELS = ["tests/transformers/test_models.py", "tests/transformers/test_parts.py"]
COMPILED = ["tests/lab/test_targets.py", "tests/losses/test_losses_on_targets.py"]
MUTANTS = ["rms_norm", "glu", "logits_divergence", "sequences"]
EMULATED = (  # an op of each folder of kernels: all take five minutes, which the nightly job has
    "cross_entropy", "experts", "geglu", "lora_linear", "mhc_pre", "rms_norm", "rope",
)  # fmt: skip
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
    return pytest(*OPS, "tests/test_tracing.py", *CALLERS, *args, **INTERPRETED)


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
    files = [f"tests/transformers/test_{name}.py" for name in ("deepspeed", "small_optimizers")]
    files += [f"tests/lab/test_{name}.py" for name in ("bench", "distributed_bench")]
    names = "deepspeed or small_optimizers or launch or two_ranks or offloaded or every_optimizer"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix, "torch_extensions"))
    for lock in cache.glob("*/lock"):  # a run that ended while it compiled leaves it, and the next waits for ever
        lock.unlink()
    words = "-m", "pytest", *files, "tests/test_examples.py", "-k", names
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
    others = [f"tests/{name}.py" for name in ("test_imports", "test_sharding", "transformers/test_compiled_models")]
    return test(*args) or pytest(*MODELS, *others, *args)


def trl(*args):
    """Test losses and examples with the newest TRL; installs TRL, Lightning and bitsandbytes."""
    if status := install("trl>=1.16", "requests", "lightning", "bitsandbytes"):
        return status
    files = "tests/losses/test_trl.py", "tests/integrations/test_trl_steps.py", "tests/test_examples.py"
    return run("-m", "pytest", "-n", "2", "-k", "trl or example", *files, *args, **QUIET_TRL)


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
