"""A run as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import dataclasses
import json
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from .folder import RunFolder
from .plot import BLUE, Curve, Panel, picture, run_curves, smoothed

STYLE = """
body { margin: 0; background: #f6f7f9; color: #24292f; font: 15px/1.5 system-ui, -apple-system,
  "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 10px; }
.sub { color: #6e7781; margin: 0 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.card { background: #fff; border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 22px; font-weight: 600; } .card span { color: #6e7781; }
svg { max-width: 100%; height: auto; }
pre { background: #fff; border-radius: 10px; padding: 14px 16px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
table { width: 100%; border-collapse: collapse; background: #fff; border-radius: 10px; }
th, td { text-align: left; padding: 6px 14px; border-bottom: 1px solid #eef0f2;
  vertical-align: top; }
th { color: #6e7781; font-weight: 500; }
code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
"""


def report(run: str | Path) -> str:
    """The page of a run folder: figures, curves, sample, digests, settings, environment."""
    folder = RunFolder.open(run)
    rows, digests = folder.metrics(), folder.digests()
    environment = folder.environment()
    validated = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    rates = [(row["step"], row["tokens_per_s"]) for row in rows if row.get("tokens_per_s")]
    last = rows[-1]["loss"] if rows else None
    cards = {
        "steps": f"{rows[-1]['step']:,}" if rows else "0",
        "last loss": "none" if last is None else f"{last:.4f}",
        "best validation loss": f"{min(validated):.4f}" if validated else "none",
        "tokens seen": f"{sum(row['tokens'] for row in rows):,}",
        "tokens/s (median)": f"{median(r for _, r in rates):,.0f}" if rates else "none",
    }
    speed = picture(
        [
            Panel(
                "tokens per second",
                [
                    Curve("every step", rates, BLUE, 1.0, 0.28),
                    Curve("smoothed", smoothed(rates), BLUE),
                ],
            )
        ]
    )
    sections = [
        f"<h1>{escape(Path(run).resolve().name)}</h1>",
        f"<p class='sub'>afinar {escape(str(environment.get('afinar')))}, "
        f"{escape(str(environment.get('cpu')))}</p>",
        "<div class='cards'>",
        *(f"<div class='card'><b>{escape(v)}</b><span>{k}</span></div>" for k, v in cards.items()),
        "</div>",
        "<h2>Curves</h2>",
        run_curves(rows),
        speed,
    ]
    for sample in folder.samples():
        sections += ["<h2>Sample</h2>", f"<pre>{escape(sample)}</pre>"]
    sections += [
        "<h2>Digests</h2>",
        "<p class='sub'>What a replay must give anywhere: <code>afinar verify</code>.</p>",
        _digest_table(digests),
        "<h2>Settings</h2>",
        _table(dataclasses.asdict(folder.settings())),
        "<h2>Environment</h2>",
        _table(environment),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(Path(run).resolve().name)} · afinar</title><style>{STYLE}</style></head>"
        f"<body><main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page to `out` (default: `report.html` in the run) and return its path."""
    path = Path(out) if out is not None else Path(run) / "report.html"
    path.write_text(report(run), encoding="utf-8")
    return path


def _table(values: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    rows = (
        f"<tr><th>{escape(str(k))}</th><td><code>{escape(shown(v))}</code></td></tr>"
        for k, v in values.items()
        if v is not None
    )
    return "<table>" + "".join(rows) + "</table>"


def _digest_table(digests: dict[str, Any]) -> str:
    head = "<tr><th>step</th><th>weights</th><th>optimizer</th></tr>"
    rows = (
        f"<tr><td>{record['step']}</td><td><code>{escape(record['weights'])}</code></td>"
        f"<td><code>{escape(record['optimizer'])}</code></td></tr>"
        for record in digests["steps"]
    )
    return f"<table>{head}{''.join(rows)}</table>"
