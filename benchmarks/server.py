"""What the server adds: time to the first token of a second turn, and time per streamed token.

    python -m benchmarks.server

Every figure stands beside its reference from the same run, on the built-in miniature unless --store names an install:

* second turn, in RAM and after a restart, against a conversation of just the new tokens (at most 1.1 times);
* seconds per streamed token through HTTP against the same generation without a server (at most 1 ms more).

The arms alternate and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from deltafin import installs
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import TokenDecided
from deltafin.server.app import ServerOptions, create_app
from deltafin.server.listen import make_server
from deltafin.sessions.opening import open_sessions
from deltafin.settings import load_settings
from deltafin.text.tokenizer import K3Tokenizer

MODEL = "benchmark"


@contextmanager
def served(engine: Engine, tokenizer: K3Tokenizer, folder: Path) -> Iterator[str]:
    """A server without a memo on a free port."""
    session, turns = open_sessions(engine, folder, ram=1 << 30, disk=4 << 30)
    options = ServerOptions(model=MODEL, memo=False)
    server, bound = make_server(create_app(engine, tokenizer, session, turns, options), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        session.close()
        turns.close()


def first_token(client: httpx.Client, url: str, ids: list[int]) -> tuple[float, int]:
    """(seconds to the first text, cached tokens)."""
    body = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, cached = time.perf_counter(), 0.0, -1
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if not first and chunk["choices"]:
                first = time.perf_counter() - started
            if chunk["usage"]:
                cached = chunk["usage"]["cached_tokens"]
    return first, cached


def second_turns(engine: Engine, tokenizer: K3Tokenizer, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first token, by arm; every prompt is new, so nothing is found that should not be."""
    seconds: dict[str, list[float]] = {"only the new tokens": [], "second turn": [], "second turn after a restart": []}
    history_length, new = 400, 40
    cached: set[int] = set()
    histories = [[300 + (7 * n + i * i) % 5000 for i in range(history_length)] for n in range(2 * repeats)]

    def measure(client: httpx.Client, url: str, arm: str, n: int) -> None:
        tail = [301 + (11 * n + i) % 5000 for i in range(new)]
        arms = {arm: histories[n] + tail, "only the new tokens": tail}
        # Neither arm always comes first; before each a person reads, and the state before is written.
        for name in sorted(arms, reverse=bool(n % 2)):
            time.sleep(0.2)
            got, reused = first_token(client, url, arms[name])
            seconds[name].append(got)
            if name == arm:
                cached.add(reused)

    with served(engine, tokenizer, folder) as url, httpx.Client(timeout=600) as client:
        first_token(client, url, histories[0][:50])
        for n in range(repeats):
            first_token(client, url, histories[n])
            measure(client, url, "second turn", n)
        for n in range(repeats, 2 * repeats):
            first_token(client, url, histories[n])
    with served(engine, tokenizer, folder) as url, httpx.Client(timeout=600) as client:
        first_token(client, url, histories[0][:50])
        for n in range(repeats, 2 * repeats):
            measure(client, url, "second turn after a restart", n)
    assert cached == {history_length}, f"reused {cached} of {history_length} tokens"
    return seconds


def per_token(engine: Engine, tokenizer: K3Tokenizer, folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds per token between the first and the last one: (without a server, through HTTP)."""
    plain, through = [], []
    new = 120
    with served(engine, tokenizer, folder) as url, httpx.Client(timeout=600) as client:
        for n in range(repeats):
            prompt = [300 + (13 * n + i * i) % 5000 for i in range(30)]
            events = engine.session().generate(prompt, max_new=new, stop=tokenizer.stop_ids)
            times = [time.perf_counter() for event in events if isinstance(event, TokenDecided)]
            count = len(times)
            if count < 20:
                continue
            plain.append((times[-1] - times[0]) / (count - 1))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "stream": True}
            times = []
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])
                        times.append(time.perf_counter())
            # The last chunk only closes; text may arrive in fewer chunks than tokens, so the tokens are counted.
            through.append((times[-1] - times[0]) / (count - 1))
    return plain, through


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, help="folder of an install; the built-in miniature when absent")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--draft", choices=("auto", "off"), default="off")
    chosen = parser.parse_args()
    settings, _ = load_settings({"store": chosen.store})
    install = installs.resolve(settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.open(install.home, EngineOptions(context=2048, draft=chosen.draft)) as engine,
    ):
        tokenizer = K3Tokenizer.load(engine.store.metadata_dir, engine.config)
        seconds = second_turns(engine, tokenizer, Path(folder), chosen.repeats)
        reference = seconds.pop("only the new tokens")
        for name, of in (("median", statistics.median), ("best", min)):
            ceiling = of(reference)
            print(f"first token of a prompt of only the new tokens, {name}: {ceiling * 1e3:.1f} ms (the ceiling)")
            for arm, values in seconds.items():
                shown = f"{of(values) * 1e3:.1f} ms, {of(values) / ceiling:.2f} of the ceiling"
                print(f"  {arm}: {shown} (wanted: at most 1.10)")
        plain, through = per_token(engine, tokenizer, Path(folder) / "b", chosen.repeats)
        for name, of in (("median", statistics.median), ("best", min)):
            alone, through_ms = of(plain) * 1e3, of(through) * 1e3
            print(f"a token, {name}: {alone:.2f} ms without the server (the ceiling), {through_ms:.2f} ms through it")
            print(f"  {through_ms - alone:+.2f} ms (wanted: below +1)")


if __name__ == "__main__":
    main()
