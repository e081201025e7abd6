"""``deltafin demo``: real text from the built-in miniature, through the path that serves the full model."""

from __future__ import annotations

import sys
import time

from rich.console import Console

from deltafin import installs
from deltafin.cli import options, show
from deltafin.cli.run import Conversation
from deltafin.text.tokenizer import K3Tokenizer

_QUESTIONS = (
    ("none", "What is the capital of France?"),
    ("low", "Which country has the capital Ottawa?"),
    ("none", "How many feet are in a yard?"),
)
_RAW = ("Speculative decoding uses",)


def demo(
    backend: options.Backend = None,
    precision: options.Precision = None,
    ram: options.Ram = None,
    threads: options.Threads = None,
) -> None:
    """Show the engine at work on the built-in miniature K3: every routed expert is read from disk and checked."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    settings, _ = options.settings_from(backend=backend, precision=precision, ram=ram, threads=threads)
    with options.ingest_progress(console) as progress:
        install = installs.embedded(settings, progress)
    say = Console(highlight=False, soft_wrap=True)
    say.print("Deltafin demo: mini K3, a miniature with the complete Kimi K3 architecture in the released file format.")
    say.print(
        f"Its experts are striped over {installs.MINI_DRIVES} folders under {settings.home / 'mini-k3'} "
        "and streamed from there.\n"
    )
    with options.open_engine(settings, install, console) as engine:
        tokenizer = K3Tokenizer.load(engine.store.metadata_dir, engine.config)
        log = show.EventLog(None, tokenizer)
        started, tokens = time.perf_counter(), 0
        for effort, question in _QUESTIONS:
            say.print(
                f"> {question}" + (f"   (thinking effort {effort})" if effort != "none" else ""),
                style="bold",
                markup=False,
            )
            chosen = settings.model_copy(update={"reasoning_effort": effort, "max_new": 200})
            finished = Conversation(engine, tokenizer, chosen, console, log, chat=True).turn(question)
            tokens += finished.new_tokens
        for text in _RAW:
            say.print(f"> {text} …", style="bold", markup=False)
            chosen = settings.model_copy(update={"max_new": 32})
            finished = Conversation(engine, tokenizer, chosen, console, log, chat=False).turn(text)
            tokens += finished.new_tokens
        seconds = time.perf_counter() - started
        stats = engine.experts.stats
        sys.stdout.flush()
        say.print(
            f"\n{tokens} tokens in {seconds:.1f} s; {stats.reads:,} expert reads from disk "
            f"({show.gigabytes(stats.read_bytes)}, every one checked), {stats.tier_hits:,} uses from RAM."
        )
        say.print(
            "Ask it something: deltafin run --chat --reasoning-effort none --prompt 'What is the capital of Peru?'",
            markup=False,
        )
