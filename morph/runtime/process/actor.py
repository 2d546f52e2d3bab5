"""A worker as Ray starts it. A manager names this class, and need not load torch for it: a worker does."""

from __future__ import annotations

import gc
import logging
import os

from morph.link.home import Home

log = logging.getLogger(__name__)


class WorkerActor:
    """A worker as an actor of Ray, which takes one call for its whole life."""

    def serve_home(self, home: bytes) -> None:
        """Serve the manager that is there; ``home`` is a ``Home`` as JSON. Does not return: the process ends."""
        try:
            gc.disable()  # what is imported stays: to look through it again and again takes a sixth of that time
            from morph.runtime.process.serving import serve
            from morph.runtime.process.worker import set_up

            gc.freeze()
            gc.enable()
            serve(Home.model_validate_json(home), set_up)
        except Exception:
            log.exception("the worker ends")
        finally:
            os._exit(1)
