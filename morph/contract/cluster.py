"""The keys of a cluster file (``configs/clusters``) and of a job file, which has the job as well."""

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
    Field(description="names of environment variables of the manager that workers get; no other secret is passed on"),
]
NODE_TYPE = re.compile(r"[^\s,=]+")
NodeType = Annotated[str, Field(pattern=rf"^{NODE_TYPE.pattern}$")]
"""The name of a type of GPU in a profile or a pool."""
RingSetting = Literal["auto", "gloo", "nccl"]
Rings = Annotated[
    RingSetting,
    Field(
        description="how gradients of CUDA devices are reduced: gloo, through host memory; nccl, on the devices, one "
        "for each worker; auto: nccl if possible, else gloo. nccl has never run on a device yet"
    ),
]
LinkSetting = Literal["auto", "ipc", "staged"]
Links = Annotated[
    LinkSetting,
    Field(
        description="how tensors of CUDA devices travel between stages: staged, through host memory; ipc, from device "
        "to device between workers of one machine, and staged between machines; auto: ipc if possible, else staged. "
        "ipc has never run on a device yet"
    ),
]
MAILBOX_SLOTS = 4
MAILBOX_SLOT_BYTES = 8 << 20
"""Device memory for each direction in which a worker sends by ``ipc``; larger tensors are sent in pieces."""
RING_PIECES, RING_PIECE_BYTES = 2, 128 << 20
"""Device memory for sums that rings of NCCL receive at once; the sums of a smaller unit are one piece."""
NUM_PORTS = 100
"""Number of ports in the block that begins at ``ProvidedVms.first_port``."""
JOB_UID = 50505
"""Default number of the VM user that runs the job's code; no known image has a user with this number."""
EPHEMERAL = 32768
"""The first port that Linux assigns to connections by itself, unless net.ipv4.ip_local_port_range says otherwise."""


KIND = (
    "kind of VMs: local, processes of this machine; azure, spot VMs of Azure; slurm, jobs of a Slurm cluster; "
    "static, your hosts over ssh"
)
DEVICE = "device on which a worker computes"
TLS = "encrypt the traffic of Ray's processes; orders and answers are always encrypted, tensors never"
OTHER = "a kind of another package"
BUILT_IN = ("local", "azure", "aws", "slurm", "static")


class Limits(Value):
    """Limits to requests for VMs. Dollars are counted by the VMs' price."""

    max_vms: Annotated[int, ranges.GPUS.field] | None = Field(
        default=None, description="most VMs at once, whatever devices they have"
    )
    usd_per_h: UsdPerHourAtMost | None = Field(default=None, description="most dollars per hour for all VMs")
    budget_usd: Annotated[float, ranges.USD_AT_MOST.field] | None = Field(
        default=None, description="dollars after which no further VM is requested"
    )
    idle_vm_h: Annotated[float, ranges.POLICY_SECONDS.field] = Field(
        default=24.0,
        description="most VM-hours paid while no step is trained; then policy.when_stuck applies",
    )


class LocalVms(Value):
    """VMs emulated by processes of this machine, one worker each."""

    kind: Literal["local"] = Field(default="local", description=KIND)
    launcher: Literal["processes", "ray"] = Field(
        default="processes",
        description="ray: each VM is a Ray node, as with a provider; always so if tls is true",
    )
    num_vms: Annotated[int, Field(ge=1, le=64)] = Field(
        default=6, description="VMs at the start when no trace is given"
    )
    node_types: dict[NodeType, Annotated[int, Field(ge=1, le=64)]] = Field(
        default={},
        description="number of VMs by type of GPU in the profile, instead of num_vms, to try a mixed pool on this "
        "machine; the instance type of a trace's VM is its type here",
    )
    memory_bytes: Memory | None = Field(
        default=None,
        description="device memory of one VM for the planner; absent: this machine's memory / num_vms, or its share of "
        "a CUDA device",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description=DEVICE)
    rings: Rings = "gloo"
    links: Links = "staged"
    tls: bool = Field(default=False, description=TLS)
    pass_variables: VariableNames = ()
    keep: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="request this many VMs, and another for each lost one; absent: num_vms, once"
    )
    usd_per_h: UsdPerHour | None = Field(default=None, description="assumed price of one VM")
    on_demand_usd_per_h: UsdPerHour | None = Field(
        default=None, description="price of the same VM on demand, for comparison"
    )
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        """Set the number of VMs to the sum over all types."""
        total = sum(self.node_types.values())
        if total and "num_vms" in self.model_fields_set and self.num_vms != total:
            raise ValueError(f"num_vms: is {self.num_vms}, but node_types has {total} VMs; leave one of the two out")
        if total > 64:
            raise ValueError(f"node_types: {total} VMs are more than 64")
        if total:
            object.__setattr__(self, "num_vms", total)
        return self

    @property
    def under_ray(self) -> bool:
        """Whether the VMs are Ray nodes."""
        return self.launcher == "ray" or self.tls


class Environment(Value):
    """The software that a VM needs before its worker can start."""

    python: str = Field(
        default="/usr/bin/python3",
        pattern=r"^/\S+$",
        description="the VM's interpreter; Python and Ray need the manager's versions",
    )
    setup: tuple[Line, ...] = Field(default=(), description="shell lines, run as root before anything else")
    packages: tuple[Line, ...] = Field(
        default=(),
        description="pip requirements of the job, installed after that; Morph and its requirements need no entry",
    )
    files: tuple[Line, ...] = Field(
        default=(),
        description="files and folders that the job reads beside its code, relative to its folder; sent to each VM",
    )
    image: str | None = Field(
        default=None, description="image in place of the cloud file's, if VMs are made from images"
    )

    @field_validator("packages")
    @classmethod
    def _no_options(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        if any(package.startswith("-") for package in packages):
            raise ValueError("is an option of pip, not a requirement; setup accepts any line")
        if any(re.match(r"morph[-_.]+train\b", package, re.IGNORECASE) for package in packages):
            raise ValueError("the manager provides Morph; no package index has it")
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

    cloud: str = Field(min_length=1, description="file that describes the VMs: a cloud file, or a file of hosts")
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="request VMs with this many workers in total, and replace each lost one; a VM with four GPUs "
        "brings four"
    )
    memory_bytes: Memory = Field(description="memory of one device")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description=DEVICE)
    rings: Rings = "gloo"
    links: Links = "staged"
    address: str = Field(
        description="this machine's IPv4 address as VMs reach it: Ray, the store and the notice server listen there"
    )
    ray_port: Port = Field(default=0, description="port of Ray's head node; 0: any free port")
    notice_port: Port = Field(default=0, description="port to which the VMs' agents connect; 0: any free port")
    first_port: Annotated[int, Field(ge=1024, le=EPHEMERAL - NUM_PORTS)] | None = Field(
        default=None,
        description=f"first of {NUM_PORTS} ports, the same on each VM and here, for all traffic but tensors; "
        "absent: any free ports",
    )
    tls: bool = Field(default=False, description=TLS)
    lonely_s: Seconds = Field(default=900.0, description="a VM that has had no manager for this long ends itself")
    shared_storage: bool = Field(
        default=False,
        description="every VM sees this machine's folders under the same paths: checkpoints may be stored there",
    )
    environment: Environment = Environment()
    pass_variables: VariableNames = ()
    usd_per_h: UsdPerHour | None = Field(default=None, description="price of one VM; absent: the provider's")
    on_demand_usd_per_h: UsdPerHour | None = Field(
        default=None, description="price of the same VM on demand, for comparison"
    )
    limits: Limits = Limits()

    @property
    def market(self) -> str:
        """The kind; it selects the market."""
        return str(getattr(self, "kind"))  # noqa: B009 (each subclass has one of its own type)

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        try:
            parsed = ipaddress.IPv4Address(address)
        except ValueError as error:
            raise ValueError("is not an IPv4 address") from error
        if parsed.is_unspecified or parsed.is_multicast:
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
    """VMs that are made from an image, and whose first boot Morph scripts."""

    job_uid: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="number of the VM user that runs the job's code, created if it is missing; absent: a user of "
        "Morph's own, or with shared_storage 0 (root), because only root can enter the manager's folders",
    )
    metadata: bool = Field(
        default=False,
        description="the job's code may use the VM's metadata service, and so act as the VM's identity; checkpoints "
        "need this if pass_variables has no credentials of the storage. Root always may",
    )

    @property
    def uid(self) -> int:
        """Number of the user that runs the job's code."""
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
    """The user's own hosts, reached over ssh."""

    kind: Literal["static"] = Field(description=KIND)

    @field_validator("environment")
    @classmethod
    def _no_image(cls, environment: Environment) -> Environment:
        if environment.image is not None:
            raise ValueError("image: static hosts are not made from images")
        return environment


class SlurmVms(ProvidedVms):
    """Jobs of a Slurm cluster, each with a node."""

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


def market_entry_points() -> dict[str, EntryPoint]:
    """Return the markets that other packages register, by kind."""
    return {market.name: market for market in entry_points(group="morph.markets") if market.name not in BUILT_IN}


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
        default=None,
        description="steps between checkpoints; absent: the interval that costs least, see rules.checkpoints",
    )
    start_patience_s: Seconds = Field(default=60.0, description="how long to wait at the start for VMs that still boot")
    heartbeat_timeout_s: Seconds = Field(default=5.0, description="a silent worker is given up after this")
    outage_timeout_s: Seconds = Field(
        default=45.0,
        description="workers that all fall silent together are given up after this: the network or this machine failed",
    )
    order_timeout_s: Seconds | None = Field(
        default=None,
        description="bound on one setup, reshape, step or commit; absent: four times the time expected from the plan, "
        "sizes and measured speeds, at least 120 s",
    )
    max_fruitless_generations: Count = Field(
        default=10,
        description="generations in a row without a new step until the state is saved and the run pauses",
    )
    give_up_after_s: Seconds = Field(
        default=3600.0,
        description="how long to retry, with growing pauses, while no step is decided because the cluster is lost or "
        "one generation after another fails; then the run ends",
    )
    when_stuck: Literal["end", "rest"] = Field(
        default="end",
        description="what happens if workers repeatedly fail to be set up in the same way, or if "
        "vms.limits.idle_vm_h is reached. end: the state is saved, and the run ends; rest: the state is saved, and the "
        "run waits without VMs and retries after a minute, then less and less often",
    )
    min_join_gain: Annotated[float, ranges.GAIN.field] = Field(
        default=0.02, description="a new worker joins if the better shape is faster by this share"
    )
    redundancy: Literal["off", "state", "salvage", "auto"] = Field(
        default="auto",
        description="state: state that only one VM holds is kept up to date on another; salvage: the same, and an "
        "abandoned step is finished in the next shape, so that only lost micro-batches run again; auto: either, if it "
        "saves more than it costs; off: neither",
    )
    takeover_patience_s: Annotated[float, ranges.PATIENCE_S.field] = Field(
        default=60.0,
        description="how long workers and local VMs outlive a manager that is killed, for the next one; 0: not at all. "
        "A provider's VMs live for vms.lonely_s",
    )
    objective: Literal["throughput", "dollars"] = Field(
        default="throughput",
        description="which of several types of GPU is requested: throughput, the one that adds most examples per "
        "second; dollars, the type that adds most examples per dollar, if every price is known",
    )
    rules: Rules = Rules()

    @field_validator("redundancy", mode="before")
    @classmethod
    def _off(cls, redundancy: Any) -> Any:
        return "off" if redundancy is False else redundancy  # YAML reads the word "off" as False


class Notify(Value):
    """When and to whom an alert is sent about a run that needs attention."""

    webhook: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="http or https URL to which each alert is posted as JSON; or $NAME of an environment variable "
        "that holds the URL",
    )
    command: tuple[str, ...] = Field(
        default=(), description="program and arguments; it is started for each alert and reads it on standard input"
    )
    stopped_min: Annotated[float, Field(gt=0, le=10_000)] = Field(
        default=15.0, description="alert if no step was decided for this many minutes"
    )
    budget_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="alert at this share of vms.limits.budget_usd"
    )
    missed_saves: Count = Field(default=3, description="alert if no checkpoint was completed for this many intervals")

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.webhook is None and not self.command:
            raise ValueError("has no receiver of alerts: give webhook or command")
        return self


class ClusterConfig(Value):
    """Root of a cluster file."""

    vms: Vms = LocalVms()
    policy: Policy = Policy()
    samples: bool = Field(
        default=False, description="call Job.sample with each new checkpoint, in a process beside the manager"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=(), description="trackers that plot steps, evaluations and changes of shape; each needs its extra"
    )
    callbacks: tuple[str, ...] = Field(
        default=(), description="file.py:name each, relative to this file: objects that are called during the run"
    )
    notify: Notify | None = Field(default=None, description="alerts; absent: none are sent")


class JobPart(Value):
    """The training job. Paths are relative to the job file's folder."""

    code: str = Field(min_length=3, pattern=r"^.+:[^:]+$", description="path/to/file.py:name of a morph.Job")
    arguments: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], bool | int | float | str | None] = (
        Field(default={}, description="arguments, by name, for the function that `code` names; absent: none")
    )
    profile: str = Field(min_length=1, description="the profile that `morph calibrate` wrote for it")
    steps: Annotated[int, ranges.COUNT.field] = Field(default=100, description="optimizer steps of the whole run")
    epochs: Annotated[int, ranges.COUNT.field] | None = Field(
        default=None, description="length of the whole run in epochs of the job's data set, in place of steps"
    )
    batch_size: Annotated[int, ranges.BATCH.field] | None = Field(
        default=None, description="samples in a step, to be compared with the job's own; absent: not compared"
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
        description="P of every shape: with fewer workers the run waits; absent: the fastest for the present workers",
    )
    num_replicas: Annotated[int, ranges.GPUS.field] | None = Field(
        default=None,
        description="largest D; it is smaller while workers are missing or if more are no faster; absent: any",
    )

    @model_validator(mode="after")
    def _one_length(self) -> JobPart:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("epochs: the length is given in steps as well; give one of the two")
        return self


class JobFile(ClusterConfig):
    """Root of a job file: a cluster file's sections, and the job."""

    job: JobPart
