"""A real server on a real socket, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from deltafin.generation.engine import Engine, EngineOptions
from deltafin.server.app import ServerOptions, create_app
from deltafin.server.listen import make_server
from deltafin.sessions.opening import open_sessions
from deltafin.sessions.reuse import ReusingSession
from deltafin.text.tokenizer import K3Tokenizer

MODEL = "deltafin-mini-k3"
LONG = {
    "type": "json_schema",
    "json_schema": {"name": "long", "schema": {"type": "array", "items": {"enum": [1]}, "minItems": 3000}},
}
"""A response format whose reply takes long."""


@dataclass
class Running:
    """A server: its address and what is behind it."""

    url: str
    engine: Engine
    session: ReusingSession
    tokenizer: K3Tokenizer
    api_key: str | None = None

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        given: dict[str, Any] = {"api_key": self.api_key or "none", "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A plain request."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def chat(self, text: str = "What is the capital of France?", **fields: Any) -> httpx.Response:
        """A plain chat of one message, thinking off."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "reasoning_effort": "none"}
        return self.post("/v1/chat/completions", {**body, **fields})

    def idle(self, within: float = 20.0) -> float:
        """Waits until nothing runs; seconds it took."""
        started = time.monotonic()
        while time.monotonic() < started + within:
            if not httpx.get(f"{self.url}/health", timeout=20).json()["busy"]:
                return time.monotonic() - started
            time.sleep(0.005)
        raise AssertionError("the server is still busy")


@contextmanager
def serving(home: Path, folder: Path, *, context: int = 4096, disk: int = 1 << 30, **options: Any) -> Iterator[Running]:
    """Serves the install at ``home``, keeping states in ``folder``."""
    with Engine.open(home, EngineOptions(context=context)) as engine:
        tokenizer = K3Tokenizer.load(engine.store.metadata_dir, engine.config)
        session, turns = open_sessions(engine, folder, ram=1 << 28, disk=disk)
        chosen = ServerOptions(**{"model": MODEL, **options})
        server, bound = make_server(create_app(engine, tokenizer, session, turns, chosen), "127.0.0.1", 0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", engine, session, tokenizer, chosen.api_key)
        finally:
            server.should_exit = True
            thread.join()
            session.close()
            turns.close()
