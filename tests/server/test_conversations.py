"""Conversations through the server decide the tokens that a plain session decides, however their state came about."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.messages import AssistantMessage, parse_messages
from deltafin.text.reply import parse_reply
from serving import LONG, MODEL, Running, serving

QUESTIONS = [
    *("What is the capital of France?", "Define compass.", "What is the capital of Peru?", "Define anchor."),
    *("What is the capital of Japan?", "Define lantern.", "What is the capital of Chad?", "Define river."),
    *("What is the capital of Norway?", "Define candle."),
]


def say(server: Running, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 40, "reasoning_effort": "none", **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    out: dict[str, Any] = answer.json()
    return out


class Alone:
    """The same conversation with a session that computes every turn from nothing, as `deltafin run` would."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._known: list[tuple[dict[str, Any], list[int]]] = []

    def say(self, messages: list[dict[str, Any]], effort: str = "none") -> dict[str, Any]:
        server = self._server

        def recall(message: AssistantMessage, before: Any) -> list[int] | None:
            return next((ids for known, ids in self._known if parse_messages([known])[0] == message), None)

        prompt = encode_chat(server.tokenizer, parse_messages(messages), ChatOptions(effort=effort), recall=recall)
        events = server.engine.session().generate(prompt, max_new=40, stop=server.tokenizer.stop_ids)
        ids = [e.token for e in events if hasattr(e, "token")]
        reply = parse_reply(server.tokenizer, ids, thinking=effort != "none")
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.complete:
            self._known.append((message, ids))
        return message


def returned(answer: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message as a client sends it back."""
    message = answer["choices"][0]["message"]
    return {k: v for k, v in message.items() if v is not None}


@pytest.mark.parametrize("effort", ["none", "low"])
def test_ten_turns_an_edit_and_a_restart(mini_store: Path, tmp_path: Path, effort: str) -> None:
    messages: list[dict[str, Any]] = []
    lengths: list[int] = []
    with serving(mini_store, tmp_path, memo=False) as server:
        alone = Alone(server)
        for n, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            answer = say(server, messages, reasoning_effort=effort, stream=False)
            assert returned(answer) == alone.say(messages, effort), n
            usage = answer["usage"]
            if lengths:
                # Everything up to the last decided token of the turn before is known.
                assert usage["cached_tokens"] >= lengths[-1] - 1
            # A reply that was cut short is closed when it comes back, so only its prompt is sure to be the same.
            whole = answer["choices"][0]["finish_reason"] == "stop"
            lengths.append(usage["total_tokens"] if whole else usage["prompt_tokens"])
            messages.append(returned(answer))
        edited = [*messages[:10], {"role": "user", "content": "What is the capital of Italy?"}]
        answer = say(server, edited, reasoning_effort=effort)
        assert returned(answer) == alone.say(edited, effort)
        assert answer["usage"]["cached_tokens"] >= lengths[4] - 1
    with serving(mini_store, tmp_path, memo=False) as server:
        alone._server = server
        branch = [*messages[:14], {"role": "user", "content": "What is the capital of Spain?"}]
        further = [*messages, {"role": "user", "content": "What is the capital of Spain?"}]
        for conversation, length in ((further, lengths[9]), (branch, lengths[6])):
            answer = say(server, conversation, reasoning_effort=effort)
            assert returned(answer) == alone.say(conversation, effort)
            assert answer["usage"]["cached_tokens"] >= length - 1
    with serving(mini_store, tmp_path, memo=False, disk=0) as server:
        answer = say(server, further, reasoning_effort=effort)
        assert answer["usage"]["cached_tokens"] == 0


def test_a_reply_that_was_changed_is_read_as_it_is(mini_store: Path, tmp_path: Path) -> None:
    first = [{"role": "user", "content": QUESTIONS[0]}]
    with serving(mini_store, tmp_path, memo=False) as server:
        answer = say(server, first)
        changed = [*first, {"role": "assistant", "content": "Lyon."}, {"role": "user", "content": "Why?"}]
        got = say(server, changed)
        assert returned(got) == Alone(server).say(changed)
        # The user's own words were the same up to the reply.
        assert got["usage"]["cached_tokens"] == answer["usage"]["prompt_tokens"]


def started(home: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server as an operator starts it, and its address."""
    command = [sys.executable, "-c", "from deltafin.cli import main; main()", "serve", "--port", "0", *flags]
    environment = {**os.environ, "K3_HOME": str(home)}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None
    seen = []
    for line in child.stderr:
        seen.append(line)
        if "serving" in line and "http://" in line:
            return child, line.split("at ")[1].split("/v1")[0]
    raise AssertionError("".join(seen))


@pytest.mark.slow
def test_a_reply_cut_by_a_crash_goes_on(tmp_path: Path) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "reasoning_effort": "none"}
    body = {**asked, "response_format": LONG, "max_tokens": 300, "stream": True, "logprobs": True}
    key = {"Idempotency-Key": "order-66"}
    child, url = started(tmp_path, "--resume", "--context", "1024")
    try:
        received = ""
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=key, timeout=60) as answer:
            for line in answer.iter_lines():
                received += line + "\n"
                if received.count("data: ") > 20:
                    break
            child.send_signal(signal.SIGKILL)
            child.wait()
    finally:
        child.kill()
    child, url = started(tmp_path, "--resume", "--context", "1024")
    try:
        whole = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False}, headers=key, timeout=60).json()
        other = httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 3}, headers=key, timeout=60)
        assert other.status_code == 422
        figures = httpx.get(f"{url}/metrics").text
        again = httpx.post(
            f"{url}/v1/chat/completions", json={**body, "stream": False, "max_tokens": 299}, timeout=60
        ).json()
    finally:
        child.terminate()
        assert child.wait(20) is not None
    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in received.splitlines()
        if line.startswith("data: {")
    ]
    text = whole["choices"][0]["message"]["content"]
    assert text.startswith("".join(texts))
    assert whole["usage"]["completion_tokens"] == 300
    assert len(whole["choices"][0]["logprobs"]["content"]) == 300
    assert text.startswith(again["choices"][0]["message"]["content"])
    # The tokens that the first server had decided were prefilled, not decided again.
    reused = next(line for line in figures.splitlines() if line.startswith("deltafin_resumed_tokens"))
    assert 15 <= float(reused.split()[1]) < 300


@pytest.mark.slow
def test_the_command_line_and_the_server_agree_and_share_states(tmp_path: Path) -> None:
    question = "What is the capital of France?"
    command = [sys.executable, "-c", "from deltafin.cli import main; main()", "run", "--chat", "--prompt", question]
    environment = {**os.environ, "K3_HOME": str(tmp_path)}
    flags = ["--reasoning-effort", "none", "--max-new", "40"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment, check=True)
    child, url = started(tmp_path, "--context", "1024")
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "reasoning_effort": "none"}
        got = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        started_at = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.wait(20)
        assert time.monotonic() - started_at < 15
    finally:
        child.kill()
    assert got["choices"][0]["message"]["content"] == done.stdout.strip()
