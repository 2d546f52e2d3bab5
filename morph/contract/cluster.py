"""What a user writes in a cluster file (``configs/clusters``), or in a job file, which has the job too."""

from __future__ import annotations

import ipaddress
import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from morph.contract import ranges
from morph.contract.base import Value
from morph.contract.plan import Schedule
from morph.contract.rules import Rules

Seconds = Annotated[float, ranges.POLICY_SECONDS.field]
Count = Annotated[int, ranges.COUNT.field]
Memory = Annotated[int, ranges.MEMORY_BYTES.field]
UsdPerHour = Annotated[float, ranges.USD_PER_HOUR.field]
UsdPerHourAtMost = Annotated[float, ranges.USD_PER_HOUR_AT_MOST.field]
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n]+$")]
Port = Annotated[int, Field(ge=0, le=65535)]
VariableNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
    Field(description="variables of the manager's environment that workers get, by name; no other secret is handed on"),
]
NodeType = Annotated[str, Field(pattern=r"^[^\s,=]+$")]
"""A type of GPU, by the name that a profile, or a pool, has for it."""
RingSetting = Literal["auto", "gloo", "nccl"]
Rings = Annotated[
    RingSetting,
    Field(
        description="what reduces gradients of CUDA devices: gloo, through host memory; nccl, which keeps them on the "
        "devices and needs one for each worker; auto: nccl where it can, else gloo. nccl never ran on a device yet"
    ),
]
LinkSetting = Literal["auto", "ipc", "staged"]
Links = Annotated[
    LinkSetting,
    Field(
        description="how tensors of CUDA devices travel between stages: staged, through host memory; ipc, from device "
        "to device between workers of one machine, and staged between machines; auto: ipc where it can, else staged. "
        "ipc never ran on a device yet"
    ),
]
MAILBOX_SLOTS = 4
MAILBOX_SLOT_BYTES = 8 << 20
"""Of device memory, in each direction in which a worker sends by ``ipc``; a larger tensor goes in pieces."""
RING_PIECES, RING_PIECE_BYTES = 2, 128 << 20
"""Of device memory, for sums that are received at once in rings of NCCL; a smaller unit's sums are one piece."""
NUM_PORTS = 100
"""In the block that ``ProvidedVms.first_port`` begins."""
JOB_UID = 50505
"""Of a VM's user as whom the job's code runs, where nothing else is said: no image has one of this number."""
EPHEMERAL = 32768
"""From here on Linux gives ports out by itself, unless it was told otherwise (net.ipv4.ip_local_port_range)."""


KIND = (
    "whose VMs: local, of processes of this machine; azure, spot VMs of Azure; slurm, jobs of a cluster of Slurm; "
    "static, hosts of yours over ssh"
)
DEVICE = "what a worker computes on"
TLS = "encrypt what Ray's processes say to one another; orders and answers are always encrypted, tensors never"


class Limits(Value):
    """What asking for VMs stops at. The dollars are those of the VMs' price."""

    max_vms: Annotated[int, ranges.GPUS.field] | None = Field(
        default=None, description="so many at once, at most, whatever devices they have"
    )
    usd_per_h: UsdPerHourAtMost | None = Field(default=None, description="so many dollars an hour for all VMs, at most")
    budget_usd: Annotated[float, ranges.USD_AT_MOST.field] | None = Field(
        default=None, description="once so much is spent, no further VM is requested"
    )
    idle_vm_h: Annotated[float, ranges.POLICY_SECONDS.field] = Field(
        default=24.0,
        description="so many VM-hours are paid for while no step is trained, at most: then policy.when_stuck says what "
        "is done",
    )


class LocalVms(Value):
    """VMs played by processes of this machine, one worker each."""

    kind: Literal["local"] = Field(default="local", description=KIND)
    launcher: Literal["processes", "ray"] = Field(
        default="processes",
        description="ray: each VM is a Ray node, as where a provider brings them; always so where tls is true",
    )
    num_vms: Annotated[int, Field(ge=1, le=64)] = Field(
        default=6, description="VMs at the start when no trace is given"
    )
    node_types: dict[NodeType, Annotated[int, Field(ge=1, le=64)]] = Field(
        default={},
        description="VMs of each type of GPU, by its name in the profile, in place of num_vms, to try a mixed pool on "
        "this machine; VMs of a trace are of the types here that are their instance types",
    )
    memory_bytes: Memory | None = Field(
        default=None,
        description="memory of one VM's device as the planner sees it; absent: this machine's memory / num_vms, or its "
        "share of a CUDA device",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description=DEVICE)
    rings: Rings = "gloo"
    links: Links = "staged"
    tls: bool = Field(default=False, description=TLS)
    pass_variables: VariableNames = ()
    keep: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="ask for so many VMs, and again for each that is lost; absent: num_vms, once"
    )
    usd_per_h: UsdPerHour | None = Field(default=None, description="what one VM is taken to cost")
    on_demand_usd_per_h: UsdPerHour | None = Field(
        default=None, description="what the same VM costs on demand, to compare with"
    )
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        """Have as many VMs as there are of all types."""
        total = sum(self.node_types.values())
        if total and "num_vms" in self.model_fields_set and self.num_vms != total:
            raise ValueError(f"num_vms: is {self.num_vms}, and node_types has {total} VMs; leave one of them out")
        if total > 64:
            raise ValueError(f"node_types: {total} VMs are more than 64")
        if total:
            object.__setattr__(self, "num_vms", total)
        return self

    @property
    def under_ray(self) -> bool:
        """Whether its VMs are Ray nodes."""
        return self.launcher == "ray" or self.tls


class Environment(Value):
    """What a VM has to have before its worker can start."""

    python: str = Field(
        default="/usr/bin/python3",
        pattern=r"^/\S+$",
        description="the VM's interpreter; of the same version as the manager's, as Ray is",
    )
    setup: tuple[Line, ...] = Field(default=(), description="shell lines, run as root before anything else")
    packages: tuple[Line, ...] = Field(
        default=(),
        description="pip requirements of the job, installed after that; Morph and what it requires come by themselves",
    )
    files: tuple[Line, ...] = Field(
        default=(),
        description="files and folders that the job reads beside its code, relative to its folder; sent to each VM",
    )
    image: str | None = Field(default=None, description="instead of the cloud file's, where VMs are made from images")

    @field_validator("packages")
    @classmethod
    def _no_options(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        if any(package.startswith("-") for package in packages):
            raise ValueError("is an option of pip, not a requirement; setup accepts any line")
        if any(re.match(r"morph[-_.]+train\b", package, re.IGNORECASE) for package in packages):
            raise ValueError("Morph comes from the manager; no package index has it")
        return packages

    @field_validator("files")
    @classmethod
    def _below(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name!r} is not below the folder of the job's code")
        return files


class ProvidedVms(Value):
    """VMs that a provider brings, one worker for each of their devices. Paths are relative to this file's folder."""

    cloud: str = Field(min_length=1, description="what VMs, and where: a cloud file, or a file of hosts")
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="ask for VMs with so many workers together, and again for each that is lost; a VM with four GPUs "
        "brings four"
    )
    memory_bytes: Memory = Field(description="memory of one device")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description=DEVICE)
    rings: Rings = "gloo"
    links: Links = "staged"
    address: str = Field(
        description="this machine's IPv4 address as VMs reach it: Ray, the store and the notice server listen there"
    )
    ray_port: Port = Field(default=0, description="of Ray's head node; 0: any free one")
    notice_port: Port = Field(default=0, description="to which the VMs' agents come; 0: any free one")
    first_port: Annotated[int, Field(ge=1024, le=EPHEMERAL - NUM_PORTS)] | None = Field(
        default=None,
        description=f"of {NUM_PORTS} ports, the same on each VM and here, on which all but tensors arrives; "
        "absent: any free ones",
    )
    tls: bool = Field(default=False, description=TLS)
    lonely_s: Seconds = Field(default=900.0, description="a VM without a manager for so long ends itself")
    shared_storage: bool = Field(
        default=False, description="every VM sees this machine's folders under their paths: checkpoints may lie there"
    )
    environment: Environment = Environment()
    pass_variables: VariableNames = ()
    usd_per_h: UsdPerHour | None = Field(default=None, description="what one VM costs; absent: what the provider says")
    on_demand_usd_per_h: UsdPerHour | None = Field(
        default=None, description="what the same VM costs on demand, to compare with"
    )
    limits: Limits = Limits()

    @property
    def market(self) -> str:
        """The kind, by which the market is found."""
        return str(getattr(self, "kind"))  # noqa: B009 (each subclass has one of its own type)

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        try:
            found = ipaddress.IPv4Address(address)
        except ValueError as error:
            raise ValueError("is not an IPv4 address") from error
        if found.is_unspecified or found.is_multicast:
            raise ValueError("is not an address that a VM can reach")
        return address

    @model_validator(mode="after")
    def _ports_apart(self) -> Self:
        for name in ("ray_port", "notice_port"):
            port: int = getattr(self, name)
            if self.first_port is not None and self.first_port <= port < self.first_port + NUM_PORTS:
                raise ValueError(f"{name}: {port} is one of the {NUM_PORTS} ports of first_port")
        return self


class CloudVms(ProvidedVms):
    """VMs that are made from an image, and whose first boot Morph gives."""

    job_uid: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="number of the VMs' user as whom the job's code runs, made there if it is missing; absent: one of "
        "Morph's own; or 0, root, with shared_storage, because only their owner can enter the manager's folders",
    )
    metadata: bool = Field(
        default=False,
        description="the job's code may ask the VM's metadata service, and so act as the VM's identity; checkpoints "
        "need it where pass_variables has no credentials of the storage. Root always may",
    )

    @property
    def uid(self) -> int:
        """The user as whom the job's code runs."""
        if self.job_uid is not None:
            return self.job_uid
        return 0 if self.shared_storage else JOB_UID

    @field_validator("address")
    @classmethod
    def _is_reached(cls, address: str) -> str:
        if ipaddress.IPv4Address(address).is_loopback:
            raise ValueError("is a loopback address, which no VM of a cloud can reach")
        return address


class AzureVms(CloudVms):
    """Spot VMs on Azure."""

    kind: Literal["azure"] = Field(description=KIND)


class AwsVms(CloudVms):
    """Spot instances on AWS."""

    kind: Literal["aws"] = Field(description=KIND)


class StaticVms(ProvidedVms):
    """Hosts that the user has, reached over ssh."""

    kind: Literal["static"] = Field(description=KIND)

    @field_validator("environment")
    @classmethod
    def _no_image(cls, environment: Environment) -> Environment:
        if environment.image is not None:
            raise ValueError("image: these hosts are not made from images")
        return environment


class SlurmVms(ProvidedVms):
    """Jobs of a cluster of Slurm, each with a node."""

    kind: Literal["slurm"] = Field(description=KIND)

    @field_validator("environment")
    @classmethod
    def _no_image(cls, environment: Environment) -> Environment:
        if environment.image is not None:
            raise ValueError("image: container_image in the cloud file is a job's image")
        return environment


class OtherVms(ProvidedVms):
    """VMs of a market that another package registers: see ``manager/run/markets.py``."""

    kind: str = Field(description="name of the entry point, in the group morph.markets")


OTHER = "a kind of another package"
BUILT_IN = ("local", "azure", "aws", "slurm", "static")


def market_entry_points() -> dict[str, EntryPoint]:
    """Return what other packages register, by kind."""
    return {found.name: found for found in entry_points(group="morph.markets") if found.name not in BUILT_IN}


def _kind(vms: Any) -> str:
    kind = str(vms.get("kind", "local") if isinstance(vms, dict) else getattr(vms, "kind", "local"))
    return kind if kind in BUILT_IN or kind not in market_entry_points() else OTHER


Vms = Annotated[
    Annotated[LocalVms, Tag("local")]
    | Annotated[AzureVms, Tag("azure")]
    | Annotated[AwsVms, Tag("aws")]
    | Annotated[SlurmVms, Tag("slurm")]
    | Annotated[StaticVms, Tag("static")]
    | Annotated[OtherVms, Tag(OTHER)],
    Discriminator(_kind),
]


class Policy(Value):
    """When the controller acts. Times in seconds."""

    checkpoint_every_steps: Count | None = Field(
        default=None, description="a checkpoint so often; absent: as often as costs least, see rules.checkpoints"
    )
    start_patience_s: Seconds = Field(default=60.0, description="how long to wait at the start for VMs still booting")
    heartbeat_timeout_s: Seconds = Field(default=5.0, description="a silent worker is given up after this")
    outage_timeout_s: Seconds = Field(
        default=45.0,
        description="workers that all fall silent together are given up after this: it is the network, or this machine",
    )
    order_timeout_s: Seconds | None = Field(
        default=None,
        description="bound on one setup, reshape, step or commit; absent: four times what the plan, sizes and measured "
        "speeds let expect, and 120 s at least",
    )
    max_fruitless_generations: Count = Field(
        default=10,
        description="generations in a row without a new step before what is held is saved and the run pauses",
    )
    give_up_after_s: Seconds = Field(
        default=3600.0,
        description="how long to try again, with growing pauses, where no step is decided because the cluster is lost "
        "or one generation after another fails; then the run ends",
    )
    when_stuck: Literal["end", "rest"] = Field(
        default="end",
        description="what is done where workers fail to be set up, again and again in the same way, or where "
        "vms.limits.idle_vm_h is reached. end: what is held is saved, and the run ends; rest: that, but without VMs it "
        "tries again after a minute, and ever less often",
    )
    min_join_gain: Annotated[float, ranges.GAIN.field] = Field(
        default=0.02, description="a newcomer is taken in when the better shape is faster by this share"
    )
    redundancy: Literal["off", "state", "salvage", "auto"] = Field(
        default="auto",
        description="state: what only one VM holds is kept in step on another; salvage: that, and a step that is given "
        "up is finished in the next shape, and only what nobody has any more is run again; auto: each of these where "
        "it saves more than it costs; off: none",
    )
    takeover_patience_s: Annotated[float, ranges.PATIENCE_S.field] = Field(
        default=60.0,
        description="how long VMs and workers outlive a manager that is killed, for the next one; 0: not at all",
    )
    objective: Literal["throughput", "dollars"] = Field(
        default="throughput",
        description="which of several types of GPU is asked for: the one that adds most examples per second; or "
        "dollars: most of them for a dollar, where every price is known",
    )
    rules: Rules = Rules()

    @property
    def keeps_sums(self) -> bool:
        """Whether what workers have summed of a step that is given up is kept."""
        return self.redundancy in ("salvage", "auto")

    @field_validator("redundancy", mode="before")
    @classmethod
    def _off(cls, redundancy: Any) -> Any:
        return "off" if redundancy is False else redundancy  # which YAML makes of the word


class Notify(Value):
    """Who is alerted of a run that needs somebody, and when."""

    webhook: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="http or https URL, to which each alert is posted as JSON; or $NAME of an environment variable "
        "that has it",
    )
    command: tuple[str, ...] = Field(
        default=(), description="program and arguments, started for each alert, which it reads on standard input"
    )
    stopped_min: Annotated[float, Field(gt=0, le=10_000)] = Field(
        default=15.0, description="no step was decided for so many minutes"
    )
    budget_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="so much of vms.limits.budget_usd is spent"
    )
    missed_saves: Count = Field(default=3, description="no checkpoint was completed for so many intervals")

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.webhook is None and not self.command:
            raise ValueError("says nobody to alert: webhook or command")
        return self


class ClusterConfig(Value):
    """Root of a cluster file."""

    vms: Vms = LocalVms()
    policy: Policy = Policy()
    samples: bool = Field(
        default=False, description="have Job.sample called with each new checkpoint, in a process beside the manager"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=(), description="where steps, evaluations and changes are plotted; each needs its extra"
    )
    callbacks: tuple[str, ...] = Field(
        default=(), description="file.py:name each, relative to this file: objects that are called as the run goes on"
    )
    notify: Notify | None = Field(default=None, description="alerts; absent: nobody is alerted")


class JobPart(Value):
    """What is trained. Paths are relative to the job file's folder."""

    code: str = Field(min_length=3, pattern=r"^.+:[^:]+$", description="path/to/file.py:name of a morph.Job")
    arguments: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], bool | int | float | str | None] = (
        Field(default={}, description="what the function that `code` names is called with, by name; absent: nothing")
    )
    profile: str = Field(min_length=1, description="what `morph calibrate` wrote for it")
    steps: Annotated[int, ranges.COUNT.field] = Field(default=100, description="optimizer steps of the whole run")
    epochs: Annotated[int, ranges.COUNT.field] | None = Field(
        default=None, description="length of the whole run in epochs of the job's data set, in place of steps"
    )
    batch_size: Annotated[int, ranges.BATCH.field] | None = Field(
        default=None, description="samples in a step, to be held against the job's own; absent: not held against it"
    )
    run_dir: str | None = Field(
        default=None, min_length=1, description="journal, checkpoints and pictures; absent: runs/NAME of the job"
    )
    checkpoint_url: str | None = Field(
        default=None,
        min_length=1,
        description="fsspec URL (az://, s3://, gs://) or path that every VM reaches; absent: checkpoints in run_dir",
    )
    schedule: Schedule | None = Field(
        default=None, description="order of the tasks; the weights do not depend on it; absent: the fastest"
    )
    recompute: bool | None = Field(
        default=None,
        description="false keeps activations instead of running forwards again: more memory; absent: the faster",
    )
    pipeline_depth: Annotated[int, Field(ge=1, le=ranges.SECTIONS)] | None = Field(
        default=None,
        description="P of every shape: with fewer workers the run waits; absent: the fastest with those that are there",
    )
    num_replicas: Annotated[int, ranges.GPUS.field] | None = Field(
        default=None,
        description="D at most: fewer while workers are missing or where more are no faster; absent: any",
    )

    @model_validator(mode="after")
    def _one_length(self) -> JobPart:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("epochs: the length is given in steps too; one of the two is enough")
        return self


class JobFile(ClusterConfig):
    """Root of a job file: a cluster file's sections, and the job."""

    job: JobPart
