"""Finding, admitting and refusing drafts: automatic choices never fail, named drafts fail with their reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import MINI
from deltafin.checkpoint.config import K3Config
from deltafin.drafting.drafts import find
from deltafin.errors import CheckpointError, DeltafinError, DraftError, MemoryBudgetError
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.residency.budget import MIB, plan_memory

CONFIG = K3Config.load(MINI / "target")
BIG_SPINE = 100 << 30


def look(choice: Any, *folders: Path, raw: bool = False, spine: int = BIG_SPINE) -> tuple[str | None, str]:
    found, status = find(choice, folders, CONFIG, raw=raw, context=4096, spine_bytes=spine)
    return found and found.kind, status


def test_chats_and_raw_completions_get_the_draft_that_serves_them() -> None:
    pytest.importorskip("transformers")
    assert look("auto", MINI)[0] == "dspark"
    assert look("auto", MINI, raw=True)[0] == "qwen"
    assert look("dspark", MINI, raw=True)[0] == "dspark"
    assert look("qwen", MINI, raw=True)[0] == "qwen"
    assert look("off", MINI)[0] is None
    # A small model never earns back the import of the optional packages.
    assert look("auto", MINI, raw=True, spine=1 << 20)[0] == "dspark"


def test_without_the_optional_packages_raw_completions_use_dspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafin.drafting.drafts.find_spec", lambda _: None)
    assert look("auto", MINI, raw=True)[0] == "dspark"


def test_the_first_folder_wins(tmp_path: Path) -> None:
    shutil.copytree(MINI / "dspark", tmp_path / "dspark")
    assert str(tmp_path) in look("auto", tmp_path, MINI)[1]
    assert str(MINI) in look("auto", tmp_path / "absent", MINI)[1]


def test_a_missing_draft_is_an_error_only_for_who_named_it(tmp_path: Path) -> None:
    kind, status = look("auto", tmp_path)
    assert kind is None
    assert str(tmp_path) in status
    with pytest.raises(DraftError, match="no dspark draft"):
        look("dspark", tmp_path)
    with pytest.raises(DraftError, match="raw completions"):
        look("qwen", MINI)


@pytest.mark.parametrize("damage", ["config", "weights", "directory"])
def test_a_damaged_draft_is_an_error_only_for_who_named_it(damage: str, tmp_path: Path, mini_store: Path) -> None:
    shutil.copytree(MINI / "dspark", tmp_path / "dspark")
    if damage == "config":
        (tmp_path / "dspark/config.json").write_text("{")
    elif damage == "weights":
        (tmp_path / "dspark/model.safetensors").write_bytes(b"\xff" * 1000)
    else:
        (tmp_path / "dspark/model.safetensors").unlink()
        (tmp_path / "dspark/model.safetensors").mkdir()
    kind, status = look("auto", tmp_path)
    assert kind is None
    assert "dspark" in status
    with pytest.raises((DraftError, CheckpointError)):
        look("dspark", tmp_path)
    with Engine.open(mini_store, EngineOptions(context=256, draft_folders=(tmp_path,))) as engine:
        assert engine.session().drafter is None
        assert engine.draft_status == status


def test_a_draft_is_admitted_only_after_k3s_own_needs(mini_store: Path) -> None:
    def smallest(**how: Any) -> int:
        with pytest.raises(MemoryBudgetError) as refused:
            Engine.open(mini_store, EngineOptions(ram=1, context=256, **how))
        return int("".join(c for c in refused.value.remedy.split("MiB")[0] if c.isdigit()))

    need = smallest()
    assert smallest(draft_folders=(MINI,)) <= need + 2
    options = {"context": 256, "draft_folders": (MINI,)}
    with Engine.open(mini_store, EngineOptions(ram=(smallest() + 4) << 20, **options)) as engine:
        assert engine.drafts is None
        assert "dspark" in engine.draft_status
        assert engine.target.taps == ()
    with Engine.open(mini_store, EngineOptions(ram=4 << 30, **options)) as engine:
        assert engine.drafts is not None
        assert "head" in engine.plan.resident_units
        assert engine.plan.planned <= engine.plan.budget


def test_a_plan_pins_k3s_head_for_the_draft_and_stays_within_its_budget() -> None:
    units = {f"layer.{i}": 4 * MIB for i in range(9)} | {"embed": 3 * MIB, "head": 3 * MIB}
    streamed = False
    for budget in range(230, 330, 2):
        try:
            plan = plan_memory(
                CONFIG,
                units,
                budget=budget * MIB,
                runtime=200 * MIB,
                frame_bytes=32768,
                context=512,
                draft_bytes=9 * MIB,
                draft_row_bytes=2560,
                pinned=frozenset({"head"}),
            )
        except MemoryBudgetError:
            continue
        assert plan.planned <= plan.budget
        assert "head" in plan.resident_units
        assert plan.resident_bytes + plan.streamed_bytes == sum(units.values())
        streamed |= plan.streamed_bytes > 0
    assert streamed


def test_errors_name_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DeltafinError) as refused:
        look("dspark", tmp_path)
    assert "--draft-dir" in refused.value.remedy
