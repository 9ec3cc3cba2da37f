"""The trade-off as a picture: training tokens a second against time per output token at the 99th percentile."""

from __future__ import annotations

import csv
from pathlib import Path

Point = tuple[float, float]  # TPOT p99 in ms, training tok/s
PEER_CARD = "NVIDIA H100 80GB HBM3"  # series measured on another one say so
# Two processes on one H100, measured on 2026-11-27: vLLM 0.25.1 with half the memory beside a trainer.
PEERS: dict[str, dict[float, Point]] = {
    "vLLM + PEFT 1 x 1024": {4.0: (20.2, 3482), 16.0: (28.7, 3318)},
    "vLLM + PEFT 4 x 1024, checkpointed": {16.0: (29.4, 2785)},
    "vLLM + a fast trainer": {4.0: (20.4, 7537), 16.0: (32.6, 7209)},
}


def points(path: Path) -> dict[str, dict[float, Point]]:
    """The newest row of each policy, target, card and rate, by series and rate; on GPUs only, if there are any."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == "both" and row.get("policy")]
    rows = [row for row in rows if not row["card"].startswith("CPU")] or rows
    rows = [row for row in rows if "--enforce-eager" not in row.get("command", "")]  # for looking for faults
    found: dict[str, dict[float, Point]] = {}
    for row in rows:
        target = f", {float(row['slo_tpot_ms']):g} ms" if row.get("slo_tpot_ms") else ""
        card = "" if row["card"] == PEER_CARD else f" ({row['card'].removeprefix('NVIDIA ')})"
        series = found.setdefault(f"{row['policy']}{target}{card}", {})
        series[float(row["rate"])] = (float(row["tpot_p99_ms"]), float(row["train_tok_s"]))
    return found


def plot(source: Path, picture: Path) -> bool:
    """Write the picture; False, with a line that says so, where matplotlib is not installed (extra ``dev``)."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'fineinfer[dev]')", flush=True)
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fineinfer"  # the same rows give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for series, at in {**points(source), **PEERS}.items():
        peer = series in PEERS
        line = sorted(at.items())
        axes.plot(
            [point[0] for _, point in line], [point[1] for _, point in line], ":" if peer else "-",
            marker="s" if peer else "o", label=series, alpha=0.7 if peer else 1.0,
        )  # fmt: skip
        for rate, point in line:
            axes.annotate(f"{rate:g}/s", point, textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set_xlabel("time per output token, p99 (ms)")
    axes.set_ylabel("training beside it (tokens/s)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {picture}", flush=True)
    return True
