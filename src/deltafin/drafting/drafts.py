"""The draft of one engine: found on disk, weighed, loaded once, and handed to each session with its own context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from deltafin.checkpoint.config import K3Config
from deltafin.contract import BackendName, Native
from deltafin.drafting import dspark_files, qwen_files
from deltafin.drafting.controller import DraftController, DraftSource
from deltafin.drafting.economics import Economics, Experience
from deltafin.errors import DeltafinError, DraftError
from deltafin.text.tokenizer import K3Tokenizer

DraftChoice = Literal["auto", "off", "dspark", "qwen"]

CONTEXT_ROWS = 8192
"""Most context rows of a DSpark draft; later rows overwrite the oldest."""

MAX_WIDTH = dspark_files.BLOCK

_SOURCES: dict[tuple[BackendName, str], str] = {
    ("torch", "dspark"): "deltafin.drafting.dspark",
    ("torch", "qwen"): "deltafin.drafting.qwen",
    ("mlx", "dspark"): "deltafin.apple.dspark",
    ("mlx", "qwen"): "deltafin.apple.qwen",
}
# Only installs whose passes take seconds earn back what importing transformers costs.
_SMALL_SPINE = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft whose files look right and whose weights have not been read.

    Attributes:
        kind: ``dspark`` or ``qwen``.
        folder: of its files.
        nbytes: memory for weights and one context.
        row_bytes: memory for each row of a prefill chunk.
        taps: layers whose accumulators it needs.
        needs_head: whether K3's head must be resident.
    """

    kind: Literal["dspark", "qwen"]
    folder: Path
    nbytes: int
    row_bytes: int = 0
    taps: tuple[int, ...] = ()
    needs_head: bool = False


def find(
    choice: DraftChoice, folders: Sequence[Path], config: K3Config, *, raw: bool, context: int, spine_bytes: int
) -> tuple[Candidate | None, str]:
    """Looks for a draft's files in the subfolders ``dspark`` and ``qwen`` of ``folders``, in order.

    Args:
        choice: what the user wants.
        raw: sessions are raw completions; only these may use Qwen.
        context: positions of the memory plan.
        spine_bytes: size of K3's spine.

    Returns:
        (candidate or None, why there is none or which it is).

    Raises:
        DraftError: a draft named by the user is missing or damaged. ``auto`` never raises.
    """
    if choice == "off":
        return None, "switched off (--draft off)"
    if choice == "qwen" and not raw:
        raise DraftError("Qwen drafts only serve raw completions", remedy="use --draft dspark for chats")
    wanted = ["qwen", "dspark"] if choice == "auto" and raw else ["dspark" if choice == "auto" else choice]
    why = "no draft found in " + ", ".join(str(f) for f in folders) if folders else "no draft is installed"
    for kind in wanted:
        if choice == "auto" and kind == "qwen" and (spine_bytes < _SMALL_SPINE or not qwen_installed()):
            continue
        folder = next((f / kind for f in folders if qwen_files.model_folders(f / kind)), None)
        if folder is None:
            continue
        try:
            found = _dspark(folder, config, context) if kind == "dspark" else _qwen(folder)
        except (DeltafinError, OSError) as e:
            if choice != "auto":
                raise
            why = f"{kind}: {e.message if isinstance(e, DeltafinError) else e}"
            continue
        return found, f"{kind} from {folder}"
    if choice != "auto":
        where = " or ".join(str(f / choice) for f in folders) or "any folder"
        raise DraftError(
            f"no {choice} draft in {where}", remedy="name its parent folder with --draft-dir, or use --draft auto"
        )
    return None, why


def qwen_installed() -> bool:
    """Whether the optional packages for Qwen drafts are there; importing them takes seconds, looking does not."""
    return find_spec("transformers") is not None and find_spec("tokenizers") is not None


def _dspark(folder: Path, config: K3Config, context: int) -> Candidate:
    c = dspark_files.read_config(folder, config)
    dspark_files.check_files(folder, c)
    rows = min(context, CONTEXT_ROWS)
    row = 4 * c.num_hidden_layers * (c.kv_lora_rank + c.qk_rope_head_dim)
    taps = 2 * c.target_hidden_size * len(c.target_layer_ids)
    # Rows waiting to be projected, and their concatenation in fp32.
    waiting = 4 * dspark_files.PENDING_ROWS * taps
    return Candidate(
        "dspark",
        folder,
        dspark_files.memory_bytes(c) + rows * row + waiting,
        row_bytes=taps,
        taps=c.target_layer_ids,
        needs_head=True,
    )


def _qwen(folder: Path) -> Candidate:
    models = [qwen_files.check(f) for f in qwen_files.model_folders(folder)]
    return Candidate("qwen", folder, sum(qwen_files.memory_bytes(m) for m in models))


class Drafts:
    """A loaded draft and what is known about it.

    Args:
        kind: its name.
        source: makes a source for a new session.
        vocab_size: K3's.
        width: most proposals verified in a step.
        always: never judge whether drafting pays, for experiments.
    """

    def __init__(
        self, kind: str, source: Callable[[], DraftSource], *, vocab_size: int, width: int, always: bool = False
    ) -> None:
        self.kind = kind
        self.experience = Experience(width)
        self._source = source
        self._vocab_size = vocab_size
        self._always = always

    @classmethod
    def load(
        cls,
        found: Candidate,
        config: K3Config,
        backend: BackendName,
        *,
        metadata: Path,
        embed: Callable[[Sequence[int]], Native],
        lm_head: Native | None,
        context: int,
        width: int,
        always: bool = False,
    ) -> Drafts:
        """Reads the weights.

        Args:
            found: from ``find``.
            backend: whose arithmetic and arrays the draft uses; nothing of another one is imported.
            metadata: folder with K3's tokenizer files.
            embed: K3's embedding rows as activations, ids → native [n, hidden].
            lm_head: K3's head, native bf16 [vocab, hidden], when ``found`` needs it.
            context: positions of the memory plan.

        Raises:
            DraftError, TensorFileError: the files cannot be used.
        """
        # Imported only now: a draft brings its backend's framework along, and perhaps optional packages.
        try:
            module = import_module(_SOURCES[backend, found.kind])
        except ModuleNotFoundError as e:
            raise DraftError(
                f"a {found.kind} draft cannot be used with the {backend} backend here ({e})",
                remedy="install the missing package, or use --draft off",
            ) from None
        source: Callable[[], DraftSource]
        if found.kind == "dspark":
            assert lm_head is not None
            values = dspark_files.read_config(found.folder, config)
            source = module.dspark_source(found.folder, values, embed, lm_head, min(context, CONTEXT_ROWS))
        else:
            source = module.qwen_source(found.folder, K3Tokenizer.load(metadata, config))
        return cls(found.kind, source, vocab_size=config.vocab_size, width=width, always=always)

    def controller(self) -> DraftController:
        """Drafting for a new session."""
        economics = Economics(self.experience.max_width, always=self._always, experience=self.experience)
        return DraftController(self._source(), economics, vocab_size=self._vocab_size)
