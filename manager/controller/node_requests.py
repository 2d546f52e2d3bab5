"""Requests missing VMs from a provider: each attempt has a new name, and pauses grow with each refusal."""

from __future__ import annotations

import re

from manager.controller.shape.formation import partly_lost_until_s
from manager.controller.state.actions import ReasonCode, ReleaseNodes, RequestId, RequestNodes
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    RequestRefused,
    WorkerLost,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, FailedBoots, KeptNotice, NodeRequest, Phase, Refusals
from manager.controller.state.transition import Transition
from morph.contract.messages import WorkerId
from morph.contract.pool import Pool
from morph.contract.vm_names import vm_of
from morph.contract.waits import Backoff

MAX_SENT = 8
WEIGHED = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of GPUs of one type that are considered together when the type to request is chosen."""
COUNTED = (NodeState.WARMING, NodeState.READY, NodeState.SUSPECT)
ENDING = (Phase.COMMITTING, Phase.SEALING, Phase.ENDED)
VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts of a message that differ between failures with the same cause."""


def keeps(transition: Transition, event: NoticeGiven) -> bool:
    """Keep the notice of an unknown worker if an open request could be answered by it; returns whether it did."""
    if not is_awaited(transition.state):
        return False
    entry = KeptNotice(notice=event.notice, taken_s=transition.now_s + event.lead_s)
    transition.change_provisioning(kept_notices={**transition.state.provisioning.kept_notices, event.worker: entry})
    transition.say(ReasonCode.NOTICE_KEPT, f"{event.worker} will be taken in {event.lead_s:.3g} s and is not known yet")
    return True


def notice_of(state: ControllerState, worker: WorkerId, now_s: float) -> NoticeGiven | None:
    """Return the kept notice of a worker that has appeared since then; None: there is none, or it has become void."""
    entry = state.provisioning.kept_notices.get(worker)
    if entry is None or now_s >= entry.taken_s + state.config.policy.rules.requests.notice_grace_s:
        return None
    return NoticeGiven(worker=worker, lead_s=max(0.0, entry.taken_s - now_s), notice=entry.notice)


def forget_kept(transition: Transition, *workers: WorkerId) -> None:
    """Forget the notices of these workers, and of all of their VMs' workers that can no longer appear."""
    state = transition.state
    provisioning = state.provisioning
    if not provisioning.kept_notices:
        return
    known = {vm_of(worker) for request in provisioning.requests.values() for worker in request.granted}
    known.update(map(vm_of, state.workers))
    left = {
        worker: entry
        for worker, entry in provisioning.kept_notices.items()
        if worker not in workers and (is_awaited(state) or vm_of(worker) in known)
    }
    transition.change_provisioning(kept_notices=left)


def is_awaited(state: ControllerState) -> bool:
    """Whether a request is open, so that VMs may come whose names are not known yet."""
    return any(request.count for request in state.provisioning.requests.values())


def request_name(config: ControllerConfig, number: int) -> RequestId:
    """Return the name of a run's request; ``number`` counts from 1."""
    return f"{config.requests or config.job}-{number}"


def request_missing(transition: Transition) -> None:
    """If it is time, request the workers that are missing after a decision; workers with a notice count as missing."""
    state, now_s = transition.state, transition.now_s
    provisioning = state.provisioning
    if not state.config.target_nodes or state.phase in ENDING or state.stop_reason is not None:
        return
    living = sum(entry.node in COUNTED for entry in state.workers.values())
    coming = sum(request.count + len(request.granted) for request in provisioning.requests.values())
    missing = state.config.target_nodes - living - coming
    if missing <= 0 or has_ended_requests(state):
        return
    until_s = partly_lost_until_s(state, now_s)
    if until_s is not None:  # otherwise two lost workers of one VM would each be replaced by a VM
        transition.wake_by(until_s)
        return
    if provisioning.next_request_s is not None and now_s < provisioning.next_request_s:
        transition.wake_by(provisioning.next_request_s)
        return
    wanted = types_wanted(state, missing, now_s) if state.config.offers else {"": missing}
    requested = []
    for node_type, count in wanted.items():
        number = transition.state.provisioning.num_requests + 1
        name = request_name(state.config, number)
        keep_request(transition, name, NodeRequest(count=count, node_type=node_type, requested_s=now_s))
        transition.change_provisioning(num_requests=number)
        transition.actions.append(RequestNodes(request=name, count=count, node_type=node_type))
        requested.append(f"{count} {node_type} requested as {name}" if node_type else f"requested as {name}")
    if requested:
        transition.wake_by(now_s + state.config.policy.rules.requests.answer_s)
        transition.add(f"{missing} of {state.config.target_nodes} workers are missing: {', '.join(requested)}")
    paused_s = [entry.until_s for entry in provisioning.refused.values() if now_s < entry.until_s]
    if paused_s and missing > sum(wanted.values()):
        transition.wake_by(min(paused_s))


def types_wanted(state: ControllerState, missing: int, now_s: float) -> dict[str, int]:
    """Return how many GPUs of each type to request; fewer than ``missing`` if types were refused recently.

    Types are chosen one GPU after the other, by the largest average gain, of one or several at once, in speed or in
    speed per dollar. GPUs that were granted already count as present.
    """
    config, provisioning = state.config, state.provisioning
    there = [entry.facts.node_type for entry in state.workers.values() if entry.node in COUNTED]
    for request in provisioning.requests.values():
        there += [request.node_type] * (request.count + len(request.granted))
    pool, wanted = Pool.counting(there), dict[str, int]()
    paused = {name for name, entry in provisioning.refused.items() if now_s < entry.until_s}
    offers = [offer for offer in config.offers if offer.node_type not in paused]
    by_price = config.policy.objective == "dollars" and all(offer.usd_per_h for offer in config.offers)
    while missing > 0:
        speed, best = config.speed_on(pool), (-1.0, "", 0)
        for offer in offers:
            room = missing if offer.most is None else min(missing, offer.most - pool[offer.node_type])
            price = offer.usd_per_h if by_price and offer.usd_per_h else 1.0
            for count in (number for number in WEIGHED if number <= room):
                gain = config.speed_on(pool + Pool.of({offer.node_type: count})) - speed
                best = max(best, (gain / count / price, offer.node_type, count), key=lambda choice: choice[0])
        _, node_type, count = best
        if not count:
            break
        pool, missing = pool + Pool.of({node_type: count}), missing - count
        wanted[node_type] = wanted.get(node_type, 0) + count
    return wanted


def on_nodes_granted(transition: Transition, event: NodesGranted) -> None:
    """Record VMs that boot; fewer than requested count as a refusal of the rest."""
    state, now_s = transition.state, transition.now_s
    request = state.provisioning.requests.get(event.request)
    if request is None or not request.count:
        return transition.say(ReasonCode.IGNORED, f"{event.request} is not open")
    known = state.workers.keys() | request.granted.keys() | request.appeared
    new = {worker: now_s for worker in event.nodes if worker not in known}
    short = len(new) < request.count
    notices = [notice for worker in new if (notice := notice_of(state, worker, now_s)) is not None]
    facts = {
        worker: _typed(event.facts.get(worker), request) for worker in new if worker in event.facts or request.node_type
    }
    waiting = request.waiting | (new.keys() & set(event.waiting))
    update = {"count": 0, "granted": request.granted | new, "facts": request.facts | facts, "waiting": waiting}
    keep_request(transition, event.request, request.model_copy(update=update))
    for worker in event.facts.keys() & state.workers.keys():  # it appeared before its grant was reported
        transition.change_worker(worker, facts=_typed(event.facts[worker], request))
    transition.wake_by(now_s + state.config.policy.rules.requests.boot_s)
    boot = [worker for worker in event.nodes if worker not in event.waiting]
    parts = [f"{', '.join(boot)} boot"] if boot else []
    if event.waiting:
        parts.append(f"{', '.join(event.waiting)} {'wait' if len(event.waiting) > 1 else 'waits'} in the queue")
    transition.say(ReasonCode.NODES_GRANTED, "; ".join(parts))
    if event.short == "input":
        end_requests(transition, f"{event.request} is granted in part: {event.detail}")
    elif short:
        why = f"{event.request} is granted in part" + (f": {event.detail}" if event.detail else "")
        _refuse(transition, why, request.node_type)
    else:
        others = {name: entry for name, entry in state.provisioning.refused.items() if name != request.node_type}
        transition.change_provisioning(num_refused=0, next_request_s=None, refused=others)
    for notice in notices:
        gives_back(transition, notice)
    transition.code = ReasonCode.NODES_GRANTED
    return forget_kept(transition, *event.nodes)


def on_nodes_started(transition: Transition, event: NodesStarted) -> None:
    """Record that queued VMs have begun to boot: from now on they are given up if they do not appear in time."""
    request = transition.state.provisioning.requests.get(event.request)
    begun = [worker for worker in event.nodes if request is not None and worker in request.waiting]
    if request is None or not begun:
        return transition.say(ReasonCode.IGNORED, f"nothing waits for {', '.join(event.nodes)}")
    facts = {worker: event.facts[worker] for worker in begun if worker in event.facts}
    update = {
        "granted": request.granted | dict.fromkeys(begun, transition.now_s),
        "waiting": request.waiting - set(begun),
        "facts": request.facts | facts,
    }
    keep_request(transition, event.request, request.model_copy(update=update))
    transition.wake_by(transition.now_s + transition.state.config.policy.rules.requests.boot_s)
    return transition.say(
        ReasonCode.NODES_STARTED, f"{', '.join(begun)} left the queue and {'boot' if len(begun) > 1 else 'boots'}"
    )


def on_request_refused(transition: Transition, event: RequestRefused) -> None:
    """Forget a refused request, and request again after a pause that grows with each refusal in a row."""
    request = transition.state.provisioning.requests.get(event.request)
    if request is None or not request.count:
        return transition.say(ReasonCode.IGNORED, f"{event.request} is not open")
    keep_request(transition, event.request, request.model_copy(update={"count": 0}))
    forget_kept(transition)
    why = f"{event.request} is refused: {event.cause}" + (f", {event.detail}" if event.detail else "")
    if event.cause == "input":
        return end_requests(transition, why)
    return _refuse(transition, why, request.node_type, event.retry_s)


def note_appeared(transition: Transition, event: NodeAppeared) -> NodeFacts:
    """Stop waiting for a worker that has appeared, whether its grant was reported or not; returns its facts."""
    transition.change_provisioning(num_absent=0, failed_boots=None)
    requests = transition.state.provisioning.requests
    for name, request in requests.items():
        if event.node in request.granted:
            keep_request(transition, name, without_granted(request, event.node))
            return _typed(event.facts or request.facts.get(event.node), request)
    named = requests.get(event.request) if event.request is not None else None
    if event.request is not None and named is not None and named.count:
        # recorded by name: it may be lost before its grant is reported
        update = {"count": named.count - 1, "appeared": named.appeared | {event.node}}
        keep_request(transition, event.request, named.model_copy(update=update))
        return _typed(event.facts, named)
    return event.facts or NodeFacts()


def _typed(facts: NodeFacts | None, request: NodeRequest) -> NodeFacts:
    """Return a worker's facts with the requested type filled in, unless its provider named another."""
    facts = facts or NodeFacts()
    return facts if facts.node_type else facts.model_copy(update={"node_type": request.node_type})


def lost_booting(transition: Transition, event: WorkerLost) -> None:
    """Stop waiting for a VM that was lost before it appeared, and request another; ignore unknown workers.

    The new request follows at once, after several such losses in a row with a growing pause.
    """
    forget_kept(transition, *event.workers)
    for name, request in transition.state.provisioning.requests.items():
        if event.worker in request.granted:
            keep_request(transition, name, without_granted(request, event.worker))
            sentence = f"{event.worker} never appeared: {event.cause}"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
            pause_requests(transition, request.granted[event.worker], num_absent=int(event.unfit))
            return _note_failed_boot(transition, event, sentence) if event.unfit else None
    return transition.say(ReasonCode.IGNORED, f"{event.worker} is unknown, or was lost before")


def _note_failed_boot(transition: Transition, event: WorkerLost, sentence: str) -> None:
    """Record why a VM cannot be used; once several in a row failed in the same way, no further one would help."""
    way, known = VARYING.sub("#", event.cause), transition.state.provisioning.failed_boots
    before = known.vms if known is not None and known.way == way else frozenset[str]()
    failed = FailedBoots(way=way, vms=before | {vm_of(event.worker)})
    transition.change_provisioning(failed_boots=failed)
    if len(failed.vms) >= transition.state.config.policy.rules.setups.alike:
        end_requests(transition, f"{sentence} ({len(failed.vms)} VMs in a row, in the same way)")
        transition.code = ReasonCode.NODE_ABSENT


def has_ended_requests(state: ControllerState) -> bool:
    """Whether further requests could bring no worker: VMs that fail to appear would only cost money."""
    provisioning = state.provisioning
    return bool(provisioning.requests_over) or (
        provisioning.num_absent >= state.config.policy.rules.requests.max_absent
    )


def end_requests(transition: Transition, why: str) -> None:
    """Request no further VM, for a reason that only the user can mend; the VMs that are there go on."""
    over = f"{why.rstrip('.')}: no further VM is requested; mend this, and give the same command again"
    transition.change_provisioning(requests_over=over)
    transition.wake_by(transition.now_s)  # where nothing else comes, the run ends
    transition.say(ReasonCode.REQUEST_REFUSED, over)


def why_requests_ended(state: ControllerState) -> str:
    """Return the sentence for ``has_ended_requests``, with advice for the user."""
    return state.provisioning.requests_over or (
        f"{state.provisioning.num_absent} times in a row VMs were granted and none of them joined: "
        "no further one is requested; look at the log of such a VM's first boot, at what vms.environment installs, "
        "and at whether it reaches the manager's ports (docs/guides/azure.md)"
    )


def nothing_comes(state: ControllerState) -> bool:
    """Whether no further worker will come: none is requested, awaited or being set up."""
    coming = state.provisioning.requests or any(entry.node is NodeState.WARMING for entry in state.workers.values())
    return has_ended_requests(state) and not coming


def pause_requests(transition: Transition, since_s: float, num_absent: int = 0) -> None:
    """Postpone the next request if several VMs in a row, granted since ``since_s``, are lost before they are ready."""
    state, now_s = transition.state, transition.now_s
    provisioning = state.provisioning
    rules = state.config.policy.rules.requests
    if provisioning.setup_lost_s is not None and since_s < provisioning.setup_lost_s:
        return
    num_lost = provisioning.num_setups_lost + 1
    transition.change_provisioning(
        num_setups_lost=num_lost, setup_lost_s=now_s, num_absent=provisioning.num_absent + num_absent
    )
    if num_lost > 1:
        wait_s = rules.backoff.pause_s(num_lost - 2)
        transition.change_provisioning(next_request_s=max(provisioning.next_request_s or 0.0, now_s + wait_s))
        transition.wake_by(now_s + wait_s)
    if num_absent and has_ended_requests(transition.state):
        transition.say(ReasonCode.NODE_ABSENT, why_requests_ended(transition.state))


def gives_back(transition: Transition, event: NoticeGiven) -> bool:
    """Release a booting VM whose notice says that it will be taken before it is useful; returns whether it did."""
    for name, request in transition.state.provisioning.requests.items():
        if event.worker in request.granted:
            keep_request(transition, name, without_granted(request, event.worker))
            sentence = f"{event.worker} will be taken in {event.lead_s:.3g} s and is not up yet: it is given back"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
            return True
    return False


def look_after_requests(transition: Transition) -> None:
    """Resend unanswered requests, and give up VMs that did not appear in time."""
    state, now_s = transition.state, transition.now_s
    rules = state.config.policy.rules.requests
    for name, request in state.provisioning.requests.items():
        late = tuple(worker for worker, since_s in request.booting.items() if now_s >= since_s + rules.boot_s)
        if late:
            keep_request(transition, name, without_granted(request, *late))
            sentence = f"{', '.join(late)} did not appear within {rules.boot_s:g} s"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=late))
            pause_requests(transition, min(request.granted[worker] for worker in late), num_absent=1)
        if request.count and now_s >= resend_at_s(state, request):
            _repeat_request(transition, name)


def resend_at_s(state: ControllerState, request: NodeRequest) -> float:
    """Return when (seconds) an unanswered request is sent again."""
    rules = state.config.policy.rules.requests
    return request.requested_s + Backoff(rules.answer_s, rules.backoff_max_s).pause_s(request.num_sent - 1)


def keep_request(transition: Transition, name: RequestId, request: NodeRequest) -> None:
    """Replace a request, or forget it once none of its VMs is awaited."""
    others = {other: entry for other, entry in transition.state.provisioning.requests.items() if other != name}
    transition.change_provisioning(requests={**others, name: request} if request.count or request.granted else others)


def without_granted(request: NodeRequest, *nodes: WorkerId) -> NodeRequest:
    """Return the request without these granted workers."""
    granted = {worker: since_s for worker, since_s in request.granted.items() if worker not in nodes}
    facts = {worker: known for worker, known in request.facts.items() if worker not in nodes}
    return request.model_copy(update={"granted": granted, "facts": facts, "waiting": request.waiting - set(nodes)})


def _repeat_request(transition: Transition, name: RequestId) -> None:
    request = transition.state.provisioning.requests[name]
    if request.num_sent >= MAX_SENT:
        keep_request(transition, name, request.model_copy(update={"count": 0}))
        forget_kept(transition)
        return _refuse(transition, f"{name} was not answered, {MAX_SENT} times", request.node_type)
    again = request.model_copy(update={"num_sent": request.num_sent + 1, "requested_s": transition.now_s})
    keep_request(transition, name, again)
    transition.wake_by(resend_at_s(transition.state, again))
    sentence = f"{name} was not answered: asked again under its name"
    action = RequestNodes(request=name, count=request.count, node_type=request.node_type)
    return transition.say(ReasonCode.NODES_REQUESTED, sentence, action)


def _refuse(transition: Transition, why: str, node_type: str, retry_s: float | None = None) -> None:
    """Pause requests, for at most ``retry_s`` if the provider gives it; with several types, only of this type."""
    state, now_s = transition.state, transition.now_s
    rules, provisioning = state.config.policy.rules.requests, state.provisioning
    before = provisioning.refused[node_type].num if node_type in provisioning.refused else 0
    wait_s = rules.backoff.pause_s(before if node_type else provisioning.num_refused)
    wait_s = wait_s if retry_s is None else min(wait_s, retry_s)
    if node_type:
        refusals = Refusals(num=before + 1, until_s=now_s + wait_s)
        transition.change_provisioning(refused={**provisioning.refused, node_type: refusals})
    else:
        transition.change_provisioning(num_refused=provisioning.num_refused + 1, next_request_s=now_s + wait_s)
    transition.wake_by(now_s + wait_s)
    again = f"the next request{f' for {node_type}' if node_type else ''} in {wait_s:g} s"
    transition.say(ReasonCode.REQUEST_REFUSED, f"{why}; {again}")
