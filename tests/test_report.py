"""The curves and the HTML page of a run."""

import itertools
import json
import math
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from afinar.train.cli import main
from afinar.train.plot import run_curves, smoothed, ticks
from afinar.train.settings import Settings


def rows(n=50):
    for k in range(1, n + 1):
        row = {"step": k, "loss": 5 * math.exp(-k / 20) + 1, "lr": 1e-3, "grad_norm": 1.0}
        row |= {"tokens": 64, "tokens_per_s": 1000.0 + k}
        if k % 10 == 0:
            row["val_loss"] = row["loss"] + 0.1
        yield row


@pytest.fixture
def run(tmp_path):
    """A run folder written by hand."""
    folder = tmp_path / "a <run> & co"
    folder.mkdir()
    (folder / "run.toml").write_text(Settings(data="stdlib").complete().toml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows()))
    record = {"step": 50, "weights": "ab" * 32, "optimizer": "cd" * 32, "tensors": {}}
    (folder / "digests.json").write_text(json.dumps({"seed": 42, "steps": [record]}))
    (folder / "environment.json").write_text(json.dumps({"cpu": "a <cpu>", "afinar": "0"}))
    (folder / "sample.txt").write_text("def f(x):\n    return x < 3 & x\n")
    return folder


class Page(HTMLParser):
    """Collects text, and whatever a page would fetch."""

    def __init__(self):
        super().__init__()
        self.words, self.fetched, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        wanted = {"src", "href", "action", "data", "srcset"}
        self.fetched += [v for k, v in attrs if k in wanted] + ([tag] if tag == "script" else [])
        if tag not in ("meta", "line", "path", "circle", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_holds_all_and_fetches_nothing(run, capsys):
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert str(run / "report.html") in capsys.readouterr().out
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "url(" not in text
    words = "".join(page.words)
    for expected in (
        "a <run> & co",
        "return x < 3 & x",
        "ab" * 32,
        "cd" * 32,
        "learning rate",
        "gradient norm",
        "tokens per second",
        "best validation loss",
        "a <cpu>",
    ):
        assert expected in words


def test_the_page_opens_in_a_browser(run):
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None
    )
    if browser is None:
        pytest.skip("no headless browser found")
    assert main(["report", str(run)]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    page = (run / "report.html").resolve().as_uri()
    done = subprocess.run([browser, *flags, page], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("<svg") == 2
    assert "best validation loss" in done.stdout


def test_the_curves_are_an_svg_with_every_series():
    root = ET.fromstring(run_curves(rows()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"loss (nats per token)", "smoothed", "validation", "learning rate"} <= words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 5


@pytest.mark.parametrize("kept", [[], [0], [0, 1]])
def test_short_runs_and_gaps_have_curves_too(kept):
    some = [r for n, r in enumerate(rows()) if n in kept]
    for row in some:
        row["grad_norm"] = None
    assert ET.fromstring(run_curves(some)) is not None
    assert "nan" not in run_curves(some)


def test_smoothing_a_constant_gives_it_back():
    assert smoothed([(k, 3.0) for k in range(100)]) == [(k, pytest.approx(3.0)) for k in range(100)]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 9.1), (1e-5, 3e-3), (999.0, 1001.0)])
def test_ticks_are_few_round_and_inside(low, high):
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 6
    assert all(low - 1e-9 <= m <= high + 1e-9 for m in marks)
    steps = {float(f"{b - a:.6g}") for a, b in itertools.pairwise(marks)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"
