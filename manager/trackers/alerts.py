"""Alerts for a run that needs attention: ``notify`` of the job file, by a webhook, a command, or both.

A separate process reads the journal and sends one alert at a time, so training never waits for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from manager.host.plain_http import HttpFailed, fetch
from manager.host.signals import BY_USER
from manager.run_dir import resuming
from manager.trackers.sinks import Noted, Sink, Told
from morph.contract.cluster import Notify
from morph.contract.errors import ConfigError
from morph.contract.happenings import Happening, RunEnded, StepDone, Trouble
from morph.words import counted

AlertKind = Literal[
    "training_stopped",
    "training_goes_on",
    "ended",
    "manager_gone",
    "budget",
    "setup_failed",
    "bad_step",
    "not_saved",
]
HTTP_S, COMMAND_S = 5.0, 15.0
TRY_AFTER_S = (0.0, 1.0, 2.0)
AGAIN_S = 3600.0
"""Seconds. A failed setup, bad step or failed save is reported at most once in this time; older trouble, never."""
AT_MOST = 20
"""The largest number of alerts in ``AGAIN_S``."""


class Alerts(Sink):
    """Reports trouble. ``RUN_DIR/trackers/notify.json`` keeps what has been reported.

    ``notify``: where and when to send alerts. ``budget_usd``: the limit of the run's cost; None: no limit. ``say``:
    reports a failed alert to the manager, without secrets. ``clock``: returns seconds since 1970. ``forever``: if the
    manager ends, another one takes its place, unless the user or a limit ended the run.
    """

    def __init__(
        self,
        run_dir: Path,
        job: str,
        notify: Notify,
        budget_usd: float | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        *,
        forever: bool = False,
    ) -> None:
        self._run_dir, self._job, self._notify, self._budget_usd = run_dir, job, notify, budget_usd
        self._say, self._clock, self._forever = say, clock, forever
        self._noted = Noted(run_dir, "notify")
        self._sequence = self._step = 0
        self._opened_s = self._trained_s = clock()
        self._stopped = self._over = False

    def open(self) -> Told:
        self._stopped = bool(self._noted.known.get("stopped"))
        return Told()

    def begin(self, sequence: int) -> bool:
        """Return whether this line of the journal has not been reported yet."""
        self._sequence = sequence
        return sequence > int(self._noted.known.get("sequence", 0))

    def tell(self, happening: Happening) -> None:
        is_new = happening.time_s > self._opened_s - AGAIN_S
        self._step = happening.step
        if isinstance(happening, StepDone):
            self._over, self._trained_s = False, max(self._trained_s, happening.time_s)
            if self._stopped and is_new:
                sentence = f"{counted(happening.step, 'step')} done: training goes on"
                self._alert("training_goes_on", sentence, stopped=False, down=False)
            self._stopped = False
            self._look_at_budget(happening)
        elif isinstance(happening, Trouble) and is_new:
            if not (self._is_down and happening.kind == "setup_failed"):  # that was reported, and continues
                self._alert(happening.kind, happening.sentence)
        elif isinstance(happening, RunEnded):
            self._ended(happening, is_new=is_new)

    def flush(self) -> None:
        """See ``Sink.flush``; also report if no step was decided for too long."""
        passed_min = (self._clock() - self._trained_s) / 60
        if not self._over and not self._stopped and passed_min >= self._notify.stopped_min:
            self._stopped = True
            self._alert("training_stopped", f"no step was decided for {passed_min:.0f} minutes", stopped=True)

    def _ended(self, end: RunEnded, *, is_new: bool) -> None:
        """Report the end. If the run retries by itself, only the first of its failures in a row is reported."""
        by_user = end.outcome == "finished" or end.sentence.startswith(BY_USER)
        again = end.rests or (self._forever and not by_user and not end.at_limit)
        self._over, self._stopped = not end.rests, self._stopped or again
        if is_new and not again:
            self._alert("ended", f"the run has {end.outcome}: {end.sentence}", stopped=False, down=False)
        elif is_new and not self._is_down:
            sentence = f"the run has {end.outcome}: {end.sentence}; it tries again by itself"
            self._alert("ended", sentence, stopped=True, down=True)

    @property
    def _is_down(self) -> bool:
        """Whether it was reported that the run has ended and will retry."""
        return bool(self._noted.known.get("down"))

    def manager_gone(self) -> None:
        """React to a manager that is gone without an end of the run in the journal."""
        if self._over:
            return
        if not self._forever:
            self._alert("manager_gone", f"the run's manager is gone; to go on: {resuming(self._run_dir)}")
        elif not self._is_down:
            self._stopped = True
            sentence = "the run's manager is gone; another one will continue the run (--forever)"
            self._alert("manager_gone", sentence, stopped=True, down=True)

    def _look_at_budget(self, step: StepDone) -> None:
        most, share = self._budget_usd, self._notify.budget_share
        if most is None or step.dollars is None or step.dollars < share * most or "budget" in self._noted.known:
            return
        self._alert("budget", f"{step.dollars:.2f} of {most:g} dollars are spent (vms.limits.budget_usd)", budget=True)

    def _alert(self, kind: AlertKind, sentence: str, **noted: object) -> None:
        """Send an alert once (it is stored first), unless the same alert or too many alerts were sent lately."""
        now_s = self._clock()
        sent = [(name, at_s) for name, at_s in self._noted.known.get("told", []) if now_s - at_s < AGAIN_S]
        repeats = any(name == kind for name, _ in sent) and kind in ("setup_failed", "bad_step", "not_saved")
        quiet = repeats or len(sent) >= AT_MOST
        if not quiet:
            sent.append((kind, now_s))
        self._noted.note(sequence=self._sequence, told=sent, **noted)
        if not quiet:
            self._deliver(self.payload(kind, sentence, now_s))

    def payload(self, kind: AlertKind, sentence: str, now_s: float) -> dict[str, object]:
        """Return the JSON for webhook and command. ``text`` has the whole alert in one sentence, for chat services."""
        return {
            "schema_version": 1,
            "kind": kind,
            "job": self._job,
            "run_dir": str(self._run_dir),
            "host": socket.gethostname(),
            "step": self._step,
            "time": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
            "sentence": sentence,
            "text": f"{self._job} ({self._run_dir}): {sentence}",
        }

    def _deliver(self, payload: Mapping[str, object]) -> None:
        content = json.dumps(payload).encode()
        if self._notify.webhook is not None:
            wrong = _post(_url_of(self._notify.webhook, os.environ), content)
            if wrong:
                self._say(f"an alert ({payload['kind']}) did not reach the webhook: {wrong}")
        if self._notify.command:
            wrong = _run(self._notify.command, content)
            if wrong:
                self._say(f"an alert ({payload['kind']}): {self._notify.command[0]} {wrong}")


def _post(url: str, content: bytes) -> str:
    """Post an alert, and retry if that may help; return the error, if any, without the URL, which is secret."""
    wrong = ""
    for pause_s in TRY_AFTER_S:
        time.sleep(pause_s)
        try:
            headers = {"Content-Type": "application/json"}
            status = fetch(url, timeout_s=HTTP_S, method="POST", headers=headers, body=content, by_proxy=True).status
        except HttpFailed as error:
            cause = error.__cause__
            wrong = str(error) if cause is None else type(cause).__name__
            wrong = f"no answer within {HTTP_S:g} s" if isinstance(cause, TimeoutError) else wrong
            continue
        if status < 300:
            return ""
        wrong = f"its answer is {status}"
        if status < 500 and status != 429:
            break
    return wrong


def _run(command: tuple[str, ...], content: bytes) -> str:
    """Run the command and return its error, if any; then end all processes that the command has started."""
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
        ) as process:
            try:
                process.communicate(content, timeout=COMMAND_S)
            except subprocess.TimeoutExpired:
                return f"took more than {COMMAND_S:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    return "" if process.returncode == 0 else f"ended with code {process.returncode}"


def webhook_variables(notify: Notify) -> dict[str, str]:
    """Return the environment variable of the webhook, which the process of alerts gets."""
    name = (notify.webhook or "").removeprefix("$")
    return {name: os.environ[name]} if (notify.webhook or "").startswith("$") else {}


def _url_of(webhook: str, environment: Mapping[str, str]) -> str:
    return environment.get(webhook[1:], "") if webhook.startswith("$") else webhook


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a wrong port, or unpaired brackets
        return False


def check_notify(notify: Notify, source: str) -> None:
    """Check that alerts can be sent.

    ConfigError: the webhook (which the error does not show) is not a URL, its variable is not set, or there is no such
    program.
    """
    if notify.webhook is not None:
        if notify.webhook.startswith("$") and notify.webhook[1:] not in os.environ:
            raise ConfigError(
                "is not set in this environment", source=source, field="notify.webhook", value=notify.webhook
            )
        if not _is_url(_url_of(notify.webhook, os.environ)):
            raise ConfigError("is not a URL", source=source, field="notify.webhook", allowed="https://... or $NAME")
    if notify.command and shutil.which(notify.command[0]) is None:
        raise ConfigError(
            "there is no such program", source=source, field="notify.command", value=notify.command[0], allowed="a path"
        )
