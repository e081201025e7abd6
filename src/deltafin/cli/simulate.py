"""``deltafin simulate``: recorded routes against imagined drives and memory, with the product's own policies."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from deltafin.errors import UsageError
from deltafin.history.trace import read_trace
from deltafin.residency.replay import POLICIES
from deltafin.residency.simulate import PREDICTORS, Machine
from deltafin.residency.simulate import simulate as replay

K3_EXPERT_BYTES = 17_547_264
# How a token's computing is divided where only its sum is given: before the router, beside the reads, in experts.
_BEFORE, _BESIDE, _EXPERTS = 0.5, 0.2, 0.3


def simulate(
    traces: Annotated[list[Path], typer.Argument(help="Files recorded with deltafin run --router-trace.")],
    drive: Annotated[
        list[str] | None, typer.Option(help="Read rate of a drive per second, e.g. 7GB. Once per drive. [default: 7GB]")
    ] = None,
    ram: Annotated[
        list[str] | None,
        typer.Option(help="Memory for experts: a size, or a share of all experts like 25%. Repeatable."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}. Repeatable. [default: all]")] = None,
    predictor: Annotated[str, typer.Option(help=f"What is read ahead: {', '.join(PREDICTORS)}.")] = "none",
    recall: Annotated[float, typer.Option(help="Recall of the router predictor.", min=0.0, max=1.0)] = 0.65,
    compute: Annotated[float, typer.Option(help="Milliseconds of computing per token.", min=0.0)] = 0.0,
    expert_bytes: Annotated[int, typer.Option(help="Bytes of one expert.", min=1, max=1 << 30)] = K3_EXPERT_BYTES,
    whole: Annotated[bool, typer.Option("--whole", help="Experts lie whole on one drive each, not split.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay router traces against any drives, memory, policy and predictor; Belady's optimum is the bound."""
    chosen = policy or list(POLICIES)
    for name in chosen:
        if name not in POLICIES:
            raise UsageError(f"{name!r} is not a policy", remedy=f"choose among {', '.join(POLICIES)}")
    if predictor not in PREDICTORS:
        raise UsageError(f"{predictor!r} is not a predictor", remedy=f"choose among {', '.join(PREDICTORS)}")
    rates = tuple(float(_size(text)) for text in drive or ["7GB"])
    if min(rates) <= 0:
        raise UsageError("a drive needs a rate above 0", remedy="write for example --drive 7GB")
    results = []
    for path in traces:
        trace = read_trace(path)
        shape, seconds = trace.shape, compute / 1e3
        machine = Machine(
            bytes_per_s=rates,
            expert_bytes=expert_bytes,
            before_seconds=_BEFORE * seconds / shape.layers,
            beside_seconds=_BESIDE * seconds / shape.layers,
            expert_seconds=_EXPERTS * seconds / shape.layers / shape.k,
            split=not whole,
        )
        for text in ram or ["10%", "25%", "50%"]:
            capacity = _capacity(text, shape.layers * shape.experts, expert_bytes)
            for name in chosen:
                outcome = replay(
                    trace.routes,
                    shape.experts,
                    machine,
                    capacity=capacity,
                    policy=name,
                    predictor=predictor,
                    recall=recall,
                )
                facts = {"trace": str(path), "ram": text, "experts": capacity, "policy": name}
                results.append(facts | asdict(outcome) | {"tokens_per_second": outcome.tokens_per_second})
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    table = Table("trace", "RAM", "experts", "policy", "hit rate", "tokens/s", "read", box=None, pad_edge=False)
    for r in results:
        table.add_row(
            Path(str(r["trace"])).name,
            str(r["ram"]),
            f"{r['experts']:,}",
            str(r["policy"]),
            f"{r['hit_rate']:.2%}",
            f"{r['tokens_per_second']:,.3f}",
            f"{float(str(r['read_bytes_per_token'])) / 1e9:,.2f} GB/token",
        )
    Console(highlight=False, soft_wrap=True).print(table)


def _capacity(text: str, total: int, expert_bytes: int) -> int:
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(f"{text!r} is not a share", remedy="write for example 25%")
        return int(share * total)
    return min(total, _size(text) // expert_bytes)


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise UsageError(f"{text!r} is not a size", remedy="write for example 7GB or 64GiB") from None
