"""Conversations with a name, kept between runs of the command line: one small JSON file each."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deltafin.errors import UsageError
from deltafin.text.messages import Message, parse_messages

MAX_FILE_BYTES = 256 << 20
FOLDER = "sessions"


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    identity: str
    chat: bool
    messages: list[dict[str, Any]]
    replies: list[list[int] | None]
    ids: list[int]


class NamedSession:
    """A conversation on disk.

    Attributes:
        messages: of a chat, oldest first.
        replies: for each assistant message the ids K3 decided, or None when it did not end the message itself.
        ids: of a raw text, everything so far.
    """

    def __init__(self, home: Path, name: str, identity: str, *, chat: bool) -> None:
        """Opens the conversation ``name`` or begins it.

        Raises:
            UsageError: a name that is no file name; a file that is damaged, of another model or of the other kind.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
            raise UsageError(
                f"{name!r} cannot name a session", remedy="use up to 64 letters, digits, dots, dashes and underscores"
            )
        self._path = home / FOLDER / f"{name}.json"
        self._identity = identity
        self._chat = chat
        self.messages: list[Message] = []
        self.replies: list[list[int] | None] = []
        self.ids: list[int] = []
        with contextlib.suppress(FileNotFoundError):
            self._load(name)

    def _load(self, name: str) -> None:
        path = self._path
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("too large")
            saved = _Saved.model_validate_json(path.read_bytes())
            messages = parse_messages(saved.messages) if saved.messages else []
            if sum(m.role == "assistant" for m in messages) != len(saved.replies):
                raise ValueError("replies and messages differ")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, ValidationError) as e:
            raise UsageError(f"{path} cannot be used: {str(e).splitlines()[0]}", remedy="remove it") from None
        if saved.identity != self._identity:
            raise UsageError(f"session {name} belongs to another model", remedy="use another --session name")
        if saved.chat != self._chat:
            kind = "a chat" if saved.chat else "a raw text"
            raise UsageError(f"session {name} is {kind}", remedy="use --chat for chats only, or another --session name")
        self.messages, self.replies, self.ids = messages, saved.replies, saved.ids

    def save(self) -> None:
        """Writes the conversation atomically.

        Raises:
            UsageError: it cannot be written.
        """
        saved = _Saved(
            version=1,
            identity=self._identity,
            chat=self._chat,
            messages=[m.model_dump(exclude_none=True) for m in self.messages],
            replies=self.replies,
            ids=self.ids,
        )
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as f:
                json.dump(saved.model_dump(), f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, self._path)
        except OSError as e:
            raise UsageError(
                f"{self._path} cannot be written: {e.strerror}", remedy="free space or set K3_HOME"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
