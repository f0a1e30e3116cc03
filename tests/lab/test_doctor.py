import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_hw import backends, cli, dispatch, tuning
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.backends import amd, intel, nvidia
from liger_hw.testing.case import Case
from liger_hw.tuning import Config
from liger_lab import contribution
from liger_lab.cases import small_cases
from liger_lab.cli import common
from liger_lab.levels import doctor, evidence

pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason="starts the interpreter by itself")
H200 = nvidia.ARCHS["sm90"]
GPU = torch.device("cuda", 0)


def report(folder):
    return json.loads((folder / "doctor.json").read_text())


def test_on_a_cpu_it_says_what_it_can_check_and_does(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    assert cli.main(["doctor", "swiglu", "--report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for words in ("swiglu: ", "no accelerator is here", "Triton's interpreter", "compile", "doctor.json"):
        assert words in shown
    runs, cells = evidence.read([tmp_path])
    cases = len(list(small_cases("swiglu", torch.float32)))
    assert {(cell.backend, cell.dtype, cell.level, cell.passed, cell.failed) for cell in cells} == {
        (name, "fp32", "interpreted", cases, 0) for name in ("nvidia:sm90", "amd:gfx942", "intel:pvc")
    }
    found = report(tmp_path)
    assert found["info"]["versions"]["torch"] == torch.__version__ and found["plain"] == {} and not found["checks"]
    assert cli.main(["evidence", str(tmp_path), "--report", str(tmp_path / "m")]) == 0


@pytest.fixture
def wrong_swiglu():
    op = dispatch.OPS["swiglu"]
    op.register("cpu")(lambda gate, up, *options: gate * up)
    yield
    del op.implementations["cpu"]
    op.register("reference")(op.reference)  # forgets what was chosen meanwhile


def test_what_is_wrong_is_found(monkeypatch, wrong_swiglu):
    found = doctor._examine("swiglu", torch.device("cpu"))
    assert found["plain"].startswith("AssertionError: output 0 of swiglu on None: worst error")
    assert doctor._told(found).startswith("WRONG as plain torch")
    lines = doctor.failures({"cells": [], "plain": {"swiglu": found["plain"]}})
    assert lines == [f"swiglu as plain torch: {found['plain']}"]


def test_unknown_ops_and_forced_vendors_are_refused(monkeypatch, capsys):
    assert cli.main(["doctor", "nonsense"]) == 2
    assert f"unknown op 'nonsense'. Ops: {', '.join(sorted(dispatch.OPS))}" in capsys.readouterr().err
    monkeypatch.setattr("liger_lab.cli.doctor.accelerators", lambda: [GPU])
    with backends.use_backend("amd"):
        assert cli.main(["doctor"]) == 2
    assert "unset LIGER_HW_BACKEND" in capsys.readouterr().err


def a_gpu(monkeypatch, device, per_second, *kernels):
    """A GPU on which everything is right, copies at a rate, and runs kernels of these spills."""
    monkeypatch.setitem(backends._devices, GPU, device)
    backend = f"{device.vendor}:{device.arch}"

    def each(ops, where, binaries):
        for op in ops:
            cells = [[op, backend, "bf16", "executed", 5, 0, []]]
            built = [
                {"op": op, "kernel": "k", "num_warps": 4, "shared": 0, "registers": 40, "spills": n} for n in kernels
            ]
            yield op, {"cells": cells, "plain": None, "kernels": built}

    class Clock:
        def __init__(self, device):
            pass

        def ceilings(self, dtype):
            return {"bytes_per_second": per_second, "flops_per_second": 1e15}

        def graph(self, function):
            return None

        def seconds(self, function):
            return 1e-3

    monkeypatch.setattr(doctor, "_each", each)
    monkeypatch.setattr("liger_lab.bench.operations.clean", lambda device: None)  # its import takes the real Clock
    monkeypatch.setattr("liger_lab.bench.measure.Clock", Clock)
    case = Case("64x64", lambda new: (torch.randn(64, 64, requires_grad=True),) * 2, op="swiglu")
    monkeypatch.setattr(doctor, "model_cases", lambda ops: [case])
    monkeypatch.setattr(common, "here", lambda: GPU)
    monkeypatch.setattr("liger_lab.cli.doctor._facts", lambda: {})
    return sum(dispatch.OPS["swiglu"].cost_of(*case.make("meta", torch.bfloat16))[:2])


@pytest.mark.parametrize("device", [H200, amd.ARCHS["gfx942"], intel.ARCHS["bmg"]], ids=lambda d: d.arch)
def test_a_gpu_that_is_as_expected(device, monkeypatch, tmp_path, capsys):
    moved = a_gpu(monkeypatch, device, 0.9 * device.bandwidth * 1e9, 0)
    monkeypatch.setattr("liger_lab.bench.measure.Clock.seconds", lambda self, f: moved / (0.8 * device.bandwidth * 1e9))
    assert cli.main(["doctor", "swiglu", "--report", str(tmp_path)]) == 0
    shown, found = capsys.readouterr().out, report(tmp_path)
    assert all(check["as_expected"] for check in found["checks"]) and len(found["checks"]) == 8
    assert ("occupancy" in found["kernels"][0]) == (device.vendor != "intel")  # no limits written down
    assert "DIFFERS" not in shown and "89%" in shown and "liger-hw tune --contribute" in shown
    (cell,) = evidence.read([tmp_path])[1]
    assert (cell.backend, cell.level, cell.passed) == (f"{device.vendor}:{device.arch}", "executed", 5)


def test_a_gpu_that_is_not_as_expected(monkeypatch, tmp_path, capsys):
    odd = H200.with_facts(arch="sm91", shared_memory=64 * 1024)
    moved = a_gpu(monkeypatch, odd, 1e12, 0, 16)
    monkeypatch.setattr("liger_lab.bench.measure.Clock.seconds", lambda self, f: 10 * moved / 1e12)
    assert cli.main(["doctor", "swiglu", "--report", str(tmp_path)]) == 0  # slow, spilling, unknown; but right
    shown = capsys.readouterr().out
    wrong = [check["what"] for check in report(tmp_path)["checks"] if not check["as_expected"]]
    assert wrong == ["architecture", "shared_memory", "spills of 2 kernels", "copy rate",
                     "swiglu 64x64, forward and backward"]  # fmt: skip
    assert shown.count("DIFFERS") == 5 and "k (4 warps, 40 registers): 16" in shown and "10%" in shown
    assert "liger-hw tune swiglu --contribute" in shown and "please send it" in shown


@pytest.mark.parametrize("name, sheet", [("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA H100 PCIe", 2000),
                                         ("NVIDIA H200", 4800), ("", 4800), ("NVIDIA RTX A4000", 0)])  # fmt: skip
def test_cards_of_one_architecture_have_their_own_rates(name, sheet, monkeypatch, tmp_path, capsys):
    card = H200.with_facts(name=name)
    moved = a_gpu(monkeypatch, card, 0.85 * (sheet or 1000) * 1e9, 2)
    seconds = moved / (0.8 * (sheet or 1000) * 1e9)
    monkeypatch.setattr("liger_lab.bench.measure.Clock.seconds", lambda self, f: seconds)
    assert cli.main(["doctor", "swiglu", "--report", str(tmp_path)]) == 0
    checks = {check["what"]: check for check in report(tmp_path)["checks"]}
    assert "DIFFERS" not in capsys.readouterr().out and ("copy rate" in checks) == bool(sheet)
    assert not sheet or f"60% of {sheet} GB/s" in checks["copy rate"]["expected"]
    assert checks["spills of 1 kernels"]["found"] == "k (4 warps, 40 registers): 2"


def test_interrupted_it_says_what_was_done(monkeypatch, tmp_path, capsys):
    def each(ops, device, binaries):
        yield ops[0], doctor._crashed(ops[0], device, "its process crashed")
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_each", each)
    monkeypatch.setattr(common, "here", lambda: torch.device("cpu"))
    assert cli.main(["doctor", "swiglu", "rope", "--report", str(tmp_path)]) == 1  # the first op failed
    assert "interrupted: 1 of 2 ops were checked" in capsys.readouterr().out
    assert report(tmp_path)["interrupted"].startswith("interrupted: 1 of 2 ops")


def test_interrupted_it_leaves_nothing(tmp_path):
    """In a process of its own, as the terminal's Ctrl-C goes to each of its processes, while they still import.

    A shell's background jobs, of which this run may be one, ignore Ctrl-C, and so would it.
    """
    command = [sys.executable, "-u", "-m", "liger_hw", "doctor", "swiglu", "rope", "--report", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True, cwd=Path(__file__).parents[2],
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    while process.poll() is None and len(children_of(process.pid)) < 2:  # multiprocessing's tracker, and a worker
        time.sleep(0.05)
    time.sleep(0.2)  # the others start
    os.killpg(process.pid, signal.SIGINT)
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in said and "leaked" not in said, said
    assert "0 of 2 ops were checked" in shown and "report: " in shown, shown
    assert report(tmp_path)["interrupted"].startswith("interrupted: ")


def children_of(process):
    return [
        child for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]  # fmt: skip


def test_a_process_that_crashes_is_one_failure(monkeypatch):
    monkeypatch.setitem(backends._devices, GPU, H200)
    monkeypatch.setattr(doctor, "_examine", die_of_bad)
    found = dict(doctor._each(["good", "bad", "fine"], GPU))
    assert found["good"] == found["fine"] == {"cells": []}
    assert found["bad"]["cells"] == [["bad", "nvidia:sm90", "fp32", "executed", 0, 1, ["its process crashed"]]]


def die_of_bad(op, device, binaries):
    if op == "bad":
        os._exit(1)
    return {"cells": []}


def test_a_context_that_a_kernel_broke_ends_its_process(monkeypatch):
    ended = []

    def synchronize(device):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(doctor, "_cases", lambda *args: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr("os._exit", ended.append)
    doctor._examine("rope", GPU)
    assert ended == [1]


def test_machine_code_for_other_machines(monkeypatch, tmp_path, capsys):
    metadata = SimpleNamespace(name="rope_rotate", num_warps=4, shared=0)
    asm = {"ttir": "module", "spv": b"\x03\x02", "ptx": ".version 8"}
    built = SimpleNamespace(metadata=metadata, n_regs=40, n_spills=0, hash=64 * "a", asm=asm)
    about = doctor._about("rope", built, tmp_path / "binaries")
    assert about["file"] == "rope_rotate-aaaaaaaaaaaa"
    files = {file.name: file.read_bytes() for file in (tmp_path / "binaries").iterdir()}
    assert files == {f"{about['file']}.spv": b"\x03\x02", f"{about['file']}.ptx": b".version 8"}
    a_gpu(monkeypatch, H200, 4e12, 0)
    monkeypatch.setattr("liger_lab.cli.doctor.accelerators", lambda: [GPU])
    cli.main(["doctor", "swiglu", "--binaries", "--report", str(tmp_path)])
    assert len(zipfile.ZipFile(tmp_path / "binaries.zip").namelist()) == 2
    capsys.readouterr()
    assert cli.main(["doctor", "qwen3", "--binaries"]) == 2 and "allowed: ops" in capsys.readouterr().err
    monkeypatch.setattr("liger_lab.cli.doctor.accelerators", lambda: [])
    assert cli.main(["doctor", "swiglu", "--binaries"]) == 2 and "needs a GPU" in capsys.readouterr().err


# tables that are handed on -------------------------------------------------------------------------------------------

KEY = "rms_norm_forward(4096, 2)"


@pytest.fixture
def entry():
    config = tuning.choice.CONFIGS["rms_norm_forward"]
    found = config.heuristic(4096, 2, H200.with_facts(name="NVIDIA H200"))
    return tuning.search.measured_entry(config, found, 1e-3, 2e-3)


def table(folder, name="nvidia-sm90.json", **entries):
    (folder / name).write_text(json.dumps(entries))
    return folder / name


def check(*files):
    return cli.main(["tune", "--check", *map(str, files)])


def test_what_is_shipped_is_fit_to_ship():
    assert cli.main(["tune", "--check"]) == 0


def test_a_good_table_passes(entry, tmp_path, capsys):
    file = table(tmp_path, **{KEY: entry})
    assert check(file) == 0 and f"{file}: fit to ship\n" in capsys.readouterr().out
    file = table(tmp_path, **{KEY: entry | {"kernel": "0123456789abcdef"}})
    assert check(file) == 0 and "1 measured on other code" in capsys.readouterr().out
    file = table(
        tmp_path, **{KEY: {name: value for name, value in entry.items() if name not in ("ms", "heuristic_ms")}}
    )
    assert check(file) == 0, "a winner whose time nobody wrote down"
    config = Config(entry["meta"], num_warps=8, knobs={"grf_mode": "256"})
    assert check(table(tmp_path, "intel-bmg.json", **{KEY: entry | config.to_json()})) == 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_warps": 64}, "64 warps are 2048 threads"), ({"num_warps": 3}, "powers of two"),
        ({"meta": {"COLS": 4096}}, "allowed: ROWS, COLS"), ({"knobs": {"grf_mode": "256"}}, "knobs="),
        ({"ms": 3.0}, "a winner that is faster"), ({"ms": "fast"}, "a winner that is faster"),
        ({"origin": "guessed"}, "origin='guessed', allowed: measured, compiled"),
        ({"origin": "compiled"}, "without heuristic_missed"), ({"device": ""}, "device=''"),
        ({"date": "yesterday"}, "date='yesterday'"), ({"kernel": "x"}, "kernel='x'"),
        ({"triton": None}, "triton=None"), ({"note": "mine"}, "got note"), ({"programs": 0}, "positive integers"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_an_entry(changes, words, entry, tmp_path, capsys):
    assert check(table(tmp_path, **{KEY: entry | changes})) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, key, value, words",
    [
        ("nvidia-sm90.json", "nonsense(1)", None, "no configuration is called so"),
        ("nvidia-sm90.json", "rms_norm_forward", None, "no configuration is called so"),
        ("nvidia-sm90.json", "rms_norm_forward(4096)", None, "got 1 numbers, allowed: cols, itemsize"),
        ("nvidia-sm90.json", "rms_norm_forward(a, b)", None, "its numbers are none"),
        ("nvidia-sm90.json", "rms_norm_forward(<=4096 even, 2)", None, "its numbers are none"),
        ("nvidia-sm90.json", "rms_norm_forward(<=4096 odd, 2)", None, "for a class of widths, allowed: one width"),
        ("nvidia-sm90.json", KEY, [1], "got list"), ("nvidia-sm90.json", KEY, {}, "origin=None"),
        ("nvidia-sm12.json", KEY, None, "got this name"), ("mine.json", KEY, None, "allowed: nvidia-sm90.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table(name, key, value, words, entry, tmp_path, capsys):
    assert check(table(tmp_path, name, **{key: entry if value is None else value})) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, words", [("{", "Expecting"), ("{}", "got dict of 0"), ("[]", "got list"), (None, "No such")]
)
def test_what_is_no_table(text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / "amd-gfx942.json").write_text(text)
    assert check(tmp_path / "amd-gfx942.json") == 1 and words in capsys.readouterr().out


def test_what_is_contributed_is_fit_to_ship(entry, monkeypatch, tmp_path):
    mine = table(tmp_path, "local.json", **{
        KEY: entry, "rms_norm_forward(8192, 2)": entry | {"kernel": "0123456789abcdef"},
        "rms_norm_forward(2048, 2)": entry | {"num_warps": 3},
    })  # fmt: skip
    monkeypatch.setattr(tuning.entries, "shipped_file", lambda device: tmp_path / "shipped.json")
    compiled = {name: entry[name] for name in contribution.FIELDS}
    compiled |= {"origin": "compiled", "heuristic_missed": "spills: 8 spilled, 8 bytes of scratch a lane, allowed 0"}
    shipped = {"rms_norm_forward(<=4096 odd, 2)": compiled, KEY: compiled}
    (tmp_path / "shipped.json").write_text(json.dumps(shipped))
    file = contribution.contribute(mine, H200, tmp_path / "out")
    assert file.name == "nvidia-sm90.json" and json.loads(file.read_text()) == shipped | {KEY: entry}
    assert contribution.problems(file) == [] and tuning.choice.other_code(json.loads(file.read_text())) == []
    assert contribution.contribute(tmp_path / "absent.json", H200, tmp_path) is None
    with pytest.raises(ValueError, match="sm91 is not among nvidia's architectures"):
        contribution.contribute(mine, H200.with_facts(arch="sm91"), tmp_path)


def test_tune_contributes(monkeypatch, tmp_path, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tuning.choice.forget()
    meta = torch.device("meta")
    monkeypatch.setattr("liger_lab.cli.tune.accelerators", lambda: [meta])
    monkeypatch.setitem(backends._devices, meta, H200.with_facts(name="NVIDIA H200"))

    def bench(function):
        asked = tuning.search.configurations_of(function)
        return sum(1e-3 / config(*shape, device).num_warps for config, shape, device in asked)

    monkeypatch.setattr(tuning.search, "bench", bench)
    assert cli.main(["tune", "rms_norm", "--shapes", "8192x4096", "--contribute"]) == 0
    assert "nvidia-sm90.json: put it into liger_hw/tuning/tables/" in capsys.readouterr().out
    assert check(tmp_path / "nvidia-sm90.json") == 0
    tuning.choice.forget()
