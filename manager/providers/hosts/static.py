"""Provides the user's own hosts: leases them by name, starts their nodes over ssh, gives them back."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count as numbers
from pathlib import Path
from typing import Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from manager.providers.hosts.ssh import SshHost, Unanswered, end_script, log_script, run_ssh, start_script
from manager.providers.interface.cloud import outcome
from manager.providers.interface.provider import (
    BOOT_LOG_CHARACTERS,
    Capabilities,
    CapacityShort,
    Misconfigured,
    Price,
    ProviderError,
    Transient,
    Vm,
    not_ended,
    vm_name,
)
from morph.contract.base import Value
from morph.contract.cluster import UsdPerHour
from morph.contract.errors import WaitTimeout
from morph.contract.files import PRIVATE, write_whole
from morph.file_lock import locked

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 30.0
"""Seconds until a refused request may be repeated: shorter than for clouds, because checking hosts is cheap."""
LOCK_S = 60.0
"""Seconds for which other runs may hold the leases' file, which takes each a moment."""
MAX_AT_ONCE = 32
"""Number of hosts whose nodes are ended at the same time."""


class Hosts(Value):
    """The content of a file of hosts."""

    hosts: tuple[SshHost, ...] = Field(min_length=1)
    usd_per_h: UsdPerHour | None = Field(default=None, description="price of each host without its own")
    leases: str = Field(
        default="leases.json",
        min_length=1,
        description="the leases of hosts; runs that share hosts share this file",
    )

    @property
    def dearest_usd_per_h(self) -> float | None:
        """Dollars an hour of the most expensive host; None if some host has no price."""
        figures = [self.usd_per_h if host.usd_per_h is None else host.usd_per_h for host in self.hosts]
        known = [figure for figure in figures if figure is not None]
        return max(known) if len(known) == len(figures) else None

    def usd_per_gpu_h(self, host: SshHost) -> float | None:
        """Return the dollars an hour of one of a host's devices; None: not known."""
        usd_per_h = self.usd_per_h if host.usd_per_h is None else host.usd_per_h
        return None if usd_per_h is None else usd_per_h / host.num_devices

    def at(self, usd_per_h: float) -> Self:
        """Return the same hosts, each at this price."""
        hosts = tuple(host.model_copy(update={"usd_per_h": None}) for host in self.hosts)
        return self.model_copy(update={"hosts": hosts, "usd_per_h": usd_per_h})

    @model_validator(mode="after")
    def _types_of_all(self) -> Self:
        if len({host.node_type is None for host in self.hosts}) > 1:
            raise ValueError("hosts: some have a node_type, others do not")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        addresses = [(host.address, host.port) for host in self.hosts]
        if len(set(addresses)) < len(addresses):
            raise ValueError("hosts: one is listed twice")
        return self


class StaticSpec(Hosts):
    """Hosts, and the command that is started on each."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="runs the node; {node} is replaced by its name, {address} by the host's node_address, {devices} by "
        "its num_gpus",
    )


class Lease(Value):
    """The lease of a host by a run. Its price is not stored, because the file of hosts has it."""

    run: str
    job: str = Field(default="", description="empty: a lease without a job's name")
    vm: Vm


_LEASES: TypeAdapter[dict[str, Lease]] = TypeAdapter(dict[str, Lease])


class StaticProvider:
    """Leases hosts for ``run``, in a file that several runs can share; it is locked while it is changed.

    ``secret``: given to a node on its standard input; ``shell``: runs a line on a host, as ``run_ssh`` does.
    """

    def __init__(
        self,
        spec: StaticSpec,
        run: str,
        leases_path: Path,
        secret: str = "",
        shell: Callable[..., str | None] | None = None,
        *,
        ending: str = "",
        job: str = "",
    ) -> None:
        self._spec = spec
        self._run = run
        self._job = job
        self._path = leases_path
        self._secret = secret
        self._shell = shell or run_ssh
        self._ending = ending
        self._stopped = threading.Event()
        self._passed_over: dict[str, str] = {}
        self._hosts = {f"{host.address}:{host.port}": host for host in spec.hosts}

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """See ``Provider``. A host whose node does not start is given back; one that did not answer may stay leased."""
        most = count if max_vms is None else max_vms
        leased = {key: vm for key, vm in self._ours().items() if vm.request == request}
        granted: list[Vm] = []
        trouble = ""
        wrong: Transient | Misconfigured | None = None
        for key, vm in leased.items():  # leased by an earlier manager; starting its node again changes nothing
            try:
                self._start(key, vm)
            except (Transient, Misconfigured) as error:  # leased until it is ended, as one that nobody waits for
                wrong = error
                self._pass_over(key, error)
                continue
            granted.append(vm)
        others = {key for key, host in self._hosts.items() if node_type not in ("", host.node_type)}
        tried, tried_names = others.copy(), set[str]()
        while len(granted) < most and not leased and not self._stopped.is_set():
            missing = count - sum(vm.num_devices for vm in granted)
            names = tried_names.union(vm.name for vm in granted)
            taken = self._lease(request, names, missing, tried) if missing > 0 else None
            if taken is None:
                break
            key, vm = taken
            tried.add(key)
            try:
                self._start(key, vm)
            except Transient as error:
                trouble = str(error)
                self._pass_over(key, error)
                if not self._ended(key, vm):
                    tried_names.add(vm.name)  # the node may run there: no other one gets its name
                    if isinstance(error, Unanswered):
                        continue  # leased until it is ended, as one that nobody waits for
                self._give_back(key, vm)
                continue
            except Misconfigured as error:  # an error of this host: others may work
                wrong = wrong or error
                self._pass_over(key, error)
                self._give_back(key, vm)
                continue
            granted.append(vm)
        if not granted and wrong is not None and (leased or tried == self._hosts.keys()):
            raise wrong  # no other host can come free
        if sum(vm.num_devices for vm in granted) >= count or len(granted) >= most:
            return tuple(granted)
        of_type = f"{len(self._hosts) - len(others)} hosts{f' with {node_type}' if node_type else ''}"
        short = CapacityShort(str(wrong or trouble or f"none of the {of_type} is free"), LOOK_AGAIN_S)
        return outcome(request, granted, {request: short})

    def list(self) -> tuple[Vm, ...]:
        return tuple(self._ours().values())

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: a host is given back once its node has ended; an unreachable host stays leased."""
        ours = {key: vm for key, vm in self._ours().items() if vm.name in names}
        if not ours:
            return
        with ThreadPoolExecutor(MAX_AT_ONCE) as pool:  # a host that does not answer delays no other
            ends = {vm.name: pool.submit(self._end, key, vm) for key, vm in ours.items()}
        raised = {name: end.exception() for name, end in ends.items()}
        left = {name: error for name, error in raised.items() if isinstance(error, ProviderError)}
        for error in raised.values():
            if error is not None and not isinstance(error, ProviderError):
                raise error
        if left:
            raise not_ended(left)

    def evict(self, _name: str) -> bool:
        return False

    def boot_log(self, name: str) -> str:
        for key, vm in self._ours().items():
            if vm.name == name and key in self._hosts:
                with suppress(ProviderError):
                    return (self._shell(self._hosts[key], log_script(name)) or "")[-BOOT_LOG_CHARACTERS:]
        return ""

    def stop(self) -> None:
        """See ``Provider``: no host is started after the present one."""
        self._stopped.set()

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: there is nothing to end but the nodes."""
        self.delete([vm.name for vm in self.list()])
        return ()

    def price(self, node_type: str = "") -> Price | None:
        of_type = tuple(host for host in self._spec.hosts if node_type in ("", host.node_type))
        usd_per_h = self._spec.model_copy(update={"hosts": of_type}).dearest_usd_per_h if of_type else None
        return None if usd_per_h is None else Price(usd_per_h=usd_per_h, source="the file of hosts")

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=False, max_vms=len(self._hosts), ending=self._ending)

    def _pass_over(self, key: str, error: ProviderError) -> None:
        """Log why a host is not used while others are; each reason once in a row."""
        if self._passed_over.get(key) != str(error):
            log.warning("the host %s is not used: %s", key, error)
        self._passed_over[key] = str(error)

    def _start(self, key: str, vm: Vm) -> None:
        host = self._hosts[key]
        known = {"{node}": vm.name, "{address}": host.node_address or "", "{devices}": str(vm.num_devices)}
        command = list(self._spec.command)
        for name, value in known.items():
            command = [part.replace(name, value) for part in command]
        self._shell(host, start_script(vm.name, command), self._secret)
        self._passed_over.pop(key, None)

    def _end(self, key: str, vm: Vm) -> None:
        """End a node and give its host back."""
        if key not in self._hosts:
            raise Misconfigured(f"{key} is not in the file of hosts any more, and the node may run there")
        self._shell(self._hosts[key], end_script(vm.name))
        self._give_back(key, vm)

    def _ended(self, key: str, vm: Vm) -> bool:
        """Whether a node that may have started has certainly ended."""
        try:
            self._shell(self._hosts[key], end_script(vm.name))
        except (Transient, Misconfigured):
            return False
        return True

    def _lease(self, request: str, taken: set[str], missing: int, tried: set[str]) -> tuple[str, Vm] | None:
        """Lease the free host with the most devices up to ``missing``, else the one with the fewest."""
        with self._leases() as (leases, write):
            free = [key for key in self._hosts if key not in leases and key not in tried]
            if not free:
                return None
            sizes = {key: self._hosts[key].num_devices for key in free}
            key = min(free, key=lambda key: (sizes[key] > missing, abs(missing - sizes[key])))
            name = next(name for index in numbers() if (name := vm_name(request, index)) not in taken)
            vm = Vm(name=name, request=request, num_devices=sizes[key])
            write({**leases, key: Lease(run=self._run, job=self._job, vm=vm)})
            return key, self._priced(key, vm)

    def _give_back(self, key: str, vm: Vm) -> None:
        """Give a host back, unless another thread did and another run has leased it since."""
        with self._leases() as (leases, write):
            entry = leases.get(key)
            if entry is not None and self._holds(entry) and entry.vm.name == vm.name:
                write({other: lease for other, lease in leases.items() if other != key})

    def _holds(self, lease: Lease) -> bool:
        return lease.run == self._run and lease.job in ("", self._job)

    def _ours(self) -> dict[str, Vm]:
        with self._leases() as (leases, _):
            return {key: self._priced(key, entry.vm) for key, entry in leases.items() if self._holds(entry)}

    def _priced(self, key: str, vm: Vm) -> Vm:
        host = self._hosts.get(key)
        usd_per_h = self._spec.usd_per_h if host is None or host.usd_per_h is None else host.usd_per_h
        node_type = "" if host is None else host.node_type or ""
        known = {"provider": "static", "zone": key, "usd_per_h": usd_per_h, "node_type": node_type}
        return vm.model_copy(update=known)

    @contextmanager
    def _leases(self) -> Iterator[tuple[dict[str, Lease], Callable[[dict[str, Lease]], None]]]:
        """Hold the lock; yield the leases and the function that replaces them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                held.enter_context(locked(self._path.with_suffix(".lock"), LOCK_S))
                leases = _LEASES.validate_json(self._path.read_bytes()) if self._path.exists() else {}
            except ValidationError as error:
                raise Misconfigured(f"{self._path} holds no leases; remove it once no run uses its hosts") from error
            except WaitTimeout as error:
                raise Transient(str(error)) from error
            except OSError as error:  # the leases are unknown
                raise Transient(f"{self._path} cannot be read: {error.strerror}") from error
            yield leases, self._write

    def _write(self, leases: dict[str, Lease]) -> None:
        text = json.dumps({key: entry.model_dump(exclude_none=True) for key, entry in leases.items()}, indent=2)
        write_whole(self._path, text + "\n", PRIVATE)
