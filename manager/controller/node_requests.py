"""Asking a provider for VMs: what is missing, under a name that is new for each attempt, ever less often in vain."""

from __future__ import annotations

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
from manager.controller.state.state import ControllerState, KeptNotice, NodeRequest, Phase
from manager.controller.state.transition import Transition
from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of
from morph.contract.waits import Backoff


def keeps(transition: Transition, event: NoticeGiven) -> bool:
    """Keep the notice of a node that is not known, if a request is open that it could answer."""
    if not is_awaited(transition.state):
        return False
    entry = KeptNotice(notice=event.notice, taken_s=transition.now_s + event.lead_s)
    transition.change_provisioning(kept_notices={**transition.state.provisioning.kept_notices, event.worker: entry})
    transition.say(ReasonCode.NOTICE_KEPT, f"{event.worker} will be taken in {event.lead_s:.3g} s and is not known yet")
    return True


def notice_of(state: ControllerState, node: WorkerId, now_s: float) -> NoticeGiven | None:
    """Return the notice that was kept of a node which is known now; None: there is none, or it is void by now."""
    entry = state.provisioning.kept_notices.get(node)
    if entry is None or now_s >= entry.taken_s + state.config.policy.rules.requests.notice_grace_s:
        return None
    return NoticeGiven(worker=node, lead_s=max(0.0, entry.taken_s - now_s), notice=entry.notice)


def forget_kept(transition: Transition, *nodes: WorkerId) -> None:
    """Forget the notices of these nodes, and of all that nobody waits for.

    That is once no request is open that their VMs could answer: but of a VM with several devices that came, the other
    workers may still come.
    """
    state = transition.state
    provisioning = state.provisioning
    if not provisioning.kept_notices:
        return
    known = {vm_of(node) for request in provisioning.requests.values() for node in request.granted}
    known.update(map(vm_of, state.workers))
    left = {
        node: entry
        for node, entry in provisioning.kept_notices.items()
        if node not in nodes and (is_awaited(state) or vm_of(node) in known)
    }
    transition.change_provisioning(kept_notices=left)


def is_awaited(state: ControllerState) -> bool:
    """Whether a request is open, so that VMs may come that nobody has named."""
    return any(request.count for request in state.provisioning.requests.values())


MAX_SENT = 8
COUNTED = (NodeState.WARMING, NodeState.READY, NodeState.SUSPECT)
ENDING = (Phase.COMMITTING, Phase.SEALING, Phase.ENDED)


def request_name(config: ControllerConfig, number: int) -> RequestId:
    """Return the name of a run's request, numbered from 1."""
    return f"{config.requests or config.job}-{number}"


def request_missing(transition: Transition) -> None:
    """Ask for the nodes that are missing after a decision, those that will be taken included, if it is time to."""
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
    if until_s is not None:  # else two workers of one VM would be replaced by a VM each
        transition.wake_by(until_s)
        return
    if provisioning.next_request_s is not None and now_s < provisioning.next_request_s:
        transition.wake_by(provisioning.next_request_s)
        return
    name = request_name(state.config, provisioning.num_requests + 1)
    keep_request(transition, name, NodeRequest(count=missing, requested_s=now_s))
    transition.change_provisioning(num_requests=provisioning.num_requests + 1)
    transition.wake_by(now_s + state.config.policy.rules.requests.answer_s)
    sentence = f"{missing} of {state.config.target_nodes} workers are missing: requested as {name}"
    transition.add(sentence, RequestNodes(request=name, count=missing))


def on_nodes_granted(transition: Transition, event: NodesGranted) -> None:
    """Note VMs that boot; fewer than requested count as a refusal of the rest."""
    state, now_s = transition.state, transition.now_s
    request = state.provisioning.requests.get(event.request)
    if request is None or not request.count:
        return transition.say(ReasonCode.IGNORED, f"{event.request} is not open")
    known = state.workers.keys() | request.granted.keys() | request.appeared
    new = {node: now_s for node in event.nodes if node not in known}
    short = len(new) < request.count
    notices = [notice for node in new if (notice := notice_of(state, node, now_s)) is not None]
    facts = {node: event.facts[node] for node in new if node in event.facts}
    waiting = request.waiting | (new.keys() & set(event.waiting))
    update = {"count": 0, "granted": request.granted | new, "facts": request.facts | facts, "waiting": waiting}
    keep_request(transition, event.request, request.model_copy(update=update))
    for node in event.facts.keys() & state.workers.keys():  # up before its grant was heard of
        transition.change_worker(node, facts=event.facts[node])
    transition.wake_by(now_s + state.config.policy.rules.requests.boot_s)
    boot = [node for node in event.nodes if node not in event.waiting]
    parts = [f"{', '.join(boot)} boot"] if boot else []
    parts += [f"{', '.join(event.waiting)} wait in the queue"] if event.waiting else []
    transition.say(ReasonCode.NODES_GRANTED, "; ".join(parts))
    if short:
        _refuse(transition, f"{event.request} is granted in part")
    else:
        transition.change_provisioning(num_refused=0, next_request_s=None)
    for notice in notices:
        gives_back(transition, notice)
    transition.code = ReasonCode.NODES_GRANTED
    return forget_kept(transition, *event.nodes)


def on_nodes_started(transition: Transition, event: NodesStarted) -> None:
    """Note that VMs boot which waited in their market's queue: from now on they are given up if they do not appear."""
    request = transition.state.provisioning.requests.get(event.request)
    begun = [node for node in event.nodes if request is not None and node in request.waiting]
    if request is None or not begun:
        return transition.say(ReasonCode.IGNORED, f"nobody waits for {', '.join(event.nodes)}")
    facts = {node: event.facts[node] for node in begun if node in event.facts}
    update = {
        "granted": request.granted | dict.fromkeys(begun, transition.now_s),
        "waiting": request.waiting - set(begun),
        "facts": request.facts | facts,
    }
    keep_request(transition, event.request, request.model_copy(update=update))
    transition.wake_by(transition.now_s + transition.state.config.policy.rules.requests.boot_s)
    return transition.say(ReasonCode.NODES_STARTED, f"{', '.join(begun)} left the queue and boot")


def on_request_refused(transition: Transition, event: RequestRefused) -> None:
    """Forget what was requested, and ask again after a while: longer with each refusal in a row."""
    request = transition.state.provisioning.requests.get(event.request)
    if request is None or not request.count:
        return transition.say(ReasonCode.IGNORED, f"{event.request} is not open")
    keep_request(transition, event.request, request.model_copy(update={"count": 0}))
    forget_kept(transition)
    why = f"{event.request} is refused: {event.cause}" + (f", {event.detail}" if event.detail else "")
    return _refuse(transition, why, event.retry_s)


def note_appeared(transition: Transition, event: NodeAppeared) -> NodeFacts:
    """Take a node that is up out of what is awaited, whether its grant was heard of or not; returns what it is."""
    transition.change_provisioning(num_absent=0)
    requests = transition.state.provisioning.requests
    for name, request in requests.items():
        if event.node in request.granted:
            keep_request(transition, name, without_granted(request, event.node))
            return event.facts or request.facts.get(event.node) or NodeFacts()
    named = requests.get(event.request) if event.request is not None else None
    if event.request is not None and named is not None and named.count:
        # noted by name: it may be lost before its grant is heard of
        update = {"count": named.count - 1, "appeared": named.appeared | {event.node}}
        keep_request(transition, event.request, named.model_copy(update=update))
    return event.facts or NodeFacts()


def lost_booting(transition: Transition, event: WorkerLost) -> None:
    """Await a VM no longer that went before it appeared, and ask for another; anybody else is not known.

    At once, unless a VM that was granted since the last such loss went as well: then after a pause that grows. One that
    is not fit for a worker counts as one that never appeared.
    """
    forget_kept(transition, *event.workers)
    for name, request in transition.state.provisioning.requests.items():
        if event.worker in request.granted:
            keep_request(transition, name, without_granted(request, event.worker))
            sentence = f"{event.worker} never appeared: {event.cause}"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
            return pause_requests(transition, request.granted[event.worker], num_absent=int(event.unfit))
    return transition.say(ReasonCode.IGNORED, f"{event.worker} is not known, or was lost before")


def has_ended_requests(state: ControllerState) -> bool:
    """Whether VMs were granted and never appeared so often that further ones would only cost money."""
    return state.provisioning.num_absent >= state.config.policy.rules.requests.max_absent


def why_requests_ended(state: ControllerState) -> str:
    """Say so, and what to look at."""
    return (
        f"{state.provisioning.num_absent} times in a row VMs were granted and none of them joined: "
        "no further one is requested; look at the log of such a VM's first boot, at what vms.environment installs, "
        "and at whether it reaches the manager's ports (docs/guides/azure.md)"
    )


def nothing_comes(state: ControllerState) -> bool:
    """Whether there will be no more workers than are ready: none is requested, awaited or being set up."""
    coming = state.provisioning.requests or any(entry.node is NodeState.WARMING for entry in state.workers.values())
    return has_ended_requests(state) and not coming


def pause_requests(transition: Transition, since_s: float, num_absent: int = 0) -> None:
    """Put off the next request when attempt after attempt is lost before a worker is ready; each counts once.

    ``since_s``: when the one that was lost now was granted, or appeared; ``num_absent``: 1 where none appeared that
    is of use.
    """
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
    """Give a VM back that will be taken before it is of use, if it is one that boots."""
    for name, request in transition.state.provisioning.requests.items():
        if event.worker in request.granted:
            keep_request(transition, name, without_granted(request, event.worker))
            sentence = f"{event.worker} will be taken in {event.lead_s:.3g} s and is not up yet: it is given back"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
            return True
    return False


def look_after_requests(transition: Transition) -> None:
    """Send requests without an answer again, and give up VMs that do not appear."""
    state, now_s = transition.state, transition.now_s
    rules = state.config.policy.rules.requests
    for name, request in state.provisioning.requests.items():
        late = tuple(node for node, since_s in request.booting.items() if now_s >= since_s + rules.boot_s)
        if late:
            keep_request(transition, name, without_granted(request, *late))
            sentence = f"{', '.join(late)} did not appear within {rules.boot_s:g} s"
            transition.say(ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=late))
            pause_requests(transition, min(request.granted[node] for node in late), num_absent=1)
        if request.count and now_s >= resend_at_s(state, request):
            _repeat_request(transition, name)


def resend_at_s(state: ControllerState, request: NodeRequest) -> float:
    """Return when a request without an answer is sent again."""
    rules = state.config.policy.rules.requests
    return request.requested_s + Backoff(rules.answer_s, rules.backoff_max_s).pause_s(request.num_sent - 1)


def keep_request(transition: Transition, name: RequestId, request: NodeRequest) -> None:
    """Replace a request, or forget it once nothing of it is awaited."""
    others = {other: entry for other, entry in transition.state.provisioning.requests.items() if other != name}
    transition.change_provisioning(requests={**others, name: request} if request.count or request.granted else others)


def without_granted(request: NodeRequest, *nodes: WorkerId) -> NodeRequest:
    """Return a request that waits for these nodes no longer."""
    granted = {node: since_s for node, since_s in request.granted.items() if node not in nodes}
    facts = {node: found for node, found in request.facts.items() if node not in nodes}
    return request.model_copy(update={"granted": granted, "facts": facts, "waiting": request.waiting - set(nodes)})


def _repeat_request(transition: Transition, name: RequestId) -> None:
    request = transition.state.provisioning.requests[name]
    if request.num_sent >= MAX_SENT:
        keep_request(transition, name, request.model_copy(update={"count": 0}))
        forget_kept(transition)
        return _refuse(transition, f"{name} was not answered, {MAX_SENT} times")
    again = request.model_copy(update={"num_sent": request.num_sent + 1, "requested_s": transition.now_s})
    keep_request(transition, name, again)
    transition.wake_by(resend_at_s(transition.state, again))
    sentence = f"{name} was not answered: asked again under its name"
    return transition.say(ReasonCode.NODES_REQUESTED, sentence, RequestNodes(request=name, count=request.count))


def _refuse(transition: Transition, why: str, retry_s: float | None = None) -> None:
    """Pause; no longer than ``retry_s``, where the provider says that."""
    state, now_s = transition.state, transition.now_s
    rules = state.config.policy.rules.requests
    wait_s = rules.backoff.pause_s(state.provisioning.num_refused)
    wait_s = wait_s if retry_s is None else min(wait_s, retry_s)
    transition.change_provisioning(num_refused=state.provisioning.num_refused + 1, next_request_s=now_s + wait_s)
    transition.wake_by(now_s + wait_s)
    transition.say(ReasonCode.REQUEST_REFUSED, f"{why}; the next request in {wait_s:g} s")
