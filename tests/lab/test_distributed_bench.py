"""`liger-hw bench distributed`: processes over gloo, what ends them, and the table."""

import dataclasses
import json
import math
import os
import re
import time

import pytest
import torch

from liger_hw import cli
from liger_hw._triton import interpreting
from liger_lab.bench import distributed, sharded, training

for package in ("matplotlib", "rich", "transformers"):
    pytest.importorskip(package)
if interpreting():
    pytest.skip("the same on a CPU with and without the interpreter, so it runs without", allow_module_level=True)

CPU = torch.device("cpu")
CELL = {"model": "tiny", "engine": "fsdp2", "gpus": 2, "provider": "liger_hw", "batch": 1, "steps": 1}
CELL |= {"objective": None, "activations": None, "offload": None}
CELLS = [CELL | {"seq": 16}, CELL | {"seq": 32}]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)


def bench(*arguments):
    return cli.main(["bench", "distributed", "--model", "tiny", *arguments])


def test_end_to_end(tmp_path, capsys):
    status = bench("--seq", "32", "16", "--batch", "1", "--steps", "1", "--report", str(tmp_path))
    found = json.loads((tmp_path / "distributed.json").read_text())
    assert status == 0 and found["complete"] and found["device"]["clock"] == "wall"
    cells = [(record["provider"], record["gpus"], record["seq"]) for record in found["results"]]
    assert cells == [(provider, 2, seq) for provider in ("eager", "liger_hw") for seq in (16, 32)]
    for record in found["results"]:
        warm_up = sharded.WARM_UP if record["seq"] == 16 else 1
        assert record["tokens_per_second"] > 0 and len(record["losses"]) == warm_up + 1
        assert all(abs(loss - 9.7) < 0.2 for loss in record["losses"])  # of 16,384 tokens as good as equally likely
    eager, ours = found["results"][:2], found["results"][2:]
    for a, b in zip(eager, ours):
        torch.testing.assert_close(a["losses"], b["losses"], rtol=1e-6, atol=0)
    assert "tiny 1x16 fsdp2 on 2" in capsys.readouterr().out
    text = (tmp_path / "distributed.html").read_text()
    assert 'alt="tokens per second"' in text and not re.search(r"""(src|href)=["'](?!data:)""", text)


@pytest.mark.parametrize("options", [["--loss", "dpo"], ["--loss", "grpo"], ["--engine", "vocabulary"]], ids=" ".join)
def test_losses_of_hidden_states(options, tmp_path):
    """Every provider computes the same loss; of DPO it is log 2, because the reference is the model."""
    assert bench(*options, "--seq", "16", "--batch", "2", "--steps", "1", "--report", str(tmp_path)) == 0
    found = json.loads((tmp_path / "distributed.json").read_text())["results"]
    peers = ["eager", "loss_parallel"] if "vocabulary" in options else ["eager"]
    assert [record["provider"] for record in found] == [*peers, "liger_hw"]
    for record in found:
        torch.testing.assert_close(record["losses"], found[0]["losses"], rtol=1e-5, atol=1e-6)
        assert record["tokens_per_second"] > 0
    (first, *_) = found[0]["losses"]
    assert first == pytest.approx(math.log(2)) if "dpo" in options else abs(first) > 1e-4


@pytest.mark.parametrize("options", ["zero2", "zero2 --offload optimizer", "zero3 --offload parameters"])
def test_zero_on_two_ranks(options, tmp_path):
    pytest.importorskip("deepspeed")
    words = ["--against", "liger_hw", "--seq", "16", "--batch", "1", "--steps", "1", "--report", str(tmp_path)]
    assert bench("--engine", *options.split(), *words) == 0
    (record,) = json.loads((tmp_path / "distributed.json").read_text())["results"]
    assert record["provider"] == "liger_hw" and all(abs(loss - 9.7) < 0.2 for loss in record["losses"])


def test_activations_within_a_budget(tmp_path):
    """A plan for each length, and the losses of whole layers recomputed."""
    arguments = ["--activations", "512MiB", "--seq", "16", "32", "--batch", "1", "--steps", "1"]
    assert bench(*arguments, "--report", str(tmp_path)) == 0
    found = json.loads((tmp_path / "distributed.json").read_text())["results"]
    for eager, ours in zip(found[:2], found[2:]):
        assert len(ours["losses"]) == len(eager["losses"]) + training.PLANNING
        torch.testing.assert_close(ours["losses"][:2], eager["losses"][:2], rtol=1e-6, atol=0)
        assert len(set(ours["losses"])) == 1


def one_rank(provider, loss):
    return sharded.FSDP2([CELL | {"provider": provider, "objective": loss, "batch": 2, "seq": 16}], CPU)


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("provider", ["eager", "liger_hw"])
def test_a_sharded_model_is_the_model(provider, process_group):
    """It computes what the whole model computes from the same weights: nothing stays as it was on meta."""
    from transformers import AutoModelForCausalLM

    trained = sharded.FSDP2([CELLS[0] | {"provider": provider}], CPU)
    weights = {name: p.full_tensor() for name, p in trained.model.state_dict().items()}
    whole = AutoModelForCausalLM.from_config(trained.model.config)
    whole.load_state_dict(weights)
    ids = torch.randint(1000, (2, 24))
    torch.testing.assert_close(trained.step(ids), whole(input_ids=ids, labels=ids).loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_a_tied_head_stays_tied(engine, process_group, monkeypatch):
    if engine == "zero2":
        pytest.importorskip("deepspeed")
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
    model = training.SETTINGS["tiny"].model
    tied = dataclasses.replace(model, config=model.config | {"tie_word_embeddings": True})
    monkeypatch.setitem(training.SETTINGS, "tiny", training.Setting(tied, (16,)))
    trained = sharded.ENGINES[engine]([CELLS[0] | {"engine": engine}], CPU)
    losses = [trained.step(trained.batch(CELLS[0], CPU)).item() for _ in range(2)]
    assert losses[0] == losses[1]  # the rate is 0
    llama = getattr(trained.model, "module", trained.model)
    assert llama.lm_head.weight is llama.model.embed_tokens.weight


@pytest.mark.parametrize("provider", ["eager", "liger_hw"])
@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_post_training_trains_the_whole_model(loss, provider, process_group):
    """Every weight of the model gets a gradient, the head's and the embedding's too; the reference gets none."""
    trained = one_rank(provider, loss)
    trained.step(trained.batch(CELL | {"batch": 2, "seq": 16}, CPU))
    for name, p in trained.model.named_parameters():
        assert (p.grad is None) == name.startswith("reference."), name
        assert p.grad is None or p.grad.full_tensor().abs().max() > 0, name
    assert any(name.startswith("reference.") for name, _ in trained.model.named_parameters()) == (loss == "dpo")


def test_a_sharded_head_has_the_gradients_of_the_whole(process_group):
    """Each provider's gradients of hidden states and head are those of torch's cross entropy."""
    found = {}
    for provider in ("eager", "loss_parallel", "liger_hw"):
        head = sharded.Vocabulary([CELL | {"engine": "vocabulary", "provider": provider, "seq": 16}], CPU)
        batch = head.batch(CELL | {"seq": 16}, CPU)
        loss = head.step(batch)
        found[provider] = loss, batch[0].grad, head.head.weight.grad.full_tensor()
    for result in found.values():
        torch.testing.assert_close(result, found["eager"], rtol=1e-4, atol=1e-6)


# What ends a process group


def one_runs_out_of_memory(rank, world, cells, folder, answers):
    if rank == 0:
        answers.send({"seconds": [1.0], "losses": [2.0], "peak_bytes": None, "reserved_bytes": None})
        time.sleep(600)  # as if in a collective
    answers.send({"seconds": [2.0], "losses": [4.0], "peak_bytes": 7, "reserved_bytes": 8})
    answers.send({"error": "out of memory"})
    time.sleep(600)


def one_dies(rank, world, cells, folder, answers):
    if rank == 1:
        os._exit(3)
    time.sleep(600)


def test_a_process_that_runs_out_of_memory_ends_all(monkeypatch):
    monkeypatch.setattr(sharded, "main", one_runs_out_of_memory)
    first, second, third = distributed._results([*CELLS, CELL | {"seq": 2048}])
    assert first["tokens_per_second"] == 8 and first["losses"] == [3.0]
    assert (first["median"], first["peak_bytes"], first["reserved_bytes"]) == (2e3, 7, 8)
    assert second == {"error": "out of memory"} and third == {"error": "not tried: out of memory at 32"}


def test_a_process_that_dies_ends_all(monkeypatch):
    monkeypatch.setattr(sharded, "main", one_dies)
    first, second = distributed._results(CELLS)
    assert first == {"error": "a process ended with status 3"} and second["error"].startswith("not tried")


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), "out of memory"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_what_a_process_says_of_an_error(monkeypatch, error, said):
    def fails(*args):
        raise error

    class Answers(list):
        send = list.append

    monkeypatch.setattr(sharded, "_run", fails)
    answers = Answers()
    sharded.main(0, 2, CELLS, "", answers)
    assert answers == [{"error": said}]


# The table


def record(provider, gpus, seq, speed, loss=2.0):
    return CELL | {
        "provider": provider, "gpus": gpus, "seq": seq, "tokens_per_second": speed, "median": 5.0, "peak_bytes": 2**34,
        "reserved_bytes": 2**35, "losses": [loss],
    }  # fmt: skip


def test_rows_and_disagreements():
    failed = CELL | {"provider": "eager", "gpus": 2, "seq": 64, "error": "out of memory"}
    found = {"dtype": "bfloat16", "results": [
        record("eager", 1, 32, 100.0), record("liger_hw", 1, 32, 150.0), record("eager", 2, 32, 80.0),
        failed, record("liger_hw", 2, 32, 120.0), record("liger_hw", 2, 64, 50.0),
    ]}  # fmt: skip
    rows = [row[1:] for row in distributed.rows(found)]
    assert rows == [
        ["eager", "100", "5.0", "16.0 GiB", "32.0 GiB", "32", "", "2.00000", "1.500x with 1.00x the memory"],
        ["liger_hw", "150", "5.0", "16.0 GiB", "32.0 GiB", "32", "", "2.00000", ""],
        ["eager", "80", "5.0", "16.0 GiB", "32.0 GiB", "32", "80.0% of 1", "2.00000", "1.500x with 1.00x the memory"],
        ["liger_hw", "120", "5.0", "16.0 GiB", "32.0 GiB", "64", "80.0% of 1", "2.00000", ""],
        ["eager", "out of memory", "", "", "", "", "", "", ""],
        ["liger_hw", "50", "5.0", "16.0 GiB", "32.0 GiB", "64", "", "2.00000", ""],
    ]
    assert distributed.disagreements(found) == []
    found["results"].append(record("liger", 2, 32, 90.0, loss=2.01))
    (line,) = distributed.disagreements(found)
    assert line.startswith("RED: tiny 1x32 fsdp2 on 2") and "liger 2.01000" in line


def test_plan(monkeypatch):
    def providers(against, device=CPU, gpus=()):
        groups = distributed.plan("tiny", gpus, "fsdp2", against, 1, [32, 16, 32], 1, device)
        assert all([cell["seq"] for cell in cells] == [16, 32] for cells in groups)
        return [(cells[0]["provider"], cells[0]["gpus"]) for cells in groups]

    assert providers([]) == [("eager", 2), ("liger_hw", 2)]
    assert providers(["eager"], gpus=[4, 1]) == [("eager", 1), ("liger_hw", 1), ("eager", 4), ("liger_hw", 4)]
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr("liger_lab.bench.training.find_spec", lambda name: object())
    assert providers([], gpu) == [("eager", 3), ("liger", 3), ("liger_hw", 3)]
    monkeypatch.setattr("liger_lab.bench.training.find_spec", lambda name: None)
    assert providers([], gpu) == [("eager", 3), ("liger_hw", 3)]
    with pytest.raises(ValueError, match="--gpus: got 4, allowed: at most 3"):
        providers([], gpu, [4])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "nobody"], "unknown model 'nobody'. Models: llama-1b"),
        (["--model", "qwen2.5-vl-3b"], "unknown model 'qwen2.5-vl-3b'"),
        (["--against", "quack"], "unknown peer 'quack'. Peers: eager, liger"),
        (["--against", "liger"], "needs an accelerator"),
        (["--engine", "zero3"], "zero3, which needs deepspeed: pip install deepspeed"),
        (["--offload", "optimizer"], "--offload: got optimizer with --engine fsdp2"),
        (["--loss", "dpo", "--engine", "zero3"], "--loss: got dpo with --engine zero3, allowed: with fsdp2"),
        (["--activations", "1GiB", "--engine", "vocabulary"], "--activations: got 1GiB with --engine vocabulary"),
        (["--activations", "much"], "budget: got 'much'"),
        (["--loss", "dpo", "--batch", "3"], "--batch: got 3, allowed: an even number"),
        (["--engine", "vocabulary", "--against", "liger"], "unknown peer 'liger'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refuses(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(distributed, "find_spec", lambda name: None)
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err
