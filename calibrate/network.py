"""Measure messages, all-reduces and a barrier between processes of this machine, with the workers' own channels."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.peer import PeerSpec
from calibrate.samples import timing
from morph.contract.errors import ClusterError, WaitTimeout
from morph.contract.profile import AllReduceTime, LinkProfile, SendTime, Timing

WAIT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True)
class NetworkMeasurement:
    """Between processes of one machine, over loopback."""

    link: LinkProfile
    all_reduce: tuple[AllReduceTime, ...]
    barrier: Timing


def measure_network(
    message_sizes: Sequence[int],
    reduced_sizes: Sequence[int],
    *,
    ring_sizes: Sequence[int],
    in_flight: Sequence[int],
    num_samples: int,
    element: str,
) -> NetworkMeasurement:
    """Start processes, let them measure, and end them, whatever happens.

    Args:
        message_sizes: Bytes of each message; both directions are measured.
        reduced_sizes: Bytes of each all-reduce.
        ring_sizes: D of each all-reduce, 2 or more.
        in_flight: How many all-reduces are under way at once.
        num_samples: Samples of everything.
        element: ``int64`` or ``float32``, what is summed.

    Raises:
        ClusterError: a process failed; gives the end of what it said.
        WaitTimeout: not done within ``WAIT_S``.
    """
    size = max(2, *ring_sizes)
    with tempfile.TemporaryDirectory(prefix="morph-calibrate-") as folder:
        specs = [
            PeerSpec(
                rank=rank,
                num_peers=size,
                folder=folder,
                message_sizes=list(message_sizes),
                reduced_sizes=list(reduced_sizes),
                ring_sizes=list(ring_sizes),
                in_flight=list(in_flight),
                num_samples=num_samples,
                element=element,
            )
            for rank in range(size)
        ]
        results = _run_peers(specs)
    return NetworkMeasurement(
        link=_link(results, message_sizes),
        all_reduce=_all_reduces(results, reduced_sizes, ring_sizes, in_flight),
        barrier=timing(_spans([result["barrier"] for result in results[:2]])),
    )


def _run_peers(specs: Sequence[PeerSpec]) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        peers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, peers)
        for spec in specs:
            said = stack.enter_context((Path(spec.folder) / f"{spec.rank}.log").open("wb"))
            # a session of its own: Ctrl-C comes to this process alone, which then ends the peers;
            # if this process is killed, their standard input closes and they end themselves
            peer = subprocess.Popen(
                [sys.executable, "-m", "calibrate.peer"],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            peers.append(peer)
            assert peer.stdin is not None
            peer.stdin.write(spec.to_line())
            peer.stdin.flush()
        _wait(peers, specs)
        return [json.loads(spec.result_path.read_text(encoding="utf-8")) for spec in specs]


def _wait(peers: Sequence[subprocess.Popen[bytes]], specs: Sequence[PeerSpec]) -> None:
    end_s = time.monotonic() + WAIT_S
    while True:
        codes = [peer.poll() for peer in peers]
        for code, spec in zip(codes, specs, strict=True):
            if code:
                raise ClusterError(f"measuring the network failed in process {spec.rank}: {_last_words(spec)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end_s:
            raise WaitTimeout(f"waited {WAIT_S:g} s for the processes that measure the network")
        time.sleep(_POLL_S)


def _last_words(spec: PeerSpec) -> str:
    said = (Path(spec.folder) / f"{spec.rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")


def _end(peers: Sequence[subprocess.Popen[bytes]]) -> None:
    for peer in peers:
        peer.kill()
    for peer in peers:
        peer.wait(timeout=10)
        if peer.stdin is not None:
            peer.stdin.close()


def _link(results: Sequence[dict[str, Any]], sizes: Sequence[int]) -> LinkProfile:
    def one_way(direction: str, sender: int) -> tuple[SendTime, ...]:
        begun, received = results[sender][direction], results[1 - sender][direction]
        return tuple(
            SendTime(
                size_bytes=size,
                time=timing(
                    [(end - start) / 1e9 for start, end in zip(begun[str(size)], received[str(size)], strict=True)]
                ),
            )
            for size in sizes
        )

    return LinkProfile(activation=one_way("activation", 0), gradient=one_way("gradient", 1))


def _all_reduces(
    results: Sequence[dict[str, Any]], sizes: Sequence[int], rings: Sequence[int], in_flight: Sequence[int]
) -> tuple[AllReduceTime, ...]:
    return tuple(
        AllReduceTime(
            ring_size=ring,
            size_bytes=size,
            in_flight=count,
            time=timing(_spans([result["all_reduce"][f"{ring}/{size}/{count}"] for result in results[:ring]])),
        )
        for ring in rings
        for size in sizes
        for count in in_flight
    )


def _spans(members: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """Seconds from the last member's start to the last member's end, for each sample of (start, end) in ns."""
    return [
        (max(end for _, end in sample) - max(start for start, _ in sample)) / 1e9
        for sample in zip(*members, strict=True)
    ]
