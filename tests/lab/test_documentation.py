"""Check the documentation's pages without a build; `make docs` builds the site."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from operator import mul
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import liger_hw
from liger_hw import dispatch, integrations
from liger_hw.integrations import uninstall
from liger_hw.kernels import load_all
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.patching import flags
from liger_lab.tools import phone

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def documentation():
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    return importlib.import_module("liger_lab.tools.documentation")


@pytest.fixture
def cells(documentation):
    return documentation.evidence.read([documentation.RESULTS])[1]


def moved(documentation, text, place, *places):
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in places else None)
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place), meta={})
    return documentation.on_page_markdown(text, page, {}, files)


def test_links_between_the_repository_and_the_site(documentation):
    text = "[a](../CONTRIBUTING.md#an-op) [b](speed.md) [c](https://example.org/x) [d](../lab/pyproject.toml)"
    assert moved(documentation, text, "models.md", "project/contributing.md", "speed.md") == (
        "[a](project/contributing.md#an-op) [b](speed.md) [c](https://example.org/x) d (`lab/pyproject.toml`)"
    )
    text = "[a](docs/hardware.md) ![p](../lab/results/h200-times.png) [e](../README.md)"
    assert moved(documentation, text.replace("../", ""), "project/contributing.md", "hardware.md", "index.md",
                 "pictures/h200-times.png") == (
        "[a](../hardware.md) ![p](../pictures/h200-times.png) [e](../index.md)"
    )  # fmt: skip


def test_every_row_about_several_gpus_names_its_test():
    """Each cell of the table of engines, and the last cell of each row of the others."""
    tests = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    # tables of speed precede the marker
    text = (ROOT / "docs/distributed.md").read_text().partition("<!-- measured: end -->")[2]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    tables = [[line.strip("|").split(" | ") for line in table.splitlines()] for table in tables]
    for (titles, _, *rows), first in zip(tables, [1, *[-1] * len(tables)]):
        for row in rows:
            assert len(row) == len(titles), row
            for cell in row[first:]:
                named = re.findall(r"`(test_\w+)`", cell)
                assert named or cell.strip() == "not offered", f"{row[0]}: {cell}"
                assert tests.issuperset(named), cell


def test_formulas_become_mathml(documentation):
    code = "```python\nprice = '$1 and $2'\n```"
    text = moved(documentation, f"$x_1$ costs 3$.\n\n```math\n\\frac{{a}}{{b}}\n```\n\n{code}", "formulas.md")
    assert code in text and "costs 3$." in text and "$x_1$" not in text
    assert re.search(r'<math [^>]*display="inline">.*<msub>', text)
    assert re.search(r'^<div class="formula"><math [^>]*display="block">.*<mfrac>.*</math></div>$', text, re.MULTILINE)
    text = (ROOT / "docs" / "formulas.md").read_text()
    text, before = moved(documentation, text, "formulas.md"), text
    assert "$" not in text and "```" not in text and not re.search("^<math", text, re.MULTILINE)
    assert text.count('<div class="formula">') == before.count("```math") >= len(documentation.ops())
    assert not re.search(r"<mi>\\", text)  # an unknown command stays as text


def test_an_unknown_text_is_refused(documentation):
    with pytest.raises(ValueError, match="did you mean 'evidence nvidia'"):
        moved(documentation, "<!-- site: evidence nvida -->", "start/nvidia.md")


@pytest.mark.parametrize("tag", [
    '<script src="https://example.org/x.js">', "<link rel=stylesheet href=//example.org/x.css>",
    "@import url(https://example.org/font.css)", "background: url('https://example.org/x.png')",
    '<img alt="x" src="http://example.org/x.png">',
])  # fmt: skip
def test_a_page_that_loads_from_another_host_fails_the_build(documentation, tag, tmp_path):
    config = SimpleNamespace(site_dir=str(tmp_path))
    own = '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org/"><script src="x.js">'
    (tmp_path / "a.html").write_text(own)
    documentation.on_post_build(config)
    (tmp_path / ("b.css" if tag[0] in "@b" else "b.html")).write_text(tag)
    with pytest.raises(documentation.PluginError, match="loads from another host"):
        documentation.on_post_build(config)


def test_the_page_of_an_op(documentation, cells):
    benchmark = documentation.json.loads((documentation.RESULTS / "h200.json").read_text())
    text = documentation.op_page("rms_norm", "liger_hw.kernels.norms.rms_norm", cells, {"h200.json": benchmark})
    assert "::: liger_hw.kernels.norms.rms_norm.rms_norm" in text and "rstd = 1 / sqrt(mean(s^2) + eps)" in text
    (sm90,) = re.findall(r"^\| sm90 \| (.*) \|$", text, re.MULTILINE)
    assert re.match(r"\d+: bf16 \| \d+: fp32 bf16 fp16 \|", sm90)  # measured, executed
    figures = r"^\| 16384x4096 \| forward and backward \| [\d.]+ ms \| \d+% \| \w+, [\d.]+ ms \| [\d.]+x \|"
    assert re.search(figures, text, re.MULTILINE)


def test_a_vendors_table_is_a_part_of_the_whole_one(documentation, cells):
    rows = [documentation.markdown(row, []).splitlines()[0] for row in documentation.page.rows(cells)]
    shown = [line for vendor in documentation.backends.VENDORS if vendor != "cpu"
             for line in documentation.TEXTS[f"evidence {vendor}"](cells).splitlines()[2:]]  # fmt: skip
    assert sorted(shown) == sorted(rows)


def test_every_public_name_has_its_text_in_the_reference(documentation, cells):
    """A block `::: NAME`, the page of an op, or a row of the names of liger-kernel."""
    blocks = "".join(file.read_text() for file in (ROOT / "docs" / "reference").glob("*.md"))
    found = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", blocks, re.MULTILINE)}
    names = documentation.liger_kernel_names()
    for table in (names, documentation.refused_names()):
        assert table in blocks, "a table is stale: python -m liger_lab.tools.documentation"
    found |= {*documentation.ops(), *re.findall(r"\| `(\w+)` \|", names)}
    assert not {*liger_hw.__all__, *integrations.__all__} - found


def test_the_python_of_the_readme_runs(monkeypatch, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # of the Trainer
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2))  # fmt: skip
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(64, (2, 16))
    names = {"model": model, "tokens": tokens, "dataset": [{"input_ids": row, "labels": row} for row in tokens]}
    try:
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
            exec(code, names)
    finally:
        uninstall()
    printed = capsys.readouterr().out
    assert "rms_norm" in printed and "train_loss" in printed
    torch.testing.assert_close(names["head"].grad.shape, names["head"].shape)
    torch.testing.assert_close(names["loss"], names["expected"])


def test_the_python_of_post_training_runs_and_shifts_the_labels():
    pytest.importorskip("transformers")
    text, names = (ROOT / "docs/guides/post_training.md").read_text(), {}
    dpo, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(dpo, names)
    output, ids = names["output"], names["ids"]
    for code in others:
        exec(code, names)
    log_probs = names["ref_model"](input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = torch.where(torch.arange(1, 12) >= 5, log_probs, 0).sum(1).detach()
    torch.testing.assert_close(torch.cat([output.chosen_log_probs, output.rejected_log_probs]), expected)
    torch.testing.assert_close(output.loss.detach(), torch.tensor(2.0).log())  # the policy is the reference model


def run_from_scratch(program, folder):
    """Run the page's program on two processes of a CPU; return the losses that it prints."""
    (folder / "train.py").write_text(program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    paths = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(launch, cwd=folder, env=environment, capture_output=True, text=True)
    # torch 2.13 ended 2 of 4 unpatched runs so on two loaded cores, after the last line of the program
    ended = run.returncode == 0 or "terminate called without an active exception" in run.stderr
    assert ended, run.stderr[-2000:]
    return [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)$", run.stdout, re.MULTILINE)]


def test_the_program_from_scratch_trains_and_resumes(tmp_path):
    transformers = pytest.importorskip("transformers")
    text = (ROOT / "docs/guides/distributed.md").read_text().partition("### From scratch")[2]
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    on_gpus = re.search(r"device = torch.device.*\n.*set_device.*\n", program)[0]
    program = program.replace(on_gpus, 'device = torch.device("cpu")\n')
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    transformers.Qwen3MoeConfig(**sizes).save_pretrained(tmp_path / "my-config")
    data = """
import torch

def batches(rank, first):
    for step in range(first, first + 4):
        ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        yield {"input_ids": ids, "labels": ids}
"""
    (tmp_path / "my_data.py").write_text(data)
    found = [*run_from_scratch(program, tmp_path), *run_from_scratch(program, tmp_path)]
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "my_data.py").write_text(data.replace("first + 4", "8"))
    expected = run_from_scratch(re.sub(r"^liger_hw\..*\n", "", program, flags=re.MULTILINE), tmp_path)
    assert len(expected) == 8
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-4, atol=0)


def test_the_printed_summary_is_real():
    """In a process of its own: here tests fill empty memory, which a whole model's would take minutes."""
    pytest.importorskip("transformers")
    samples = re.findall(r"```text\n(module .*?)```", (ROOT / "docs/guides/patch.md").read_text(), re.DOTALL)
    for model_type, sample in zip(("qwen3", "mpt"), samples, strict=True):
        command = [sys.executable, "-m", "liger_hw", "patch-report", model_type]
        assert sample in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_objects_of_the_reference_exist():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
    assert len(names) > 10
    for name in names:
        module, _, thing = name.rpartition(".")
        path = ROOT / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert re.search(rf"^(class|def) {thing}\b", text, re.MULTILINE), name


def test_the_call_that_leaves_out_a_failed_op():
    """Every op that `patch` was seen to put into a model has a row, with the flag that controls it."""
    load_all()
    page = (ROOT / "docs/guides/if_an_op_fails.md").read_text()
    page = page.partition("| failed op | call |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in page.splitlines() if "model" in line]
    (trl,) = (line for line in page.splitlines() if "trainer of TRL" in line)
    assert "`fused_linear_selective_log_softmax`" in trl and "`liger_hw.integrations.restore_trl()`" in trl
    assert {"accelerate_trl", "restore_trl"} <= {*integrations.__all__}
    flag_of_op = {op: call for ops, call in rows for op in re.findall(r"`(\w+)`", ops)}
    parts = {  # ops whose flag `flag_of` reads from the kind of their module, or that another op calls
        "gated_rms_norm": "rms_norm", "lora_glu_linear": "lora", "dequantize_4bit": "lora",
    }  # fmt: skip
    for op, call in flag_of_op.items():
        flag = parts.get(op, flags.FLAG_OF.get(op, op))
        assert op in dispatch.OPS and re.findall(r"(\w+)=", call) == [flag], (op, call)
    models = json.loads((ROOT / "docs/models.json").read_text())["models"]
    replaced = {text.partition("(")[0] for model in models for text in model["replaced"]}
    assert replaced - {"activate"} <= flag_of_op.keys()
    assert {"lora_linear", "lora_glu_linear", *flags.LOSSES} <= flag_of_op.keys()
    assert set(re.findall(r"(\w+)=(?:True|False)", page)) == flags.FLAGS.keys()


def test_the_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    for target in set(re.findall(r"make (\w+)", text)) - {"it"}:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install [^\n]*\[(\w+)\]", text)) == {"transformers"} <= set(extras)


def test_the_page_of_evidence_names_the_files_without_a_command():
    files = sorted((ROOT / "lab/results").glob("*.json"))
    without = [file.stem for file in files if not json.loads(file.read_text()).get("command")]
    page = (ROOT / "docs/guides/evidence.md").read_text()
    assert len(without) == 8 and "eight files" in page.replace("\n", " ")
    assert not [stem for stem in without if f"{stem}.json" not in page]


def test_broken_links_of_a_site_are_named(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text('<p id="top"><a href="guide/">a</a><a href="#top">b</a><img src="no.png">')
    (tmp_path / "guide/index.html").write_text('<a href="../#gone">c</a><a href="https://example.org/">d</a>')
    faults = phone.broken_links(tmp_path)
    assert faults == ["guide/index.html: broken link ../#gone", "index.html: broken link no.png"]


def value_at(results, path):
    """Return the value of a result at `rows.0.peak_gib`."""
    for key in path.split("."):
        results = results[int(key) if isinstance(results, list) else key]
    return results


def test_the_memory_of_an_adapter_is_the_sum_of_its_page():
    """Llama-3-8B, rank 16, weights of 4 bits, whose blocks of 64 have scales of 8 bits."""
    layers, hidden, keys, units, vocab, rank = 32, 4096, 1024, 14336, 128256, 16
    linears = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, units)] * 2 + [(units, hidden)]
    weights, factors = (layers * sum(size(*shape) for shape in linears) for size in (mul, lambda *s: rank * sum(s)))
    fixed = weights * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * 2 * vocab * hidden + 16 * factors
    at_work, kept = 8 * hidden + 4 * (hidden + keys) + 6 * units, 8 * hidden + 4 * (hidden + keys) + 4 * units
    page = (ROOT / "docs/guides/small_gpu.md").read_text()
    assert f"that is {fixed / 2**30:.2f} GiB at every length" in page
    for tokens in (8192, 4096):
        loss = tokens * 6 * hidden + CHUNK_MEMORY
        few = tokens * layers * 2 * hidden + max(tokens * at_work, loss)
        computed = [f"{(fixed + kept_bytes) / 2**30:.2f}" for kept_bytes in (few, tokens * layers * kept + loss)]
        assert f"| {tokens:,} tokens, computed | {computed[0]} | {computed[1]} |" in page
        if tokens == 8192:  # the table's next row is measured
            measured = re.search(r"^\| the same on the H100 \| ([\d.]+)<.*?\| ([\d.]+)<", page, re.MULTILINE).groups()
            assert [float(value) for value in computed] == pytest.approx([float(value) for value in measured], rel=5e-3)


def test_the_memory_of_a_small_gpu_is_planned(capsys):
    """Run the page's command at both lengths, and without checkpointing."""
    from liger_hw import cli

    page = (ROOT / "docs/guides/small_gpu.md").read_text()
    command = re.search(r"^    liger-hw (plan .* --seq 8192 --checkpointing)$", page, re.MULTILINE)[1]
    gib, longest, states = [], [], []
    for words in (command, command.replace("8192", "16384"), command.replace(" --checkpointing", "")):
        assert cli.main([*words.split(), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        gib.append(f"{result['total_bytes'] / 2**30:.2f}")
        longest.append(f"{result['longest']:,}")
        states.append(sum(result["bytes"].get(name, 0) for name in ("parameters", "gradients", "optimizer")) / 2**30)
    assert f"computes {gib[0]} GiB for Llama-3.2-1B, of which {states[0]:.2f} are weights" in page
    assert f"`--seq 16384` {gib[1]} GiB" in page
    assert f"has {longest[0]} tokens, without `--checkpointing` {longest[2]}." in page


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_figures_of_prose_are_those_of_their_files(page):
    """A figure before `<!-- FILE: PATH -->`, with ` / PATH` or ` / NUMBER` too, is that of lab/results/FILE.json."""
    for figure, name, path in re.findall(r"([\d,.]+)x?<!-- ([\w/-]+): ([^>]+) -->", page.read_text()):
        results = json.loads((ROOT / "lab/results" / f"{name}.json").read_text())
        value, *divisor = (float(part) if part.isdigit() else value_at(results, part) for part in path.split(" / "))
        decimals = len(figure.partition(".")[2])
        assert figure == f"{value / divisor[0] if divisor else value:,.{decimals}f}", (page, name, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_has_one_unit_of_memory(page):
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        cells = [cell for line in table.splitlines()[2:] for cell in line.strip("|").split(" | ")[2:]]
        assert len({unit for cell in cells for unit in re.findall(r"\d (MiB|GiB)$", cell.strip())}) < 2, table


def test_every_op_is_at_a_glance_and_has_a_formula():
    load_all()
    glance, formulas = ((ROOT / "docs" / name).read_text() for name in ("ops.md", "formulas.md"))
    names = [name for name in dispatch.OPS if hasattr(liger_hw, name)]
    assert not [name for name in names if f"`{name}`" not in glance]
    assert sorted(re.findall(r"^## `(\w+)`\n\n```math$", formulas, re.MULTILINE)) == sorted(names)


def test_commands_in_the_documentation_exist():
    from liger_hw import cli

    for file in [*PAGES, ROOT / "README.md"]:
        text = re.sub(r" \\\n +", " ", file.read_text())  # commands over several lines
        for words in re.findall(r"^    liger-hw ([^#\n]*?)(?:  .*|#.*)?$", text, re.MULTILINE):
            words = [word for word in words.split() if "[" not in word and "]" not in word]
            assert cli._parse(words).command.split()[0] == words[0], (file, words)
