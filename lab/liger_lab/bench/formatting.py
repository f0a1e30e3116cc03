"""Format the results of a benchmark as text, and the changes between two runs."""

from liger_hw.console import table
from liger_lab.bench.peers import FLOOR, OURS

MiB = 2**20
NOISE = 0.03  # smaller changes are not listed, nor changes within both runs' spreads


def size(bytes_: float) -> str:
    """Format the bytes of an op in MiB."""
    return f"{bytes_ / MiB:,.0f} MiB"


def model_size(bytes_: float) -> str:
    """Format the bytes of a training step in GiB."""
    return f"{bytes_ / 2**30:,.1f} GiB"


def by_shape(benchmark: dict) -> dict:
    """Return (op, shape, mode) -> provider -> record, in the order of measurement."""
    shapes = {}
    for record in benchmark["results"]:
        shapes.setdefault((record["op"], record["shape"], record["mode"]), {})[record["provider"]] = record
    return shapes


def fastest_peer(records: dict) -> dict | None:
    peers = [record for name, record in records.items() if name not in (OURS, FLOOR)]
    return min(peers, key=lambda record: record["median"], default=None)


def kernels(record: dict) -> float:
    """Return milliseconds of the kernels alone, or of the call if no graph captured it."""
    return record.get("gpu") or record["median"]


def kernels_time(record: dict) -> str:
    """Format the time of `kernels`."""
    return f"{number(kernels(record))} ms"


def kernels_share(record: dict) -> float | None:
    """Return the share of the machine's limit that the time of `kernels` reaches."""
    return record["share"] and record["share"] * record["median"] / kernels(record)


def number(value: float) -> str:
    """Format a time with about four significant digits."""
    if value < 0.01:
        return f"{value:.3g}"
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def memory(record: dict | None) -> str:
    return size(record["peak_bytes"]) if record and "peak_bytes" in record else ""


KERNELS = ["liger_hw", "of the limit", "fastest peer", "speed-up", "peak memory", "the peer's", "liger-kernel"]
AXES = (
    "A shape is rows x columns; for `rope` and `qk_norm_rope` batch x tokens x heads of queries/heads of keys x their "
    "size; for losses rows x vocabulary, and for products rows x input features x output features (of a head: the "
    "vocabulary)."
)


def kernels_row(records: dict) -> list[str]:
    """Compare the kernels alone with the fastest peer's, as the cells of KERNELS.

    Args:
        records: provider -> record, ours among them.
    """
    ours, liger = records[OURS], records.get("liger")
    peer = min((record for name, record in records.items() if name not in (OURS, FLOOR)), key=kernels, default=None)
    return [
        kernels_time(ours), percent(kernels_share(ours)), f"{peer['provider']}, {kernels_time(peer)}" if peer else "",
        f"{kernels(peer) / kernels(ours):.2f}x" if peer else "", memory(ours), memory(peer),
        f"{kernels_time(liger)}, {memory(liger)}" if liger else "",
    ]  # fmt: skip


HEADER = [
    "op", "shape", "mode", "liger_hw", "p20-p80", "kernels alone", "of the limit",
    "fastest peer", "", "its kernels", "speed-up", "memory", "the peer's", "over floor",
]  # fmt: skip


def rows(benchmark: dict) -> list[list[str]]:
    """Return a line for each op, shape and mode with a time of ours.

    Times are milliseconds; microseconds for the host's.
    """
    lines = []
    for (op, shape, mode), records in by_shape(benchmark).items():
        ours, peer, floor = records.get(OURS), fastest_peer(records), records.get(FLOOR)
        if ours is None:
            continue
        unit = " us" if mode.startswith("host") else " ms"
        lines.append([
            op, shape, mode + (" (full - fwd)" if ours.get("derived") else ""), number(ours["median"]) + unit,
            f"{number(ours['p20'])}-{number(ours['p80'])}", number(ours["gpu"]) if ours.get("gpu") else "",
            percent(ours.get("share")), peer["provider"] if peer else "", number(peer["median"]) if peer else "",
            number(peer["gpu"]) if peer and peer.get("gpu") else "",
            f"{peer['median'] / ours['median']:.2f}x" if peer and ours["median"] > 0 else "",
            memory(ours), memory(peer), f"{ours['median'] / floor['median']:.3f}x" if floor else "",
        ])  # fmt: skip
    return lines


def facts(benchmark: dict) -> dict[str, str]:
    """Return the facts of the whole run."""
    device, versions = benchmark["device"], benchmark["versions"]
    named = f"{device['name']} ({device['vendor']} {device['arch']})"
    lines = {"device": named, "clock": device["clock"]}
    if "dtype" in benchmark:
        lines["dtype"] = benchmark["dtype"]
    if "ceilings" in benchmark:
        lines["copy"] = f"{benchmark['ceilings']['bytes_per_second'] / 1e12:.3f} TB/s, read and written"
        lines["matrix product"] = f"{benchmark['ceilings']['flops_per_second'] / 1e12:.2f} TFLOP/s"
    if benchmark.get("parity"):
        green = sum(result["cases"] for result in benchmark["parity"].values() if not result["error"])
        lines["parity"] = f"{green} cases pass"
    lines["versions"] = ", ".join(f"{package} {number}" for package, number in versions.items() if number)
    return lines | {
        "commit": benchmark["commit"] or "unknown", "date": benchmark["date"], "backend": benchmark["backend"],
        "command": benchmark["command"],
    }  # fmt: skip


def problems(benchmark: dict) -> list[str]:
    """Return a line for each wrong op, each failed provider, and an early end."""
    lines = [
        f"RED: {op} is not measured because its parity fails here: {result['error']}"
        for op, result in benchmark.get("parity", {}).items()
        if result["error"]
    ]
    lines += [f"skipped: {s['op']} {s['shape']} by {s['provider']}: {s['why']}" for s in benchmark.get("skipped", ())]
    return lines if benchmark["complete"] else [*lines, "interrupted: some measurements are missing"]


def show(benchmark: dict, header: list[str], lines: list[list[str]], *warnings: str) -> str:
    """Return a run as text: its facts, a table, warnings and `problems`."""
    about = [f"{name}: {value}" for name, value in facts(benchmark).items()]
    return "\n".join([*about, "", table(header, lines), *warnings, *problems(benchmark)])


TRAINING = ["model", "", "tokens/s", "p20-p80 ms", "peak memory", "longest context", "liger_hw is"]


def training_rows(benchmark: dict) -> list[list[str]]:
    """Return a line for each training run.

    The last cell is the ratio of liger_hw's speed (or context) and memory to the run's.
    """
    runs = by_setting(benchmark)
    lines = []
    for label, records in runs.items():
        ours = records.get(OURS, {})
        for name, record in records.items():
            if "error" in record:
                lines.append([label, name, record["error"], "", "", "", ""])
                continue
            value = "tokens_per_second" if record["seq"] else "longest"
            gain = []
            if name != OURS and ours.get(value) and record[value]:
                gain.append(f"{ours[value] / record[value]:.2f}x")
                if "peak_bytes" in record:
                    gain.append(f"with {ours['peak_bytes'] / record['peak_bytes']:.2f}x the memory")
            timed = "peak_bytes" in record
            lines.append([
                label, name, f"{record['tokens_per_second']:,.0f}" if timed else "",
                f"{record['p20']:.1f}-{record['p80']:.1f}" if timed else "",
                model_size(record["peak_bytes"]) if timed else "", "" if timed else f"{record['longest']:,}",
                " ".join(gain),
            ])  # fmt: skip
    return lines


def by_setting(benchmark: dict) -> dict:
    """Return label of a training run -> provider -> record."""
    runs = {}
    for record in benchmark["results"]:
        runs.setdefault(setting(record), {})[record["provider"]] = record
    return runs


def setting(run: dict) -> str:
    """Return the label of a training run, such as "llama-1b 8x1024".

    Others are "llama-8b longest context, checkpointing" and, of sharded training on 4 processes, "llama-8b 8x1024 fsdp2
    on 4, dpo".
    """
    sizes = f"{run['batch']}x{run['seq']}" if run["seq"] else "longest context"
    if "engine" in run:
        return f"{run['model']} {sizes} {run['engine']} on {run['gpus']}{options(run)}"
    return f"{run['model']} {sizes}{', checkpointing' if run['checkpointing'] else ''}{options(run)}"


def options(run: dict) -> str:
    """Return the end of a run's label: ", dpo, activations within 100GiB", for example."""
    texts = {
        "objective": "{}", "lora": "LoRA of rank {}", "qlora": "QLoRA of rank {}", "kbit": "the rest in fp32",
        "precision": "{}", "offload": "offloaded: {}", "optimizer": "{}",
        "accumulation": "{} batches a step", "activations": "activations within {}",
        "compiled": "compiled {}", "limit": "limited to {}",
    }  # fmt: skip
    return "".join(f", {text.format(run[name])}" for name, text in texts.items() if run.get(name))


def file_name(text: str, kind: str) -> str:
    """Return the name of a file about `text`, without spaces and commas."""
    return text.replace(" ", "-").replace(",", "") + f".{kind}"


def changes(before: dict, after: dict) -> dict:
    """List the times that differ by more than 3% and beyond both spreads.

    Returns:
        Plain data: "runs", a description of each; "compared", the number of times in both; "only" in one of them;
        "changes", the fastest first, each with op, shape, mode, provider, the share by which its time grew, and both
        records.
    """
    old = {key + (name,): record for key, records in by_shape(before).items() for name, record in records.items()}
    new = {key + (name,): record for key, records in by_shape(after).items() for name, record in records.items()}
    both = [key for key in new if key in old]
    entries = []
    for key in both:
        a, b = old[key], new[key]
        change = b["median"] / a["median"] - 1
        apart = b["p80"] < a["p20"] or b["p20"] > a["p80"]
        if apart and abs(change) > NOISE:
            entries.append(dict(zip(("op", "shape", "mode", "provider"), key)) | {"change": change, "records": [a, b]})
    entries.sort(key=lambda entry: entry["change"])
    only = [len(old) - len(both), len(new) - len(both)]
    return {"runs": [_run(before), _run(after)], "compared": len(both), "only": only, "changes": entries}


def show_changes(comparison: dict) -> str:
    """Format the result of `changes` as text."""
    rows = []
    for entry in comparison["changes"]:
        a, b = entry["records"]
        unit = "us" if entry["mode"].startswith("host") else "ms"
        memories = dict.fromkeys([memory(a), memory(b)])  # one if they are equal
        rows.append([
            f"{entry['change']:+.1%}", "faster" if entry["change"] < 0 else "slower",
            *(entry[key] for key in ("op", "shape", "mode", "provider")),
            f"{number(a['median'])} {unit}", f"{number(b['median'])} {unit}", " -> ".join(memories),
        ])  # fmt: skip
    header = ["change", "", "op", "shape", "mode", "provider", "before", "after", "memory"]
    summary = f"{len(rows)} of {comparison['compared']} times differ by more than {NOISE:.0%} and beyond their spreads"
    if any(comparison["only"]):
        summary += "; only before: {}, only after: {}".format(*comparison["only"])
    where = [f"before: {comparison['runs'][0]}", f"after:  {comparison['runs'][1]}"]
    return "\n".join([*where, summary, *([table(header, rows)] if rows else [])])


def _run(benchmark: dict) -> str:
    return f"{benchmark['device']['name']}, {benchmark['date']}, commit {benchmark['commit'] or 'unknown'}"
