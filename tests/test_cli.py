import base64
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liger_hw import backends, cli, console, dispatch, tuning, use_backend
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.backends import nvidia
from liger_hw.kernels import load_all
from liger_lab import terminal
from liger_lab.cases import CASES, model_cases, step
from liger_lab.cli import tune

load_all()
needs_triton = pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")


@pytest.fixture(autouse=True)
def an_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "cache"))
    tuning.choice.forget()


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)


# info


def info(capsys, *arguments):
    assert cli.main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_info_on_a_cpu(on_a_cpu, capsys):
    found = json.loads(info(capsys, "--json"))
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["liger_hw"]
    assert found["forced"] is None and found["interpreter"] == interpreting()
    (device,) = found["devices"]
    assert (device["device"], device["detected"]["vendor"]) == ("cpu", "cpu")
    assert {op["implementation"] for op in device["ops"].values()} <= {"cpu", "reference"}
    assert set(device["ops"]) == set(dispatch.OPS)
    text = info(capsys)
    for word in ("forced: nothing", torch.__version__, "rms_norm", "reference", "LIGER_HW_BACKEND"):
        assert word in text
    assert ("TRITON_INTERPRET=1 alone runs no kernel" in text) == interpreting()


@needs_triton
@pytest.mark.parametrize(
    "name, vendor, arch",
    [("nvidia:sm90",) + ("nvidia", "sm90"), ("amd:gfx942", "amd", "gfx942"), ("intel", "intel", "pvc")],
)
def test_info_of_a_forced_backend(on_a_cpu, capsys, name, vendor, arch):
    with use_backend(name):
        found, text = json.loads(info(capsys, "--json")), info(capsys)
    (device,) = found["devices"]
    assert found["forced"] == name and device["detected"]["vendor"] == "cpu"
    assert (device["configured_as"]["vendor"], device["configured_as"]["arch"]) == (vendor, arch)
    served = {op["implementation"] for op in device["ops"].values()}
    assert served == ({"triton"} if interpreting() else {None})
    assert interpreting() or "TRITON_INTERPRET=1" in text
    assert "shipped table: " in text and "local table: " in text


@needs_triton
@pytest.mark.parametrize("name", ["nvidia:sm90", "amd:gfx942", "intel"])
def test_launches_of_a_forced_backend(on_a_cpu, capsys, name):
    with use_backend(name):
        (device,) = printed(capsys, "launches")
        assert cli.main(["launches"]) == 0
        text = capsys.readouterr().out
        (chosen,) = printed(capsys, "launches", "swiglu", "rope")
    entries = device["configurations"]
    assert {entry["op"] for entry in entries} == set(dispatch.OPS)
    assert {entry["key"].partition("(")[0] for entry in entries} <= set(tuning.choice.CONFIGS)
    assert {entry["source"] for entry in entries} <= {"heuristic", "shipped"}
    for entry in entries:
        assert entry["meta"] and entry["num_warps"] * device["configured_as"]["warp_size"] <= 1024
        assert entry["key"] in text and entry["shape"] in text
    shapes = {(case.op, case.label) for case in model_cases(["swiglu", "rope"])}
    assert {entry["op"] for entry in chosen["configurations"]} == {"swiglu", "rope"}
    assert {(entry["op"], entry["shape"]) for entry in chosen["configurations"]} <= shapes
    assert len(chosen["configurations"]) > sum(entry["op"] in ("swiglu", "rope") for entry in entries)


def test_launches_on_a_cpu(on_a_cpu, capsys):
    assert printed(capsys, "launches")[0]["configurations"] == []
    assert cli.main(["launches"]) == 0 and "--archs sm90" in capsys.readouterr().out
    assert cli.main(["launches", "--archs", "sm42"]) == 2
    assert "unknown architecture 'sm42'" in capsys.readouterr().err
    assert cli.main(["launches", "rms_nrom"]) == 2
    assert "unknown op 'rms_nrom'; did you mean 'rms_norm'?" in capsys.readouterr().err


@needs_triton
def test_launches_show_the_heuristics_and_the_facts_they_read(on_a_cpu, capsys):
    assert cli.main(["launches", "softmax", "--archs", "gfx942"]) == 0
    text = capsys.readouterr().out
    assert "304 cores, 64 lanes a warp" in text and "without asynchronous copies" in text
    line = inspect.unwrap(tuning.choice.CONFIGS["softmax_forward"]).__code__.co_firstlineno
    assert f"softmax.py:{line}\n" in text


@needs_triton
def test_launches_of_architectures_elsewhere(on_a_cpu, capsys):
    nvidia_gpu, amd_gpu = printed(capsys, "launches", "cross_entropy_tvd", "--archs", "sm90", "gfx942")
    assert (nvidia_gpu["device"], amd_gpu["device"]) == ("nvidia:sm90", "amd:gfx942")
    case = model_cases(["cross_entropy_tvd"])[0]
    entries = [e for e in nvidia_gpu["configurations"] if e["key"].startswith("cross_entropy_tvd_forward")]
    rows = case.make(torch.device("meta"), torch.bfloat16)[0].shape[0]
    assert [rows, 1, 1] in [entry["grid"] for entry in entries]
    assert all(entry["options"]["fp_fusion"] is False for entry in entries)


@needs_triton
def test_launches_show_where_a_configuration_comes_from(on_a_cpu, capsys):
    device = nvidia.ARCHS["sm90"]
    config = tuning.choice.CONFIGS["rms_norm_forward"]
    entry = tuning.search.measured_entry(config, config.heuristic(8192, 2, device), 1e-3, 2e-3)
    tuning.search.record(tuning.entries.cache_file(device), {config.key(8192, 2): entry})
    with use_backend("nvidia:sm90"):
        found = printed(capsys, "launches")[0]["configurations"]
    sources = {entry["key"]: entry["source"] for entry in found}
    assert sources.get("rms_norm_forward(8192, 2)", "local") == "local"
    assert tuning.choice.CONFIGS["rms_norm_forward"](8192, 2, device).source == "local"


@needs_triton
def test_info_says_which_entries_of_tables_are_of_other_code_or_another_triton(on_a_cpu, capsys):
    device, config = nvidia.ARCHS["sm80"], tuning.choice.CONFIGS["rms_norm_forward"]
    entry = tuning.search.measured_entry(config, config.heuristic(8192, 2, device), 1e-3, 2e-3)
    changes = {"kernel": "0123456789abcdef"}, {"triton": "3.0.0"}, {"triton": "3.0.0"}, {}
    table = {config.key(cols, 2): entry | change for cols, change in enumerate(changes)}
    tuning.search.record(tuning.entries.cache_file(device), table)
    with use_backend("nvidia:sm80"):
        local = json.loads(info(capsys, "--json"))["devices"][0]["tables"]["local"]
        text = info(capsys)
    assert local["entries"] == 4 and local["other_code"] == ["rms_norm_forward(0, 2)"]
    assert local["other_triton"] == {"3.0.0": 2}
    assert "4 entries; 1 found on other code and ignored: rms_norm_forward(0, 2); 2 found with Triton 3.0.0" in text


@needs_triton
def test_the_command_and_the_variable(tmp_path):
    environment = os.environ | {"LIGER_HW_BACKEND": "amd:gfx1100", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", "liger_hw", "info", "--json"], env=environment, capture_output=True)
    found = json.loads(done.stdout)
    assert found["forced"] == "amd:gfx1100" and found["interpreter"] is True
    environment["LIGER_HW_BACKEND"] = "gfx1100"
    done = subprocess.run([sys.executable, "-m", "liger_hw", "info"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown backend 'gfx1100'" in done.stderr and "Traceback" not in done.stderr


def test_every_op_has_shapes():
    assert {case.op for case in model_cases()} == set(dispatch.OPS)


@pytest.mark.parametrize("case", model_cases(), ids=lambda case: f"{case.op} {case.label}")
def test_references_take_every_shape(case):
    inputs = case.make("meta", torch.bfloat16)
    step(dispatch.OPS[case.op].reference, inputs, case.options)
    assert all(x.grad is not None for x in inputs if x is not None and x.requires_grad)


# tune


def test_tune_needs_an_accelerator(on_a_cpu, capsys):
    pytest.importorskip("rich")
    assert cli.main(["tune"]) == 2
    assert "torch finds none here" in capsys.readouterr().err


@pytest.fixture
def h200(monkeypatch):
    """Meta tensors are on an H200, on which nothing takes time but by `cost`."""
    pytest.importorskip("rich")
    meta = torch.device("meta")
    monkeypatch.setattr(tune, "accelerators", lambda: [meta])
    monkeypatch.setitem(backends._devices, meta, nvidia.ARCHS["sm90"])

    def clock(cost):
        asked = []

        def bench(function):
            asked.clear()
            asked.extend(config(*shape, device) for config, shape, device in tuning.search.configurations_of(function))
            return sum(map(cost, asked))

        monkeypatch.setattr(tuning.search, "bench", bench)

    return clock


@needs_triton
def test_tune_writes_a_table(h200, tmp_path, capsys):
    h200(lambda config: 1e-3 / config.num_warps)
    table = tmp_path / "table.json"
    assert cli.main(["tune", "rms_norm", "--shapes", "8192x4096", "8192x8192", "--output", str(table)]) == 0
    found = tuning.entries.read_table(table)
    assert {"rms_norm_forward(4096, 2)", "rms_norm_forward(8192, 2)", "rms_norm_backward(4096, 2, 2)"} <= found.keys()
    assert all(entry["num_warps"] == 32 and entry["ms"] < entry["heuristic_ms"] for entry in found.values())
    shown = capsys.readouterr().out
    assert "rms_norm_forward(4096, 2)" in shown and "heuristic ms" in shown


@needs_triton
def test_an_interrupted_tune_keeps_its_winners(h200, tmp_path, capsys):
    measured = []

    def cost(config):
        measured.append(config)
        if len(measured) > 150:
            raise KeyboardInterrupt
        return 1e-3 / config.num_warps

    h200(cost)
    table = tmp_path / "table.json"
    assert cli.main(["tune", "rms_norm", "--output", str(table)]) == 130
    assert tuning.entries.read_table(table) and "heuristic ms" in capsys.readouterr().out


@needs_triton
def test_tune_is_for_this_machine(h200, capsys):
    with use_backend("amd"):
        assert cli.main(["tune"]) == 2
    assert "unset LIGER_HW_BACKEND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], f"unknown op 'nonsense'. Ops: {', '.join(CASES)}"),
        (["rms_norm", "--shapes", "nowhere"], "got nowhere"),
    ],
    ids=["op", "shape"],
)
def test_tune_refuses(arguments, message, capsys):
    pytest.importorskip("rich")
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


# demo


@pytest.fixture
def demo():
    for package in ("matplotlib", "rich", "tokenizers", "transformers"):
        pytest.importorskip(package)
    if interpreting():
        pytest.skip("the same on a CPU with and without the interpreter, so it runs without")
    from liger_lab.bench import demo

    return demo


def test_demo_end_to_end(demo, on_a_cpu, monkeypatch, tmp_path, capsys):
    compare, kept = demo.compare, []
    monkeypatch.setattr(demo, "compare", lambda *args: kept.append(compare(*args)) or kept[0])
    text = os.path.dirname(json.__file__)
    arguments = ["--steps", "5", "--batch", "2", "--seq", "256", "--text", text, "--report", str(tmp_path / "report")]
    assert cli.main(["demo", *arguments]) == 0

    (found,) = kept
    plain, patched = found.runs
    assert found.complete and len(plain.losses) == len(patched.losses) == 5
    assert plain.losses[-1] < plain.losses[0] - 0.5
    assert max(demo.difference(plain, patched)) < 1e-4
    assert patched.loss_bytes <= plain.loss_bytes / 3
    assert patched.step_bytes < plain.step_bytes
    assert "rms_norm" in patched.patched and "swiglu" in patched.patched

    shown = capsys.readouterr().out
    assert "tokens/s" not in shown and "Tokens per second" not in shown, "no kernel ran"
    words = "mean loss of last 5 steps", "their standard deviation", "peak memory of a step"
    words += "peak memory of the loss alone", "backend: cpu", "CPU", "No kernel ran"
    assert all(word in shown for word in words)
    assert demo.final_loss(plain)[0] == pytest.approx(sum(plain.losses) / 5)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "No kernel ran" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and "<script" not in page and "url(" not in page
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    files = [(tmp_path / "report" / name).read_bytes() for name in ("loss.png", "bars.png")]
    assert pictures == files[::-1] and all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_demo_interrupted(demo, on_a_cpu, monkeypatch, tmp_path, capsys):
    """It ends with what every run has; before that, without a report."""
    step, steps = demo.DemoRun.step, []

    def interrupted(limit):
        def counted(run, batch):
            steps.append(run.name)
            if len(steps) == limit:
                raise KeyboardInterrupt
            return step(run, batch)

        return counted

    arguments = ["--steps", "9", "--batch", "1", "--seq", "32", "--text", os.path.dirname(json.__file__)]
    arguments += ["--report", str(tmp_path / "report")]
    monkeypatch.setattr(demo.DemoRun, "step", interrupted(12))
    assert cli.main(["demo", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"] and [run["name"] for run in found["runs"]] == ["plain", "liger_hw"]
    assert (tmp_path / "report" / "report.html").exists()
    steps.clear()
    monkeypatch.setattr(demo.DemoRun, "step", interrupted(2))
    assert cli.main(["demo", *arguments[:-1], str(tmp_path / "other")]) == 130
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "/nowhere"], "/nowhere, which does not exist"),
        (["--text", __file__, "--seq", "1000000"], "--text: got"),
        (["--against", "liger"], "liger"),
    ],
    ids=["text", "seq", "against"],
)
def test_demo_refuses(demo, on_a_cpu, capsys, arguments, message):
    assert cli.main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_numbers_are_positive(number, capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--steps", number])
    assert "a positive integer" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(console, "find_spec", lambda name: None if name == "tokenizers" else object())
    assert cli.main(["demo"]) == 2
    assert "tokenizers" in (error := capsys.readouterr().err) and "pip install tokenizers" in error


def test_peak_memory_is_the_allocators():
    from liger_lab.bench.memory import peak

    def function():
        x = torch.ones(2**20)  # 4 MiB
        y = torch.exp(x)
        del x
        y = y @ y

    assert peak(function, torch.device("cpu")) == 2 * 2**22
    kept = torch.ones(2**20)
    assert peak(lambda: kept.add_(1), torch.device("cpu")) < 2**16


def test_python_m_liger_hw_is_the_command():
    done = subprocess.run([sys.executable, "-m", "liger_hw", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("liger_hw ")


def test_info_imports_no_compiler():
    """On a CPU. Where kernels launch, it runs ops on meta tensors, for which torch itself imports its compiler."""
    code = "import sys\nfrom liger_hw import cli\nassert not cli.main(['info']) and 'torch._dynamo' not in sys.modules"
    environment = os.environ | {"LIGER_HW_BACKEND": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_enough_ends_it_quietly():
    """`liger-hw info | head -1`."""
    command = [sys.executable, "-m", "liger_hw", "info", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "BrokenPipe" not in process.stderr.read() and process.wait() == 0


EVIDENCE = Path(__file__).parent.parent / "lab/results" / "evidence" / "interpreted.json"


def test_the_reader_of_a_help_may_have_enough_too():
    command = [sys.executable, "-m", "liger_hw", "bench", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0


# every command

COMMANDS = ["info", "patch-report", *cli.LAB_COMMANDS]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_describes_shows_examples_and_tells_the_time(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    before, _, after = text.partition("examples:\n")
    described = re.search(r"\n\n([A-Z].*?\.)\n\n", before, re.DOTALL)
    examples, _, time = after.partition("\n\n")
    assert end.value.code == 0 and described and time.startswith("time: ") and "--json" in before
    assert max(map(len, text.splitlines())) <= 100
    commands = [line for line in examples.replace(" \\\n", "").splitlines() if line[:4] != "  # "]
    assert len(commands) >= 2
    for line in commands:
        program, *words = re.split(r"   +", line.strip())[0].split()
        assert program == "liger-hw" and f"liger-hw {command}" in line
        assert cli._parse(words).command == command


def test_the_list_of_commands_is_whole(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^    (\S+(?: \S+)?)(?:   |$)", text, re.MULTILINE) == COMMANDS


def test_without_the_laboratory_its_commands_tell_the_extra(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_lab", None)  # importing it raises a ModuleNotFoundError
    for command in cli.LAB_COMMANDS:
        assert cli.main(command.split()) == 2
        assert f"{command}: is a command of the laboratory: pip install -e lab" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^    (\S+(?: \S+)?)(?:   |$)", text, re.MULTILINE) == ["info", "patch-report"]
    assert "'liger_hw[lab]' of a release) adds: demo, doctor" in text
    assert json.loads(info(capsys, "--json"))["devices"][0]["ops"]
    assert cli.main(["doctr"]) == 2 and "did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bnch"], "unknown command 'bnch'; did you mean 'bench'?"),
        (["bench", "--shpaes", "4096"], "unknown option '--shpaes'; did you mean '--shapes'?"),
        (["bench", "--modes", "ful"], "unknown mode 'ful'; did you mean 'full'?"),
        (["bench", "trian"], "unknown op 'trian'; did you mean the command `liger-hw bench train`?"),
        (["bench", "rms_nrom"], "unknown op 'rms_nrom'; did you mean 'rms_norm'?"),
        (["bench", "train", "lama-1b"], "unknown model 'lama-1b'; did you mean 'llama-1b'?"),
        (["doctor", "swigul"], "unknown op 'swigul'; did you mean 'swiglu'?"),
        (["doctor", "qwen33"], "unknown op or model 'qwen33'; did you mean the model 'qwen3'?"),
        (["patch-report", "lamma"], "unknown model 'lamma'; did you mean 'llama'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_suggests_the_nearest(arguments, message, on_a_cpu, capsys):
    for package in ("matplotlib", "rich", "transformers"):
        pytest.importorskip(package)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_former_command_names_its_five_programs(capsys):
    assert cli.main(["matrix", "--compile"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("evidence", "compile", "neighbours", "emulate", "architectures"))


def test_words_that_a_command_does_not_take(capsys):
    with pytest.raises(SystemExit):
        cli.main(["info", "rms_norm"])
    assert "got rms_norm, which it does not take" in capsys.readouterr().err


def printed(capsys, *arguments):
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_tables(on_a_cpu, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    report, file = ["--report", str(tmp_path)], tmp_path / "bench.json"
    shown = printed(
        capsys, "bench", "rms_norm", "--shapes", "16x2048", "--modes", "host", "--against", "eager", *report
    )
    assert shown == json.loads(file.read_text()) and shown["results"]
    changes = printed(capsys, "bench", "--compare", str(file), str(file))
    assert changes["compared"] == len(shown["results"]) and changes["only"] == [0, 0] and changes["changes"] == []
    found = printed(capsys, "evidence", *report, str(EVIDENCE))
    assert found["runs"] and found["cells"] and found["problems"] == []


@needs_triton
def test_json_of_the_check_of_tables(capsys):
    tables = printed(capsys, "tune", "--check")
    assert tables and not any(tables.values())


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0)
    with terminal.progress() as progress:
        task = progress.add_task("shapes", total=3, note="")
        progress.update(task, note="rms_norm")
        progress.advance(task)
    assert capsys.readouterr().err == "shapes: 0/3  rms_norm\nshapes: 1/3  rms_norm\n"
