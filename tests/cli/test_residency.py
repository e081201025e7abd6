"""Traces, the simulator, heat, warming and the bench through the command line."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from cli.command import deltafin
from deltafin.history.trace import read_trace
from deltafin.installs import embedded_checkpoint
from deltafin.store import DriveSpec, create_store

TRACE = Path(__file__).parents[1] / "data/traces/olmoe.trace"


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which one traced run has happened."""
    home = tmp_path_factory.mktemp("home")
    code, _, err = deltafin(
        home, "run", "--prompt", "The capital of France is", "--max-new", "12", "--router-trace", str(home / "t")
    )
    assert code == 0, err
    return home


def test_a_run_leaves_heat_and_a_trace(used: Path) -> None:
    trace = read_trace(used / "t")
    assert trace.shape.layers == 8
    code, out, _ = deltafin(used, "heat", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["tokens"] == len(trace.routes)
    rates = [row["predicted"] for row in facts["hit_rate"]]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1.0)


def test_heat_as_table_file_and_picture(used: Path, tmp_path: Path) -> None:
    code, out, _ = deltafin(
        used, "heat", "--layers", "--export", str(tmp_path / "x.csv"), "--picture", str(tmp_path / "x.svg")
    )
    assert code == 0
    assert "predicted hit rate" in out
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + 8 * 128
    xml.etree.ElementTree.parse(tmp_path / "x.svg")
    code, _, err = deltafin(used, "heat", "--export", str(tmp_path / "x.csv"))
    assert code == 2
    assert "exists already" in err


def test_a_trace_is_not_overwritten(used: Path) -> None:
    code, _, err = deltafin(used, "run", "--prompt", "x", "--max-new", "1", "--router-trace", str(used / "t"))
    assert code == 2
    assert "exists already" in err


def test_heat_can_be_switched_off(tmp_path: Path) -> None:
    code, _, _ = deltafin(tmp_path, "run", "--prompt", "The", "--max-new", "2", K3_HEAT="false")
    assert code == 0
    assert not (tmp_path / "heat").exists()


def test_simulate(used: Path) -> None:
    code, out, err = deltafin(
        used,
        *(
            "simulate",
            str(used / "t"),
            str(TRACE),
            "--drive",
            "7GB",
            "--drive",
            "3.5GB",
            "--ram",
            "25%",
            "--ram",
            "1GiB",
        ),
        *("--compute", "50", "--predictor", "router", "--json"),
    )
    assert code == 0, err
    rows = json.loads(out)
    assert len(rows) == 2 * 2 * 4
    rate = {r["policy"]: r["hit_rate"] for r in rows if r["trace"] == str(TRACE) and r["ram"] == "25%"}
    assert rate["lru"] < rate["deltafin"] < rate["belady"]


@pytest.mark.parametrize(
    "arguments",
    [("--policy", "magic"), ("--predictor", "magic"), ("--ram", "x%"), ("--ram", "lots"), ("--drive", "0GB")],
)
def test_simulate_refuses_nonsense(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = deltafin(tmp_path, "simulate", str(TRACE), *arguments)
    assert code == 2
    assert "what to do" in err


def test_warm_has_nothing_to_do_on_a_complete_install(used: Path) -> None:
    for source in (("--heat",), ("--trace", str(used / "t"))):
        code, out, err = deltafin(used, "warm", *source)
        assert code == 0, err
        assert "nothing to fetch" in out
    assert deltafin(used, "warm")[0] == 2
    assert deltafin(used, "warm", "--trace", str(TRACE))[0] == 2


def test_hot_experts_are_held_twice(used: Path, tmp_path: Path) -> None:
    drives = [DriveSpec(tmp_path / name, 1.0) for name in ("a", "b")]
    for drive in drives:
        drive.path.mkdir()
    create_store(embedded_checkpoint(), drives, layout="striped", home=tmp_path / "home")
    store = ("--store", str(tmp_path / "home"))
    ask = ("run", *store, "--prompt", "The capital of France is", "--max-new", "8", "--draft", "off")
    code, plain, err = deltafin(used, *ask)
    assert code == 0, err
    code, out, err = deltafin(used, "drives", "replicate", *store, "--hot", "200")
    assert code == 0, err
    assert "200 experts lie on a second drive" in out
    code, again, err = deltafin(used, *ask, "--stats")
    assert (code, again) == (0, plain), err
    code, out, err = deltafin(used, "doctor", *store, "--json")
    assert code == 0, err
    assert any("200 experts" in finding["what"] for finding in json.loads(out))
    assert deltafin(used, "drives", "replicate", *store)[0] == 2
    assert deltafin(used, "drives", "replicate", *store, "--remove", "--hot", "3")[0] == 2
    assert deltafin(used, "drives", "replicate", *store, "--remove")[:2] == (0, "no replicas are left\n")


def test_bench_slice_refuses_politely_when_space_is_short(tmp_path: Path) -> None:
    code, _, err = deltafin(tmp_path, "bench", "slice", "--dir", str(tmp_path), "--layers", "93")
    assert code == 4
    assert "nothing was written" in err
    assert not list(tmp_path.glob("deltafin-bench*"))
