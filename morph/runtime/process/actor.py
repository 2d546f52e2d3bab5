"""A worker as Ray starts it. A manager names this class without loading torch; only a worker loads torch."""

from __future__ import annotations

import gc
import logging
import os

from morph.link.home import Home

log = logging.getLogger(__name__)


class WorkerActor:
    """A worker as an actor of Ray, which takes one call for its whole life."""

    def serve_home(self, home: bytes) -> None:
        """Serve the current manager; ``home`` is a ``Home`` as JSON. Does not return: the process ends."""
        try:
            gc.disable()  # imported objects stay, and scanning them repeatedly takes a sixth of the time
            from morph.runtime.process.serving import serve
            from morph.runtime.process.worker import set_up

            gc.freeze()
            gc.enable()
            serve(Home.model_validate_json(home), set_up)
        except Exception:
            log.exception("the worker ends")
        finally:
            os._exit(1)
