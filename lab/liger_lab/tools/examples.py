"""Measure the examples, and write the table of examples/README.md.

    python -m liger_lab.tools.examples run lab/results/examples-h200.json [EXAMPLE ...] [-- --steps 8 --shape 1b]
    torchrun --nproc-per-node 2 -m liger_lab.tools.examples run FILE "medusa --stage 2" ...
    python -m liger_lab.tools.examples table lab/results/examples-h200.json ...

`run` adds to the file and replaces results of the same example and provider. An EXAMPLE may have options; arguments
after -- go to all of them. Under torchrun each is sharded over its processes.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from liger_lab.tools.readme import insert, markdown

FOLDER = Path(__file__).resolve().parents[3] / "examples"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "common")
PEER = "liger-kernel"
PROVIDERS = ("plain", "liger_hw", PEER)
LIMIT = 300  # seconds of a run, whose ranks may wait for one that failed


def measure(file: Path, names, options) -> None:
    """Run every example with every provider in its own process; rank 0 writes the results."""
    from liger_lab.bench.run_file import write

    context = multiprocessing.get_context("spawn")  # not fork: packages may use the device when they are imported
    measured = json.loads(file.read_text()) if file.exists() else {"results": []}
    providers = [name for name in PROVIDERS if name != PEER or find_spec("liger_kernel")]
    runs = [(line, provider) for line in names or EXAMPLES for provider in providers]
    for number, (line, provider) in enumerate(runs):
        answer = Path(tempfile.mkdtemp()) / "result.json"
        arguments = line, ["--provider", provider, *options], answer, number
        process = context.Process(target=_one, args=arguments)
        process.start()
        process.join(LIMIT)
        process.kill()
        if os.environ.get("RANK", "0") != "0":
            continue
        result = json.loads(answer.read_text()) if answer.exists() else {"error": "it did not run"}
        name, *more = line.split()
        key = {"example": name, "options": " ".join(more), "provider": provider}
        environment = result.pop("environment", {})
        others = [r for r in measured["results"] if {k: r.get(k, "") for k in key} != key]
        measured = measured | environment | {"results": [*others, key | result]}
        write(measured, file)


def _one(line, options, answer, number) -> None:
    """Run an example on a port of its own, apart from the last one's ranks."""
    import torch

    from liger_lab.bench.run_file import environment

    sys.path.insert(0, str(FOLDER))
    name, *more = line.split()
    ranks = os.environ.get("WORLD_SIZE")  # Lightning deletes it
    if ranks:
        port = int(os.environ["MASTER_PORT"]) + 1 + number
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": ""}
    sys.argv = [name, *more, *options, "--json", str(answer), "--output", str(answer.parent)]
    try:
        result = importlib.import_module(name).main()
    except Exception as error:  # a package may be absent, a library may fail; the others still run
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    device = torch.device(device.type, 0) if device.type != "cpu" else device
    command = f"python -m liger_lab.tools.examples run ... -- {' '.join(options[2:])}"
    if ranks:
        command = command.replace("python", f"torchrun --nproc-per-node {ranks}")
    answer.write_text(json.dumps(result | {"environment": environment(device) | {"command": command}}))


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


def main(arguments) -> None:
    if len(arguments) < 2 or arguments[0] not in ("run", "table"):
        raise SystemExit(__doc__)
    command, file, *rest = arguments
    if command == "table":
        files = [json.loads(Path(each).read_text()) for each in (file, *rest)]
        merged = files[0] | {"results": [result for measured in files for result in measured["results"]]}
        return insert(FOLDER / "README.md", table(merged), "liger_lab.tools.examples")
    names, options = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    unknown = [line for line in names if line.split()[0] not in EXAMPLES]
    if unknown:
        raise SystemExit(f"EXAMPLE: got {', '.join(unknown)}, allowed: {', '.join(EXAMPLES)}")
    measure(Path(file), names, options)


if __name__ == "__main__":
    main(sys.argv[1:])
