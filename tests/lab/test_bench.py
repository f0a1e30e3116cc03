import dataclasses
import json
import pickle
import re
import subprocess
import sys

import pytest
import torch

import liger_hw
from liger_hw import cli, console, dispatch
from liger_hw._triton import interpreting
from liger_hw.checkpointing.budget import BudgetTooSmall
from liger_hw.kernels import load_all
from liger_lab import terminal
from liger_lab.bench import charts, formatting, measure, op_sweeps, operations, peers, snapshots, training
from liger_lab.bench.run_file import environment
from liger_lab.cases import CASES, DIFFERENTIABLE, model_cases

for package in ("matplotlib", "rich"):
    pytest.importorskip(package)
if interpreting():
    pytest.skip("the same on a CPU with and without the interpreter, so it runs without", allow_module_level=True)

load_all()
OPS = sorted(dispatch.OPS)
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    monkeypatch.setattr(measure, "FEWEST", 3)
    monkeypatch.setattr(measure, "HOST_ROUNDS", 3)
    monkeypatch.setattr(operations, "SECONDS", 0.01)


def bench(tmp_path, *arguments):
    status = cli.main(["bench", *arguments, "--report", str(tmp_path)])
    return status, json.loads((tmp_path / "bench.json").read_text())


# what an op must move and do


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("case", model_cases(further=True), ids=lambda case: f"{case.op} {case.label}")
def test_every_op_has_a_cost(case):
    cost = operations.cost(case)
    inputs = case.make("meta", torch.bfloat16)
    assert all(type(number) is int and number >= 0 for number in cost)
    passes = (cost[0::2], cost[1::2]) if case.op in DIFFERENTIABLE else (cost[0::2],)
    assert all(all(numbers) for numbers in passes)
    tensors = [x for x in inputs if x is not None]
    values = [x for x in tensors if x.is_floating_point() or x.dtype in (torch.int8, torch.uint8)]
    # of a table only the rows that the indices name
    inputs_read = sum(x.nbytes for x in values if case.op != "embedding")
    gradients = sum(x.nbytes for x in tensors if x.requires_grad)
    assert cost.forward_bytes >= inputs_read
    assert cost.backward_bytes >= gradients
    assert cost.forward_bytes + cost.backward_bytes >= inputs_read + gradients


R, C = 6, 64
COSTS = {  # inputs, options -> elements of 2 bytes that a direction moves, as the docstrings have it
    "rms_norm": ((meta(R, C), meta(C)), {}, 2 * R * C + C, 3 * R * C + 2 * C),
    "fused_add_rms_norm": ((meta(R, C), meta(R, C), meta(C)), {}, 4 * R * C + C, 4 * R * C + 2 * C),
    "gated_rms_norm": ((meta(R, C), meta(R, C), meta(C)), {}, 3 * R * C + C, 5 * R * C + 2 * C),
    "modulated_rms_norm": ((meta(R, C), meta(C), meta(2, C), meta(2, C)), {}, 2 * R * C + 5 * C, 3 * R * C + 8 * C),
    "layer_norm": ((meta(R, C), meta(C), meta(C)), {}, 2 * R * C + 2 * C, 3 * R * C + 4 * C),
    "l2_norm": ((meta(R, C),), {}, 2 * R * C, 3 * R * C),
    "group_norm": ((meta(2, R, C), meta(R), meta(R)), {"num_groups": 2}, 4 * R * C + 2 * R, 6 * R * C + 4 * R),
    "poly_norm": ((meta(R, C), meta(3), meta(1)), {}, 2 * R * C + 4, 3 * R * C + 8),
    "dyt": ((meta(R, C), meta(1), meta(C), meta(C)), {}, 2 * R * C + 2 * C + 1, 3 * R * C + 4 * C + 2),
    "causal_conv1d": ((meta(2, R, C), meta(C, 3), meta(C), meta(2, R, C)), {}, 6 * R * C + 4 * C, 10 * R * C + 8 * C),
    "attention_residual": ((meta(3, R, C), meta(C), meta(C)), {}, 4 * R * C + 2 * C, 7 * R * C + 4 * C),
    "neighborhood_attention": ((meta(2, 3, R, C), meta(2, 3, R, C), meta(2, 3, R, C)), {}, 24 * R * C, 48 * R * C),
    "embedding": ((meta(9, C), meta(R, dtype=torch.int64)), {}, 2 * R * C + 4 * R, (R + 9) * C + 4 * R),
    "multi_token_attention": (  # 21 of 36 scores count
        (meta(2, 4, R, R), meta(4, 2, 3, 3), meta(4)),
        {"padding": 1, "groups": 2},
        8 * (21 + R * R) + 72 + 4,
        8 * (42 + R * R) + 2 * 72 + 4,
    ),
    "int2_matmul": ((meta(R, 9, dtype=torch.int8), meta(3, 8, dtype=torch.uint8)), {}, (9 * R + 24 + 32 * R) // 2, 0),
    "dequantize_4bit": (  # 192 bytes, 6 scales in 8 bits, 1 of them, tables of 16 and 256, an offset
        (
            meta(3 * C, 1, dtype=torch.uint8),
            meta(R, dtype=torch.uint8),
            meta(16, dtype=torch.float32),
            meta(1, dtype=torch.float32),
            meta(256, dtype=torch.float32),
            meta(dtype=torch.float32),
        ),
        {"shape": (R, C)},
        (3 * C + R) // 2 + 2 * (16 + 1 + 256 + 1) + R * C,
        0,
    ),
    "swiglu": ((meta(R, C), meta(R, C)), {}, 3 * R * C, 5 * R * C),
    "geglu": ((meta(R, C), meta(R, C)), {}, 3 * R * C, 5 * R * C),
    "activate": ((meta(R, C),), {}, 2 * R * C, 3 * R * C),
    "softmax": ((meta(R, C),), {}, 2 * R * C, 3 * R * C),
    "sparsemax": ((meta(R, C),), {}, 2 * R * C, 3 * R * C),
    "cross_entropy_tvd": ((meta(R, C), meta(R, C), meta(R)), {}, 2 * R * C, 3 * R * C),
    "mhc_coefficients": (
        (meta(R, 4, C), meta(4 * C, 24), meta(24), meta(), meta(1), meta()),
        {},
        4 * R * C + 96 * C + 27 + 48 * R,
        8 * R * C + 192 * C + 54 + 48 * R,
    ),
    "mhc_pre": ((meta(R, 4, C), meta(R, 4)), {}, 5 * R * C + 4 * R, 9 * R * C + 8 * R),
    "mhc_post_res": (
        (meta(R, 4, C), meta(R, C), meta(R, 4), meta(R, 4, 4)),
        {},
        9 * R * C + 20 * R,
        14 * R * C + 40 * R,
    ),
    "clamped_swiglu": ((meta(R, 2 * C),), {}, 3 * R * C, 5 * R * C),
    "rope": ((meta(2, 4, 3, 8), meta(2, 1, 3, 8), meta(1, 3, 8), meta(1, 3, 8)), {}, 2 * 240 + 48, 2 * 240 + 48),
    "qk_norm_rope": (
        (meta(2, 4, 3, 8), meta(2, 1, 3, 8), meta(8), meta(8), meta(1, 3, 8), meta(1, 3, 8)),
        {},
        2 * 240 + 16 + 48,
        3 * 240 + 32 + 48,
    ),
    "cross_entropy": ((meta(R, C), meta(R)), {}, R * C, 2 * R * C),
    "fused_linear_cross_entropy": ((meta(R, 8), meta(C, 8), meta(R)), {}, (R + C) * 8, 2 * (R + C) * 8),
}


@pytest.mark.parametrize("op", COSTS)
def test_costs(op):
    inputs, options, forward, backward = COSTS[op]
    assert dispatch.OPS[op].cost_of(*inputs, **options)[:2] == (2 * forward, 2 * backward)


def test_costs_of_options_and_products():
    assert sum(dispatch.OPS["cross_entropy"].cost_of(meta(R, C), meta(R), in_place=True)[:2]) == 2 * 2 * R * C
    cost = dispatch.OPS["fused_linear_cross_entropy"].cost_of(meta(R, 8), meta(C, 8), meta(R), chunk_memory=99)
    assert (cost.forward_flops, cost.backward_flops) == (2 * R * 8 * C, 4 * R * 8 * C)


# a run


def test_end_to_end(tmp_path, capsys):
    status, found = bench(tmp_path, "rms_norm", "fused_linear_cross_entropy", "--against", "torch,eager")
    assert status == 0 and found["complete"] and not found["skipped"]
    assert found["device"]["vendor"] == "cpu" and "wall" in found["device"]["clock"]
    assert found["versions"]["torch"] == torch.__version__ and found["date"] and found["command"]
    assert all(rate > 0 for rate in found["ceilings"].values())
    assert {op: result["error"] for op, result in found["parity"].items()} == {
        "rms_norm": None, "fused_linear_cross_entropy": None,
    }  # fmt: skip
    shapes_ = formatting.by_shape(found)
    modes = {mode for _, _, mode in shapes_}
    assert modes == {"fwd", "bwd", "full", "host fwd", "host full"}
    for (op, _, mode), records in shapes_.items():
        floor = op == "fused_linear_cross_entropy" and mode in ("fwd", "full")
        assert set(records) == {"liger_hw", "torch", "eager"} | ({"floor"} if floor else set())
        for record in records.values():
            assert 0 < record["p20"] <= record["median"] <= record["p80"] or record.get("derived")
            assert mode not in ("fwd", "full") or (record["peak_bytes"] >= 0 and record["share"] > 0)
    handed_out = shapes_["fused_linear_cross_entropy", "16x256x1024", "bwd"]["liger_hw"]
    assert handed_out["derived"] and not shapes_["rms_norm", "16x2048", "bwd"]["liger_hw"]["derived"]

    shown = capsys.readouterr().out
    assert all(word in shown for word in ("rms_norm", "16x2048", "fastest peer", "over floor", "TFLOP/s", "bench.html"))
    text = (tmp_path / "bench.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", text) and "<script" not in text and "url(" not in text
    pictures = set(re.findall(r'alt="([^"]+)"', text))
    assert {"roofline", "rms_norm full", "rms_norm memory", "rms_norm bwd", "host"} <= pictures
    assert "16x256x1024" in text and found["versions"]["torch"] in text


def test_a_sweep_of_an_op(tmp_path):
    arguments = "cross_entropy", "--sweep", "vocab", "--sizes", "64", "32", "--modes", "fwd,full"
    status, found = bench(tmp_path, *arguments, "--against", "eager")
    assert status == 0 and found["complete"] and not found["skipped"]
    assert found["sweep"] == {
        "grows": "vocab",
        "sizes": {f"cross_entropy 8192x{size} in place": size for size in (32, 64)},
    }
    assert (tmp_path / "cross_entropy-by-vocab.png").read_bytes().startswith(b"\x89PNG")
    ((name, figure),) = charts.figures(found)
    assert name == "cross_entropy by vocab"
    assert [[line.get_label() for line in axis.lines] for axis in figure.axes] == 3 * [["liger_hw", "eager"]]
    assert all(list(line.get_xdata()) == [32, 64] for axis in figure.axes for line in axis.lines)


@pytest.mark.parametrize("grows", op_sweeps.SIZES)
def test_sweeps_have_shapes(grows):
    found = op_sweeps.cases([], grows)
    assert tuple(found) == op_sweeps.SIZES[grows]
    for cases in found.values():
        assert len({(case.op, case.label) for case in cases}) == len(cases) > 2
        assert all(operations.cost(case) for case in cases)


def test_a_wrong_op_has_no_time(monkeypatch, tmp_path, capsys):
    op = dispatch.OPS["swiglu"]
    monkeypatch.setitem(op.implementations, "reference", lambda gate, up, in_place=False: gate * up)
    op.register("cpu")(lambda gate, up, in_place=False: gate * up)  # forgets what was chosen before
    try:
        status, found = bench(tmp_path, "swiglu", "rms_norm", "--modes", "fwd", "--against", "torch")
    finally:
        del op.implementations["cpu"]
        op.register("reference")(op.reference)
    assert status == 1
    assert "worst error" in found["parity"]["swiglu"]["error"] and found["parity"]["rms_norm"]["error"] is None
    assert {record["op"] for record in found["results"]} == {"rms_norm"}
    shown = capsys.readouterr().out
    assert "RED: swiglu is not measured" in shown
    assert "RED: swiglu" in (tmp_path / "bench.html").read_text()


def test_an_op_without_parity_cases_has_no_time(monkeypatch):
    monkeypatch.setattr(operations, "CASES", {})
    assert "no parity cases" in operations.check_parity("rope", torch.float32, torch.device("cpu"))["error"]


def test_a_failed_peer_is_reported(monkeypatch, tmp_path, capsys):
    def fails(case):
        raise ImportError("broken installation")

    monkeypatch.setitem(peers.PEERS, "torch", peers.Peer(fails, on_cpu=True))
    status, found = bench(tmp_path, "rms_norm", "--modes", "fwd", "--against", "torch,eager")
    assert status == 0 and {record["provider"] for record in found["results"]} == {"liger_hw", "eager"}
    assert found["skipped"][0]["provider"] == "torch" and "broken installation" in capsys.readouterr().out


def test_interrupted(monkeypatch, tmp_path, capsys):
    seen, real = [], operations._measure

    def interrupted(case, *rest):
        seen.append(case.op)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(case, *rest)

    monkeypatch.setattr(operations, "_measure", interrupted)
    status, found = bench(tmp_path, "rms_norm", "layer_norm", "--modes", "fwd", "--against", "eager")
    assert status == 130 and not found["complete"]
    assert {record["op"] for record in found["results"]} == {"rms_norm"}
    assert "interrupted" in capsys.readouterr().out and (tmp_path / "bench.html").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], f"unknown op 'nonsense'. Ops: {', '.join(CASES)}"),
        (["--shapes", "nowhere"], "got nowhere"),
        (["--modes", "sideways"], "unknown mode 'sideways'. Modes, with commas between: fwd, bwd, full, host"),
        (["--against", "nobody"], "unknown peer 'nobody'. Peers: liger"),
        (["--against", "liger"], "accelerators alone"),
        (["--compare", "/nowhere/a.json", "/nowhere/b.json"], "--compare: got /nowhere/a.json"),
        (
            ["rms_norm", "--sweep", "vocab"],
            "--sweep: got vocab of rms_norm, allowed: vocab of embedding, cross_entropy",
        ),
        (["--sizes", "64"], "--sweep: allowed with --sizes"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refuses(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shapes_are_named_exactly_or_in_part():
    def labels(*texts):
        return [case.label for case in operations.select(["rms_norm"], texts, ["fwd"], torch.device("cpu"))]

    assert labels("8192x4096") == ["8192x4096"]
    assert set(labels("x4096")) == {"8192x4096", "16384x4096"}
    both = operations.select(["cross_entropy"], ["8192x32000"], ["fwd"], torch.device("cpu"))
    assert [case.label for case in both] == ["8192x32000", "8192x32000 in place"]


def test_absent_peers(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.choose([], gpu) == ["liger_hw", "compile", "torch", "eager", "floor"]
    with pytest.raises(ValueError, match="pip install quack-kernels"):
        peers.choose(["quack"], gpu)
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    assert set(peers.choose([], gpu)) == set(peers.PEERS)


def test_unsloth_in_training(monkeypatch):
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="got unsloth, which needs an accelerator and pip install unsloth"):
        training.choose(["unsloth"], device)
    monkeypatch.setattr(training, "find_spec", lambda name: name)
    assert training.choose(["unsloth", "liger_hw"], torch.device("meta")) == ["unsloth", "liger_hw"]
    assert {*training.PEERS} <= {*charts.COLOURS}


def test_unsloth_builds_for_the_longest_sequence(monkeypatch):
    """Its model refuses longer ones than it was built for, and a process measures several lengths."""
    built = []

    def build(config, rank, planned, *_):
        built.append(planned["seq"])
        return torch.nn.Linear(1, 1)

    monkeypatch.setitem(sys.modules, "liger_lab.bench.unsloth", type(sys)("unsloth"))
    sys.modules["liger_lab.bench.unsloth"].build = build
    planned, _ = training.plan(["tiny"], ["unsloth"], [1], [16, 32], [False], 1, torch.float32, lora=4)
    training.build(planned, 32, torch.device("cpu"))
    assert built == [32]


def test_no_peer_is_imported():
    code = "import sys, liger_lab.bench.peers; print({'liger_kernel', 'quack', 'cut_cross_entropy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("op", [op for op in COSTS if op != "rope"])
def test_peers_of_torch_agree(op):
    """What stands beside ours computes the same."""
    case = min((case for case in model_cases([op], further=True)), key=operations._bytes)
    inputs = case.make("cpu", torch.float32)
    expected = dispatch.OPS[op].reference(*inputs, **case.options)
    for name in ("torch", "eager"):
        function = peers.PEERS[name].make(case)
        if function is not None:
            torch.testing.assert_close(function(*inputs), expected)


# what became of a time


def made(median, **more):
    record = {"op": "rms_norm", "shape": "8x8", "mode": "fwd", "provider": "liger_hw", "median": median}
    return record | {"p20": median * 0.99, "p80": median * 1.01, "rounds": 9, "peak_bytes": 2**20} | more


def results(*records):
    return {"device": {"name": "a GPU"}, "date": "today", "commit": None, "results": list(records)}


def test_compare(tmp_path, capsys):
    before = results(made(1.0), made(1.0, shape="9x9"), made(1.0, shape="7x7"), made(1.0, shape="6x6", p80=1.2))
    after = results(made(0.8), made(1.2, shape="9x9"), made(1.02, shape="7x7"), made(1.1, shape="6x6"))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, found in zip(files, (before, after)):
        file.write_text(json.dumps(found))
    assert cli.main(["bench", "--compare", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "-20.0%" in shown and "+20.0%" in shown and "2 of 4 times" in shown
    assert "7x7" not in shown and "6x6" not in shown


def test_shares_are_of_kernels_alone_where_a_call_was_captured():
    captured, called = made(2.0, gpu=1.0, share=0.4), made(2.0, share=0.4)
    assert (formatting.kernels(captured), formatting.kernels_share(captured)) == (1.0, 0.8)
    assert (formatting.kernels(called), formatting.kernels_share(called)) == (2.0, 0.4)


def test_spread_and_order():
    assert measure.spread([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == {"median": 3.5, "p20": 2.0, "p80": 5.0, "rounds": 6}
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    taken = measure.Clock(torch.device("cpu")).interleave(functions, 0.0)
    assert set(taken) == set("abc") and taken["a"]["rounds"] == measure.FEWEST
    assert "".join(calls[-9:]) == "abcbcacab"


@pytest.fixture
def trained(monkeypatch, tmp_path):
    pytest.importorskip("transformers")

    def bench_train(*arguments):
        status = cli.main(["bench", "train", *arguments, "--report", str(tmp_path)])
        return status, json.loads((tmp_path / "train.json").read_text())

    return bench_train


def test_training(trained, tmp_path, capsys):
    status, found = trained("tiny", "--batch", "1", "--seq", "32", "--steps", "2")
    assert status == 0 and found["complete"] and found["versions"]["torch"]
    eager, ours = found["results"]
    assert (eager["provider"], ours["provider"]) == ("eager", "liger_hw")
    assert all(run["tokens_per_second"] > 0 and run["peak_bytes"] > 0 and run["rounds"] == 2 for run in (eager, ours))
    assert abs(eager["loss"] - ours["loss"]) < 1e-5
    shown = capsys.readouterr().out
    assert "tiny 1x32" in shown and "x the memory" in shown
    text = (tmp_path / "train.html").read_text()
    assert 'alt="tokens per second"' in text and 'alt="training memory"' in text


class Answers(list):
    send = list.append


def answers_of(runs, failing=()):
    """Train the groups of `runs` in this process; return their answers, and assert that none failed but `failing`."""
    answers = Answers()
    for group in training.groups(runs):
        training.main(group, answers)
    errors = [run["provider"] for run, answer in zip(runs, answers) if "error" in answer]
    assert errors == list(failing), answers
    return answers


@pytest.fixture
def smaller(monkeypatch):
    """Make the model "tiny" smaller, for tests of what happens around it."""
    model = dataclasses.replace(training.SETTINGS["tiny"].model, config=training.demo.llama(32, 48, 1, 4, 2, 64))
    monkeypatch.setitem(training.SETTINGS, "tiny", training.Setting(model, (8,)))


@pytest.mark.parametrize("name", training.DEFAULT)
def test_every_setting_trains(name, monkeypatch):
    """At a small size, with the parts that its family has."""
    pytest.importorskip("transformers")
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": 128, "moe_intermediate_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "depth": 1, "num_heads": 4, "out_hidden_size": 32, "pad_token_id": 0,
        "mrope_section": [1, 1, 2],
    }  # fmt: skip

    def shrunk(config):
        return {
            key: shrunk(value) if isinstance(value, dict) else small.get(key, value) for key, value in config.items()
        }

    setting = training.SETTINGS[name]
    config = shrunk(setting.model.config) | {"pad_token_id": 0}
    if setting.images:
        special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        config |= {token: 120 + i for i, token in enumerate(special)}
    shape = dataclasses.replace(setting.model, config=config)
    monkeypatch.setitem(training.SETTINGS, name, dataclasses.replace(setting, model=shape))
    seqs = [264 if setting.images else 16]
    eager, ours = answers_of(training.plan([name], ["eager", "liger_hw"], [1], seqs, None, 1, torch.float32))
    assert abs(eager["loss"] - ours["loss"]) < 1e-5 and eager["peak_bytes"] > 0


def test_a_run_that_fails_leaves_the_others(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "import_module", lambda name: 1 / 0)
    answers = answers_of(training.plan(["tiny"], ["liger", "liger_hw"], [1], [8], None, 1, torch.float32), ["liger"])
    assert answers[0] == {"error": "ZeroDivisionError: division by zero"} and answers[1]["tokens_per_second"] > 0


def test_activations_of_ours_alone():
    pytest.importorskip("transformers")
    runs = training.plan(["tiny"], ["eager", "liger_hw"], [1], [8], None, 1, torch.float32, activations="0.001GiB")
    answers = answers_of(runs)
    assert abs(answers[0]["loss"] - answers[1]["loss"]) < 1e-5
    assert formatting.setting(runs[1]) == "tiny 1x8, activations within 0.001GiB"


LAYERS = ["LlamaDecoderLayer"] * 4


@pytest.mark.parametrize("what, modules", [("model", ["LlamaForCausalLM"]), ("layers", LAYERS), ("graphs", LAYERS)])
def test_every_provider_is_compiled(what, modules, monkeypatch):
    pytest.importorskip("transformers")
    compiled, of_torch = [], torch.nn.Module.compile

    def compile_with_its_name(module, mode):
        assert mode == ("reduce-overhead" if what == "graphs" else None)
        compiled.append(type(module).__name__)
        of_torch(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with_its_name)
    runs = training.plan(["tiny"], ["eager", "liger_hw"], [1], [8], None, 1, torch.float32, compiled=what)
    answers = answers_of(runs)
    assert abs(answers[0]["loss"] - answers[1]["loss"]) < 1e-5
    plain, ours = compiled[: len(modules)], compiled[len(modules) :]
    assert plain == modules and [name.removeprefix("Liger") for name in ours] == modules
    assert formatting.setting(runs[1]) == f"tiny 1x8, compiled {what}"


def test_a_sweep_doubles_until_memory_ends(monkeypatch, tmp_path):
    """What ran out of memory is not tried at larger sizes."""
    pytest.importorskip("transformers")
    limits = {"eager": 4, peers.LOSS_ALONE: 8, "liger_hw": 8}
    tried = []

    def answers(group):
        for planned in group:
            tried.append((planned["provider"], planned["batch"]))
            fits = planned["batch"] <= limits[planned["provider"]]
            numbers = {
                "tokens_per_second": 1.0,
                "peak_bytes": 2**30,
                "median": 1.0,
                "p20": 1.0,
                "p80": 1.0,
                "rounds": 1,
            }
            yield numbers | {"loss": 0.0} if fits else {"error": "out of memory"}

    monkeypatch.setattr(training, "_in_a_process", answers)
    runs = training.plan(["tiny"], [*limits], [2], [64], None, 1, torch.float32, sweep="batch", limit="24GiB")
    assert {run["seq"] for run in runs} == {64} and [run["batch"] for run in runs][:3] == [2, 4, 8]
    with terminal.progress() as progress:
        found = training.run(runs, torch.device("cpu"), progress, tmp_path / "train.json")
    assert found["complete"]
    assert tried == [(name, size) for name in limits for size in (2, 4, 8, 16) if size <= 2 * limits[name]]
    (name, figure), *others = charts.training_figures(found)
    assert name == "tiny by batch limited to 24GiB" and not others
    assert "limited to 24GiB" in figure.get_suptitle()
    assert [len(axis.lines) for axis in figure.axes] == [3, 3]
    assert charts.picture(figure, "png").startswith(b"\x89PNG")
    seqs = training.plan(["tiny"], ["liger_hw"], [3], None, None, 1, torch.float32, sweep="seq")
    assert [(run["batch"], run["seq"]) for run in seqs[:2]] == [(3, 1024), (3, 2048)]
    seqs = training.plan(["tiny"], ["liger_hw"], [4], [24576, 512], None, 1, torch.float32, sweep="seq")
    assert [(run["batch"], run["seq"]) for run in seqs] == [(4, 512), (4, 24576)]


def test_the_loss_alone(smaller, monkeypatch):
    pytest.importorskip("transformers")
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    providers = ["eager", "compile", peers.LOSS_ALONE, peers.LOSS_COMPILED, "liger_hw"]
    answers = answers_of(training.plan(["tiny"], providers, [1], [8], None, 1, torch.float32))
    losses = [run["loss"] for run in answers]
    assert max(losses) - min(losses) < 1e-5
    assert compiled == 2 * ["LlamaForCausalLM"] and providers[3] in charts.COLOURS


def test_adapters_and_loss_scale(smaller):
    """LoRA trains its adapters alone, which are fp32; sizes share a model, and fp16 has a loss scale."""
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    runs = training.plan(["tiny"], ["eager", "liger_hw"], [1], [4, 8], [True], 1, torch.float16, lora=4)
    answers = answers_of(runs)
    for eager, ours in zip(answers[:2], answers[2:]):
        assert abs(eager["loss"] - ours["loss"]) < 1e-3 and 0 < eager["loss_scale"] == ours["loss_scale"]
    assert formatting.setting(runs[1]) == "tiny 1x8, checkpointing, LoRA of rank 4, fp16 with a loss scale"
    trained = training.build(runs[0], 8, torch.device("cpu"))
    assert {p.dtype for p in trained.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in trained.model.parameters() if not p.requires_grad} == {torch.float16}
    full = training.plan(["tiny"], ["eager"], [1], [4], None, 1, torch.float16)
    assert {p.dtype for p in training.build(full[0], 8, torch.device("cpu")).model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kbit", [False, True])
def test_quantised_weights(smaller, kbit):
    for package in ("transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    runs = training.plan(["tiny"], ["eager", "liger_hw"], [1], [8], None, 1, torch.bfloat16, qlora=4, kbit=kbit)
    eager, ours = answers_of(runs)
    assert abs(eager["loss"] - ours["loss"]) < 1e-2
    model = training.build(runs[0], 8, torch.device("cpu")).model
    quantised = sys.modules["bitsandbytes"].nn.Linear4bit
    assert sum(isinstance(module, quantised) for module in model.modules()) == 7
    assert model.get_input_embeddings().weight.dtype == (torch.float32 if kbit else torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", training.OPTIMIZERS)
def test_every_optimizer(smaller, name):
    package = {"adamw": "torch", "galore": "galore_torch"}.get(name, "bitsandbytes")
    for needed in ("transformers", package):
        pytest.importorskip(needed)
    runs = training.plan(["tiny"], ["liger_hw"], [1], [8], None, 1, torch.float32, optimizer=name)
    trained = training.build(runs[0], 8, torch.device("cpu"))
    assert type(trained.optimizer).__module__.startswith(package)
    answers_of(runs)
    assert formatting.setting(runs[0]) == f"tiny 1x8, {name}"


def test_accumulation(smaller):
    """The gradients of a step are the mean of its batches, all of whose tokens count."""
    pytest.importorskip("transformers")
    found = []
    for batches in (1, 3):
        (planned,) = training.plan(["tiny"], ["eager"], [1], [8], None, 1, torch.float32, accumulation=batches)
        trained = training.build(planned, 8, torch.device("cpu"))
        batch = training._batch(trained, 1, 8, torch.device("cpu"))
        result = training._timed(trained, batch, 1, 0)
        assert result["tokens_per_second"] * result["median"] == pytest.approx(8e3 * batches)
        trained.step(batch)
        found.append([parameter.grad.clone() for parameter in trained.model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert formatting.setting(planned) == "tiny 1x8, 3 batches a step"


@pytest.mark.skipif(ACCELERATOR is not None, reason="an accelerator's offload is measured, not tested")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_to_the_cpu(smaller, dtype):
    for package in ("transformers", "deepspeed"):
        pytest.importorskip(package)
    runs = training.plan(["tiny"], ["eager", "liger_hw"], [1], [8], None, 1, dtype, offload="cpu")
    eager, ours = answers_of(runs)
    assert abs(eager["loss"] - ours["loss"]) < 1e-2


def test_the_memory_of_a_step(monkeypatch, tmp_path):
    """A curve keeps the highest and lowest points of a long step."""
    events = [{"action": "alloc", "size": 10, "time_us": 10 * i} for i in range(5000)]
    events += [
        {"action": "alloc", "size": 10**6, "time_us": 50_000},
        {"action": "segment_alloc", "size": 1, "time_us": 1},
    ]
    events += [{"action": "free_requested", "size": 10**6, "time_us": 50_010}]
    events += [{"action": "free_completed", "size": 10**6, "time_us": 50_011}]
    curve = snapshots.curve(events, 7)
    assert len(curve) <= snapshots.POINTS and curve == sorted(curve)
    assert curve[0] == (0.0, 17) and max(held for _, held in curve) == 7 + 50_000 + 10**6 and curve[-1][1] == 50_007
    assert snapshots.curve(events[:2], 0) == [(0.0, 10), (1e-05, 20)]
    record = {"model": "tiny", "batch": 1, "seq": 8, "checkpointing": False, "provider": "liger_hw", "memory": curve}
    ((name, figure),) = charts.memory_figures({"results": [record]})
    assert name == "memory tiny 1x8" and charts.picture(figure, "png").startswith(b"\x89PNG")


@pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator, which alone counts its memory")
def test_a_snapshot_of_a_step(tmp_path):
    file = tmp_path / "step.pickle"
    device = torch.device(ACCELERATOR.type, 0)
    curve = snapshots.record(lambda: torch.ones(2**20, device=device).sum(), device, file)
    before = curve[-1][1]
    assert max(held for _, held in curve) - before >= 4 * 2**20 and "device_traces" in pickle.loads(file.read_bytes())


def test_failed_training_is_reported(trained, monkeypatch, capsys):
    monkeypatch.setattr(training, "_in_a_process", lambda group: [{"error": "out of memory"}] * len(group))
    status, found = trained("tiny", "--checkpointing", "both")
    assert status == 0 and [run["checkpointing"] for run in found["results"]] == [False, False, True, True]
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nobody"], "unknown model 'nobody'. Models: llama-1b"),
        (["tiny", "--against", "quack"], "unknown peer 'quack'. Peers: eager, compile, liger"),
        (["tiny", "--longest"], "--longest: needs an accelerator"),
        (["tiny", "--activations", "much"], "budget: got 'much', allowed"),
        (["tiny", "--sweep", "batch"], "--sweep: needs an accelerator"),
        (["tiny", "--snapshot"], "--snapshot: needs an accelerator"),
        (["tiny", "--compile", "layers", "--against", "compile"], "--against: got compile with --compile"),
        (["tiny", "--memory-limit", "24GiB"], "--memory-limit: needs an accelerator"),
        (["tiny", "--lora", "--qlora"], "--lora: got --qlora as well, allowed: one of the two"),
        (["tiny", "--optimizer", "galore"], "needs galore-torch, which is not installed here"),
        (["tiny", "--optimizer", "galore", "--offload"], "--offload: got --optimizer as well"),
        (["tiny", "--offload", "--compile", "model"], "--offload: got --compile as well"),
        (["tiny", "--offload", "--accumulation", "2"], "--offload: got --accumulation as well"),
        (["tiny", "--lora", "--kbit"], "--lora: got --kbit as well"),
        (["tiny", "--kbit"], "--kbit: got no --qlora"),
        (["llama-1b", "--against", "unsloth"], "--against: got unsloth, allowed: with --lora"),
        (["qwen3-4b", "--lora", "--against", "unsloth"], "--against: got unsloth, allowed: with --lora"),
        (["tiny", "--qlora"], "needs bitsandbytes, which is not installed here: pip install bitsandbytes"),
        (["tiny", "--offload"], "needs deepspeed, which is not installed here: pip install deepspeed"),
    ],
    ids=lambda value: " ".join(value[1:]) or "model" if isinstance(value, list) else "",
)
def test_training_refuses(arguments, message, capsys, monkeypatch):
    pytest.importorskip("transformers")
    of_console = console.find_spec
    absent = ("bitsandbytes", "deepspeed", "galore_torch")
    monkeypatch.setattr(console, "find_spec", lambda name: None if name in absent else of_console(name) or True)
    assert cli.main(["bench", "train", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, BudgetTooSmall])
@pytest.mark.parametrize("limit", [0, 1024, 1500, 70_000, 10**9])
def test_the_longest_context_is_found(monkeypatch, limit, error):
    class Trained:
        model, plans = None, []

        def step(self, batch):
            self.plans[-1] += 1
            if batch > limit:
                raise error

    monkeypatch.setattr(training, "_batch", lambda made, batch, seq, device: seq)
    monkeypatch.setattr(training, "_free", lambda made, device: None)
    monkeypatch.setattr(liger_hw, "activations", lambda model, budget: Trained.plans.append(0))
    found = training._longest(Trained(), torch.device("cpu"), "auto")
    assert set(Trained.plans) <= {1, 2 + training.PLANNING}  # steps of each plan
    assert found <= limit and min(limit, training.POSITIONS) - found <= max(1024, found // 16)


def test_pictures_are_pictures():
    found = results(
        made(1.0, share=0.5, bytes=10, flops=10), made(2.0, share=0.2, provider="eager", bytes=10, flops=10)
    )
    found["ceilings"] = {"bytes_per_second": 1e9, "flops_per_second": 1e12}
    drawn = {name: charts.picture(figure, "png") for name, figure in charts.figures(found)}
    assert set(drawn) == {"roofline", "rms_norm fwd"}
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())


def test_the_page_of_ops_is_written_from_results(monkeypatch, tmp_path):
    from liger_lab.tools import readme

    records = [made(m, provider=p, shape="16384x4096", mode="full", share=0.5, bytes=9, flops=9) for m, p in
               ((0.2, "liger_hw"), (0.3, "quack"), (0.4, "liger"))]  # fmt: skip
    found = environment(torch.device("cpu")) | results(*records) | {
        "device": {"name": "a GPU", "vendor": "nvidia", "arch": "sm90", "clock": "events"}, "dtype": "bfloat16",
        "ceilings": {"bytes_per_second": 4e12, "flops_per_second": 7e14},
    }  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    begin = readme.BEGIN.format(readme.TOOL)
    page = tmp_path / "docs" / "speed.md"
    page.parent.mkdir()
    page.write_text(f"before\n{begin}\nstale\n{readme.END}\nafter\n")
    readme.main([page, tmp_path / "gpu.json"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{readme.END}\nafter\n") and "stale" not in text
    row = "| `rms_norm` | 16384x4096 | 0.2000 ms | 50% | quack, 0.3000 ms | 1.50x | 1 MiB | 1 MiB | 0.4000 ms, 1 MiB |"
    assert row in text
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")


def test_the_readme_is_written_from_results(monkeypatch, tmp_path):
    from liger_lab.tools import readme

    about = {"device": {"name": "a GPU", "vendor": "nvidia", "arch": "sm90", "clock": "events"}}
    asked = {"model": "llama-1b", "batch": 8, "checkpointing": False, "dtype": "bfloat16"}
    steps = [asked | {"seq": 1024, "provider": name, "tokens_per_second": speed, "peak_bytes": memory * 2**30}
             for name, speed, memory in (("eager", 1000, 20), ("liger", 1200, 12), ("liger_hw", 1500, 10))]  # fmt: skip
    longest = [asked | {"seq": None, "provider": name, "longest": tokens}
               for name, tokens in (("eager", 1024), ("liger", 2048), ("liger_hw", 3072))]  # fmt: skip
    compiled = [*steps, steps[0] | {"provider": "compile", "tokens_per_second": 1250}]
    for name, records in (("steps", steps), ("longest", longest), ("compiled", compiled)):
        (tmp_path / f"{name}.json").write_text(json.dumps(environment(torch.device("cpu")) | results(*records) | about))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN.format(readme.TOOL)}\n{readme.END}\nafter\n")
    readme.main([page, *(tmp_path / f"{name}.json" for name in ("steps", "longest", "compiled"))])
    text = page.read_text()
    assert (
        "1.50x the tokens/s of plain with 0.50x its memory, and 1.25x the tokens/s of liger-kernel with 0.83x" in text
    )
    assert "1.20x the tokens/s of plain under torch.compile with 0.50x" in text
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG") and text.endswith("after\n")


def test_the_page_of_models_is_written_from_results(monkeypatch, tmp_path):
    from liger_lab.tools import readme

    def run(provider, tokens, memory, model="llama-1b"):
        asked = {"model": model, "batch": 4, "seq": 2048, "checkpointing": False, "provider": provider}
        return asked | {"dtype": "bfloat16", "tokens_per_second": tokens, "peak_bytes": memory * 2**30}

    broken = run("liger", 0, 0, "granite-2b") | {"error": "ValueError: sideways"}
    found = environment(torch.device("cpu")) | results(
        run("eager", 1000.0, 20), run("liger_hw", 1500.0, 10), run("liger", 1200.0, 12),
        run("eager", 1000.0, 20, "granite-2b"), run("liger_hw", 1300.0, 10, "granite-2b"), broken,
    ) | {"device": {"name": "a GPU", "vendor": "nvidia", "arch": "sm90", "clock": "events"}}  # fmt: skip
    (tmp_path / "models.json").write_text(json.dumps(found))
    page = tmp_path / "models_speed.md"
    page.write_text(f"before\n{readme.BEGIN.format(readme.TOOL)}\n{readme.END}\nafter\n")
    compiled = run("compile", 1400.0, 15) | {"median": 1.0, "p20": 1.0, "p80": 1.0}
    longest = {"model": "llama-1b", "batch": 1, "seq": None, "checkpointing": False, "provider": "liger_hw",
               "longest": 4096}  # fmt: skip
    (tmp_path / "more.json").write_text(json.dumps(found | {"results": [compiled, longest]}))
    readme.main([page, tmp_path / "models.json", tmp_path / "more.json"])
    line = "| llama-1b 4x2048 | 1,000, 20.0 GiB | 1,200, 12.0 GiB | 1,500, 10.0 GiB | 1.50x, 0.50x | 1.25x, 0.83x |"
    text = page.read_text()
    assert "| llama-1b 4x2048 | compile | 1,400 | 1.0-1.0 | 15.0 GiB |   |" in text
    assert "| llama-1b longest context | liger_hw |   |   |   | 4,096 |" in text
    assert line in text and "| granite-2b 4x2048 | 1,000, 20.0 GiB | does not run | 1,300, 10.0 GiB |" in text
    assert text.endswith("after\n")
