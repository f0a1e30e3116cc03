"""Measure the examples, and write the table of examples/README.md.

    python -m liger_lab.tools.examples run lab/results/examples-h200.json [EXAMPLE ...] [-- --steps 8 --shape 1b]
    python -m liger_lab.tools.examples run FILE --gpus 2 "medusa --stage 2" ...
    python -m liger_lab.tools.examples table lab/results/examples-h200.json ...
    python -m liger_lab.tools.examples pictures FILE

`run` adds to the file and replaces results of the same example and provider. An EXAMPLE may have options; arguments
after -- go to all of them. With several GPUs torchrun starts each.
`pictures` draws what FILE holds, beside it; also a file of `liger-hw bench train`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from liger_lab.tools.readme import insert, markdown

FOLDER = Path(__file__).resolve().parents[3] / "examples"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "common")
PEER = "liger-kernel"
PROVIDERS = ("plain", "liger_hw", PEER)


def measure(file: Path, lines, gpus, limit, options) -> None:
    """Run every example with every provider in its own processes; write each result."""
    import torch

    from liger_lab.bench.run_file import environment, write

    measured = json.loads(file.read_text()) if file.exists() else {"results": []}
    providers = [name for name in PROVIDERS if name != PEER or find_spec("liger_kernel")]
    for line, provider in [(line, provider) for line in lines or EXAMPLES for provider in providers]:
        result = _one(line, ["--provider", provider, *options], gpus, limit)
        name, *more = line.split()
        key = {"example": name, "options": " ".join(more), "provider": provider}
        others = [r for r in measured["results"] if {k: r.get(k, "") for k in key} != key]
        device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        device = torch.device(device.type, 0) if device.type != "cpu" else device
        words = ["...", *(["--gpus", str(gpus)] if gpus > 1 else []), "--", *options]
        command = {"command": f"python -m liger_lab.tools.examples run {' '.join(words)}"}
        measured = measured | environment(device) | command | {"results": [*others, key | result]}
        write(measured, file)


def _one(line, options, gpus, limit) -> dict:
    """Run an example in new processes; return its result, or the first error printed.

    Args:
        limit: seconds after which it is ended.
    """
    name, *more = line.split()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "result.json")
        words = [*launch, str(FOLDER / f"{name}.py"), *more, *options, "--json", str(answer), "--output", folder]
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            printed = f"TimeoutError: {limit} seconds\n{process.communicate()[0]}"
        print(f"{line} {' '.join(options)}: status {process.returncode}", flush=True)
        if answer.exists():
            return json.loads(answer.read_text())
    print(printed[-6000:], flush=True)
    error = re.search(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exit)\b.*)", printed, re.MULTILINE)
    return {"error": error[1][:200] if error else f"ended with status {process.returncode}"}


def table(measured: dict) -> str:
    """Return the table of all examples with a result of liger_hw."""
    rows = []
    lines = sorted({(run["example"], run.get("options", "")) for run in measured["results"]})
    for name, more in lines:
        same = [run for run in measured["results"] if (run["example"], run.get("options", "")) == (name, more)]
        runs = {run["provider"]: run for run in same}
        ours = runs.get("liger_hw", {"error": ""})
        if "error" in ours:
            continue
        line = [
            f"`{f'{name}.py {more}'.strip()}`",
            f"{ours['parameters'] / 1e9:.2f}B",
            f"{ours['batch']}x{ours['seq']}",
        ]
        for provider in PROVIDERS:
            run = runs.get(provider, {"error": "not run"})
            if "error" in run:
                line.append("does not run")
                continue
            memory = f", {run['peak_bytes'] / 2**30:.1f} GiB" if run["peak_bytes"] else ""
            line.append(f"{run['tokens_per_second']:,.0f}{memory}")
        plain = runs.get("plain", {})
        line.append(f"{ours['tokens_per_second'] / plain['tokens_per_second']:.2f}x" if "losses" in plain else "")
        rows.append(line)
    device, versions = measured["device"], measured["versions"]
    with_versions = ", ".join(f"{package} {number}" for package, number in versions.items() if number)
    lead = f"{device['name']} ({device['vendor']} {device['arch']}), {measured['date']}. {with_versions}."
    header = ["example", "parameters", "batch", *(f"{p}: tokens/s, peak memory" for p in PROVIDERS), "over plain"]
    return f"{lead}\n\n{markdown(header, rows)}"


def pictures(file: Path) -> None:
    """Draw the tokens per second and the peak memory of a file, beside it."""
    from liger_lab.bench import charts
    from liger_lab.bench.formatting import model_size, setting

    measured = json.loads(file.read_text())
    settings, from_examples = {}, "example" in measured["results"][0]
    for run in measured["results"]:
        if "error" not in run:
            line, name = "" if from_examples else setting(run), run["provider"]
            if from_examples:
                line = re.sub(r" --(?:steps|text|batch) \S+", "", f"{run['example']} {run.get('options', '')}".strip())
                line = f"{line}, {run['batch']}x{run['seq']}"
            settings.setdefault(line, {})[{"plain": "eager", PEER: "liger"}.get(name, name)] = run
    settings = {line: runs for line, runs in settings.items() if charts.OURS in runs}
    gpus = max(run.get("gpus", 1) for runs in settings.values() for run in runs.values())
    where = f"one of {gpus} {measured['device']['name']}".removeprefix("one of 1 ")
    where += ", of each example's largest" * from_examples
    drawn = {
        "speed": ("Tokens per second", "tokens_per_second", lambda tokens: f"{tokens:,.0f}"),
        "memory": ("Peak memory", "peak_bytes", model_size),
    }
    for kind, (title, value, text) in drawn.items():
        figure = charts.bars(
            f"{title} of {where}", settings, charts.pictures_style(), lambda run, value=value: run[value],
            lambda run, value=value, text=text: text(run[value]), scaled=from_examples,
        )  # fmt: skip
        file.with_name(f"{file.stem}-{kind}.png").write_bytes(charts.picture(figure, "png"))


def main(arguments) -> None:
    if len(arguments) < 2 or arguments[0] not in ("run", "table", "pictures"):
        raise SystemExit(__doc__)
    command, file, *rest = arguments
    if command == "table":
        files = [json.loads(Path(each).read_text()) for each in (file, *rest)]
        merged = files[0] | {"results": [result for measured in files for result in measured["results"]]}
        return insert(FOLDER / "README.md", table(merged), "liger_lab.tools.examples")
    if command == "pictures":
        return pictures(Path(file))
    rest, options = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    parser = argparse.ArgumentParser("liger_lab.tools.examples run FILE")
    parser.add_argument("lines", nargs="*", metavar="EXAMPLE")
    parser.add_argument("--gpus", type=int, default=1, help="processes of torchrun (1)")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a run (300)")
    args = parser.parse_args(rest)
    unknown = [line for line in args.lines if line.split()[0] not in EXAMPLES]
    if unknown:
        raise SystemExit(f"EXAMPLE: got {', '.join(unknown)}, allowed: {', '.join(EXAMPLES)}")
    measure(Path(file), args.lines, args.gpus, args.limit, options)


if __name__ == "__main__":
    main(sys.argv[1:])
