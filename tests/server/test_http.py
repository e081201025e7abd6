"""The wire: limits, guards, queues, clients that leave, and answers that stay quick while K3 works."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import LONG, MODEL, Running, serving

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "reasoning_effort": "none",
}


def slow(**fields: Any) -> dict[str, Any]:
    """A request whose reply takes long."""
    return {**CHAT, "response_format": LONG, "stream": True, **fields}


def raw(server: Running, data: bytes, *, wait: float = 10.0) -> bytes:
    """What the server answers to exactly these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(data)
        out = b""
        while True:
            try:
                part = connection.recv(65536)
            except (TimeoutError, ConnectionResetError):
                break
            if not part:
                break
            out += part
        return out


def request(server: Running, body: bytes, **headers: str) -> bytes:
    """A request as bytes; header names have underscores for dashes."""
    given = {"Host": "localhost", "Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode() + body


def figure(server: Running, name: str) -> float:
    """One of the server's own figures."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name)))


def test_hosts(server: Running) -> None:
    body = json.dumps({**CHAT, "temperature": 9}).encode()
    for good in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.1.7:80"):
        assert b" 400 " in raw(server, request(server, body, Host=good, Connection="close")).splitlines()[0]
    for bad in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil", "localhost:x"):
        assert b" 403 " in raw(server, request(server, body, Host=bad, Connection="close")).splitlines()[0]


def test_no_page_of_another_origin_gets_through(server: Running) -> None:
    preflight = httpx.options(f"{server.url}/v1/chat/completions", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        headers = {} if kind is None else {"Content-Type": kind}
        got = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
        assert got.status_code == 415


def test_errors_have_openais_shape(server: Running) -> None:
    for got in (
        httpx.get(f"{server.url}/nowhere"),
        httpx.get(f"{server.url}/v1/chat/completions"),
        httpx.post(f"{server.url}/v1/models", json={}),
        httpx.get(f"{server.url}/v1/models/other"),
        server.post("/v1/chat/completions", []),
        server.chat(temperature="hot"),
    ):
        assert 400 <= got.status_code < 500
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large_is_refused_while_it_arrives(mini_store: Path, tmp_path: Path) -> None:
    limit = 1 << 20
    with serving(mini_store, tmp_path, max_request_bytes=limit) as server:
        pad = "x" * (limit - len(json.dumps(CHAT)) - len(', "user": ""'))
        fits = json.dumps({**CHAT, "user": pad})
        assert len(fits) == limit
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{server.url}/v1/chat/completions", content=fits, headers=headers).status_code == 200
        over = httpx.post(f"{server.url}/v1/chat/completions", content=fits + " ", headers=headers)
        assert over.status_code == 413
        assert over.json()["error"]["code"] == "request_too_large"

        sent = 0

        def endless() -> Iterator[bytes]:
            nonlocal sent
            while sent < 100 * limit:
                sent += 1 << 16
                yield b" " * (1 << 16)

        try:
            got = httpx.post(f"{server.url}/v1/chat/completions", content=endless(), headers=headers)
            assert got.status_code == 413
        except httpx.TransportError:
            pass  # the connection closed before the client had stopped sending
        assert sent < 10 * limit
        # A declared length is enough: nothing needs to be sent.
        head = request(server, b"", Content_Length=str(limit + 1))
        assert b" 413 " in raw(server, head, wait=5).splitlines()[0]
        assert server.chat().status_code == 200


def test_the_default_limit_is_128_mib(server: Running) -> None:
    head = request(server, b"", Content_Length=str((128 << 20) + 1))
    assert b" 413 " in raw(server, head, wait=5).splitlines()[0]


def test_slow_bodies_time_out(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, patience=0.5) as server:
        assert b" 408 " in raw(server, request(server, b"{", Content_Length="1000")).splitlines()[0]
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as drip:
            drip.sendall(request(server, b"", Content_Length="1000"))
            started = time.monotonic()
            answer = b""
            drip.settimeout(0.2)
            while not answer and time.monotonic() - started < 8:
                drip.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    answer = drip.recv(1000)
            assert b" 408 " in answer


def test_keys(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, api_key="sesame") as server:
        for headers in (
            {},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "Basic sesame"},
            {"Authorization": ""},
        ):
            got = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.client().models.retrieve(MODEL).id == MODEL


def test_pages_may_call_only_when_asked_for(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, origins=("http://page.example",), hosts=("k3.example",)) as server:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for origin, allowed in (("http://page.example", True), ("http://evil.example", False)):
            got = httpx.options(f"{server.url}/v1/chat/completions", headers={"Origin": origin, **asked})
            assert (got.headers.get("access-control-allow-origin") == origin) == allowed
        assert httpx.get(f"{server.url}/health", headers={"Host": "k3.example:8000"}).status_code == 200


def test_one_at_a_time(server: Running) -> None:
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=slow(), timeout=60) as first:
        lines = first.iter_lines()
        next(lines)
        busy = server.chat("Define compass.")
        assert busy.status_code == 429
        assert int(busy.headers["retry-after"]) >= 1
        assert busy.json()["error"]["type"] == "rate_limit_error"
        # What is wrong is said at once, busy or not.
        assert server.chat(temperature=5).status_code == 400
    server.idle(5)


def test_other_endpoints_answer_while_k3_works(server: Running) -> None:
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=slow(), timeout=60) as first:
        kept = first.iter_lines()  # dropping it would close the connection
        next(kept)
        with httpx.Client() as client:
            client.get(f"{server.url}/health")
            seconds = []
            for path in ("/health", "/v1/models", "/metrics", "/openapi.json") * 5:
                started = time.monotonic()
                assert client.get(f"{server.url}{path}").status_code == 200
                seconds.append(time.monotonic() - started)
            assert client.get(f"{server.url}/health").json()["busy"]
    print(f"median {statistics.median(seconds):.4f} s, slowest {max(seconds):.4f} s")
    server.idle(5)


def test_a_client_that_leaves_frees_k3(server: Running) -> None:
    rng = random.Random(5)
    for n in range(6):
        fields = slow(user=str(n), stream=n % 2 == 0, messages=[{"role": "user", "content": f"Number {n}?"}])
        connection = socket.create_connection(tuple(server.url.removeprefix("http://").split(":")), timeout=10)  # type: ignore[arg-type]
        connection.sendall(request(server, json.dumps(fields).encode()))
        time.sleep(rng.uniform(0.0, 0.5))
        connection.close()
        server.idle(10)
    assert server.chat().status_code == 200


def test_what_a_leaving_client_had_computed_is_kept(server: Running) -> None:
    text = "Kept " * 60
    fields = slow(messages=[{"role": "user", "content": text}])
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=fields, timeout=60) as first:
        for line in first.iter_lines():
            if '"content": "["' in line or '"content": "[' in line:
                break
    server.idle(10)
    again = server.chat(text, response_format=LONG, max_tokens=3).json()
    assert again["usage"]["cached_tokens"] == again["usage"]["prompt_tokens"]


def test_the_same_request_attaches(server: Running) -> None:
    before = figure(server, "deltafin_attached")
    fields = slow(max_tokens=60, messages=[{"role": "user", "content": "Twice?"}])
    with ThreadPoolExecutor(4) as pool:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=fields, timeout=60) as first:
            lines = first.iter_lines()
            next(lines)
            others = [pool.submit(server.post, "/v1/chat/completions", {**fields, "stream": s}) for s in (False, True)]
            time.sleep(0.3)
            # The first follower leaves; the generation goes on for the others.
        whole, streamed = (future.result() for future in others)
    assert whole.status_code == streamed.status_code == 200
    content = whole.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == content
    assert figure(server, "deltafin_attached") == before + 2


def test_identical_requests_are_answered_from_the_memo(server: Running) -> None:
    first, second = server.chat("Define anchor."), server.chat("Define anchor.", temperature=1, user="other")
    one, two = first.json(), second.json()
    assert one["choices"] == two["choices"]
    assert one["usage"] == two["usage"]
    assert one["id"] != two["id"]


def test_without_memo_the_answer_is_the_same(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, memo=False) as server:
        one, two = server.chat().json(), server.chat().json()
        assert one["choices"] == two["choices"]
        assert (one["usage"]["cached_tokens"], two["usage"]["cached_tokens"]) == (0, two["usage"]["prompt_tokens"])


def test_fifty_clients(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, queue=50, memo=False) as server:
        texts = [f"What is the capital of {c}?" for c in ("France", "Peru", "Japan", "Norway", "Chad")] * 10
        with ThreadPoolExecutor(50) as pool:
            got = list(pool.map(lambda text: server.chat(text, max_tokens=6), texts))
        assert [g.status_code for g in got] == [200] * 50
        said = [g.json()["choices"][0]["message"]["content"] for g in got]
        assert said == said[:5] * 10


def test_the_queue_tells_its_position(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, queue=1) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=slow(), timeout=60) as first:
            kept = first.iter_lines()  # dropping it would close the connection
            next(kept)
            options = {"stream": True, "stream_options": {"include_progress": True, "include_usage": True}}
            waiting = {**CHAT, "messages": [{"role": "user", "content": "Second? " * 300}], "max_tokens": 3, **options}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=waiting, timeout=60) as second:
                lines = second.iter_lines()
                position = json.loads(next(line for line in lines if "queue_position" in line)[6:])
                assert position["progress"]["queue_position"] == 1
                assert server.chat("Third?").status_code == 429
                first.close()
                rest = [line for line in lines if line]
        chunks = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        shares = [c["progress"]["prefill"]["share"] for c in chunks if c.get("progress") and c["progress"]["prefill"]]
        assert shares == sorted(shares)
        assert shares
        assert rest[-1] == "data: [DONE]"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_silence_is_filled_from_the_first_second(mini_store: Path, tmp_path: Path) -> None:
    with serving(mini_store, tmp_path, queue=1) as server:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=slow(), timeout=60) as first:
            kept = first.iter_lines()  # dropping it would close the connection
            next(kept)
            started = time.monotonic()
            waiting = {**CHAT, "messages": [{"role": "user", "content": "Second?"}], "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=waiting, timeout=60) as second:
                for line in second.iter_lines():
                    if line.startswith(":"):
                        break
                else:
                    pytest.fail("no sign of life")
                print(f"sign of life after {time.monotonic() - started:.2f} s")


def test_an_error_in_mid_stream(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltafin.errors import SliceCorruptError

    target, calls = server.engine.target, 0
    forward = target.forward

    def fails(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise SliceCorruptError("drive /secret/path: layer 3 expert 5 is damaged", remedy="deltafin store repair")
        return forward(*args, **how)

    monkeypatch.setattr(target, "forward", fails)
    got = server.chat("Broken?", stream=True)
    lines = [line for line in got.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2][6:])["error"]
    assert error["type"] == "server_error"
    assert "/secret" not in got.text
    calls = 0
    whole = server.chat("Broken again?")
    assert whole.status_code == 503
    monkeypatch.undo()
    assert server.chat("Broken?").status_code == 200


def test_nothing_of_a_request_is_logged(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*args: Any, **how: Any) -> Any:
        raise RuntimeError("SECRET-TEXT")

    monkeypatch.setattr(server.engine.target, "run", defect)
    got = server.chat("SECRET-TEXT please")
    assert got.status_code == 500
    assert "SECRET-TEXT" not in caplog.text + got.text
    assert caplog.text


def test_streams_survive_any_split(server: Running) -> None:
    """The stream is the same however the network cuts it, also in the middle of characters and of line ends."""
    body = {**CHAT, "stream": True, "max_tokens": 12, "stream_options": {"include_usage": True}}
    data = httpx.post(f"{server.url}/v1/chat/completions", json=body).content
    assert data.isascii()  # so no cut can fall inside a character, and no line separator of Unicode ends a line
    from openai._streaming import SSEDecoder

    rng = random.Random(1)
    wanted = [e.data for e in SSEDecoder().iter_bytes(iter([data]))]
    for _ in range(30):
        cuts = sorted(rng.sample(range(1, len(data)), 20))
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert [e.data for e in SSEDecoder().iter_bytes(iter(parts))] == wanted
