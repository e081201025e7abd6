"""Named conversations: continued over runs, refused when they are not what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltafin.errors import UsageError
from deltafin.sessions.named import NamedSession
from deltafin.text.messages import parse_messages


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    session = NamedSession(tmp_path, "work.1", "model", chat=True)
    call = {"function": {"name": "f", "arguments": "{}"}}
    session.messages += parse_messages(
        [
            {"role": "user", "content": "a 👩‍👩‍👧"},
            {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": [call]},
        ]
    )
    session.replies.append([1, 2])
    session.save()
    again = NamedSession(tmp_path, "work.1", "model", chat=True)
    assert (again.messages, again.replies) == (session.messages, session.replies)
    path = tmp_path / "sessions/work.1.json"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="another model"):
        NamedSession(tmp_path, "work.1", "other", chat=True)
    with pytest.raises(UsageError, match="is a chat"):
        NamedSession(tmp_path, "work.1", "model", chat=False)
    for damage in ("", "{", "[]", json.dumps({"version": 2}), path.read_text().replace("[1, 2]", "null, null")):
        path.write_text(damage)
        with pytest.raises(UsageError, match="cannot be used"):
            NamedSession(tmp_path, "work.1", "model", chat=True)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a" * 65, "a\n", "ä"])
def test_names_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        NamedSession(tmp_path, name, "model", chat=True)


@pytest.mark.slow
def test_the_command_line_continues_where_it_was(tmp_path: Path) -> None:
    def run(*flags: str) -> tuple[str, list[dict[str, object]]]:
        events = tmp_path / "events.jsonl"
        command = [sys.executable, "-c", "from deltafin.cli import main; main()", "run", "--context", "1024"]
        environment = {**os.environ, "K3_HOME": str(tmp_path)}
        done = subprocess.run(
            [*command, "--max-new", "24", "--events-jsonl", str(events), *flags],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        return done.stdout, [json.loads(line) for line in events.read_text().splitlines()]

    chat = ["--chat", "--reasoning-effort", "none", "--session", "geo"]
    run(*chat, "--prompt", "What is the capital of France?")
    continued, events = run(*chat, "--prompt", "What is the capital of Peru?")
    assert int(str(events[0]["reused"])) > 30
    (tmp_path / "states").rename(tmp_path / "elsewhere")
    saved = json.loads((tmp_path / "sessions/geo.json").read_text())
    saved["messages"], saved["replies"] = saved["messages"][:2], saved["replies"][:1]
    (tmp_path / "sessions/geo.json").write_text(json.dumps(saved))
    cold, events = run(*chat, "--prompt", "What is the capital of Peru?")
    assert (cold, events[0]["reused"]) == (continued, 0)
