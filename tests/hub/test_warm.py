"""``deltafin warm`` on a streaming install: the experts of a recorded trace come ahead of their use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import deltafin
from deltafin.bench.hub import LocalHub
from hub.test_setup_cli import PROMPT, User


def test_warm_brings_what_a_trace_used(tmp_path: Path, served: LocalHub) -> None:
    elsewhere, trace = tmp_path / "elsewhere", tmp_path / "t.trace"
    code, expected, err = deltafin(elsewhere, *PROMPT, "--router-trace", str(trace))
    assert code == 0, err
    user = User(tmp_path, served)
    assert user.setup("--stream", "--no-draft")[0] == 0
    asked = len(user.hub.log)
    code, out, err = user("warm", "--trace", str(trace), "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["share_of_uses"] == pytest.approx(1.0)
    assert len(plan["experts"]) == plan["likely"] > 0
    code, out, err = user("warm", "--trace", str(trace), "--dry-run", "--most", str(plan["bytes"] // 2))
    assert code == 0, err
    assert f"plan: {len(plan['experts']) // 2:,} experts" in out
    assert len(user.hub.log) == asked, "a plan fetches nothing"
    code, out, err = user("warm", "--trace", str(trace))
    assert code == 0, err
    assert f"{len(plan['experts']):,} experts fetched" in out
    code, out, err = user(*PROMPT, "--offline")
    assert (code, out) == (0, expected), err
    code, out, err = user("warm", "--trace", str(trace), "--offline")
    assert code == 0, err
    assert "nothing to fetch" in out
