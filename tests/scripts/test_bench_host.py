"""Cost of an operator for the host."""

from pathlib import Path

import pytest

from scripts import bench_host


def test_page_has_the_quotient_of_time_and_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the quotient by hand, of steps that take 2 ms and 10 ms more for each layer."""
    monkeypatch.setattr(bench_host, "run_ranks", lambda ranks, function, words, steps: [2e-3 + 1e-2 * layers(words)])
    monkeypatch.setattr(bench_host, "operators", lambda words: 7.0 + 100 * layers(words))
    monkeypatch.setattr("sys.argv", ["bench_host.py", "--strategies", "single", "--write", str(tmp_path / "page.md")])
    bench_host.main()
    assert "| single | 42.0 | 162.0 | 322.0 | 10.00 | 100 | 100.0 |" in (tmp_path / "page.md").read_text()


def layers(words: list[str]) -> int:
    return next(int(word.split("=")[1]) for word in words if word.startswith("model.n_layers="))
