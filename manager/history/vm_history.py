"""Adds one run's lives to the user's history of VMs, and reads it. Failures are reported once; the run continues."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from manager.controller.state.config import ExpectedLosses
from manager.controller.state.events import NodeFacts
from manager.history.database import HistoryError, history_path, keep_lives, kept_lives
from manager.history.estimate import estimate
from manager.journal.journal import Journal
from manager.report.journal_reader import lives_in
from manager.run_dir import JOURNAL
from morph.contract.errors import RunDirError


class VmHistory:
    """The connection of a run to the history. ``tell`` gets each sentence on why that cannot be used, once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def take_in(self, run_dir: Path) -> None:
        """Store the lives of the run's VMs so far; repeating it changes nothing. Does nothing if the run has not begun.

        The journal's first line identifies a run, wherever its directory is moved.
        """
        path = run_dir / JOURNAL
        if not path.is_file():
            return
        try:
            with Journal.open(path, read_only=True) as journal:
                line, lives = journal.first_line(), lives_in(journal)
            if line is not None:
                first = f"{line.time_s!r} {line.payload_json}"
                keep_lives(history_path(), hashlib.sha256(first.encode()).hexdigest()[:16], lives)
        except (HistoryError, RunDirError) as error:
            self._say(f"the lives of this run's VMs are not stored: {error}")
        except ValidationError:
            self._say(f"the lives of this run's VMs are not stored: {path} was written by another version of Morph")

    def expected(self, facts: NodeFacts) -> ExpectedLosses:
        """Return the expected losses of VMs of this kind, as far as the run knows the kind in advance."""
        try:
            return estimate(kept_lives(history_path(), {"provider": facts.provider}), facts).expected
        except HistoryError as error:
            self._say(f"the lives of VMs of earlier runs are not known: {error}")
            return ExpectedLosses()

    def _say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)
