"""Asking a provider for VMs: what is missing, under a name that is new for each attempt, ever less often in vain."""

from __future__ import annotations

from manager.controller.actions import Action, ReleaseNodes, RequestId, RequestNodes
from manager.controller.changes import changed, followed, said, wake_by
from manager.controller.config import ControllerConfig
from manager.controller.early import notice_of, without_kept
from manager.controller.events import NodeAppeared, NodesGranted, NoticeGiven, RequestRefused, WorkerLost
from manager.controller.nodes import NodeState
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, NodeRequest, Phase
from morph.contract.messages import WorkerId

MAX_SENT = 8
COUNTED = (NodeState.WARMING, NodeState.READY, NodeState.SUSPECT)
ENDING = (Phase.COMMITTING, Phase.SEALING, Phase.ENDED)


def request_name(config: ControllerConfig, number: int) -> RequestId:
    """Return the name of a run's request, numbered from 1."""
    return f"{config.requests or config.job}-{number}"


def asked(decision: Decision, now_s: float) -> Decision:
    """Ask for the nodes that are missing after a decision, those that will be taken included, if it is time to."""
    state = decision.state
    if not state.config.target_nodes or state.phase in ENDING or state.stop_reason is not None:
        return decision
    living = sum(entry.node in COUNTED for entry in state.workers.values())
    coming = sum(request.count + len(request.granted) for request in state.requests.values())
    missing = state.config.target_nodes - living - coming
    if missing <= 0 or asks_no_more(state):
        return decision
    if state.ask_at_s is not None and now_s < state.ask_at_s:
        return decision.model_copy(update={"state": wake_by(state, state.ask_at_s)})
    name = request_name(state.config, state.num_requests + 1)
    state = with_request(state, name, NodeRequest(count=missing, asked_s=now_s))
    state = changed(state, num_requests=state.num_requests + 1)
    state = wake_by(state, now_s + state.config.policy.rules.requests.answer_s)
    action = RequestNodes(request=name, count=missing)
    sentence = f"{missing} of {state.config.target_nodes} workers are missing: asked for as {name}"
    return followed(decision, said(state, ReasonCode.NODES_REQUESTED, sentence, action), decision.reason.code)


def nodes_granted(state: ControllerState, event: NodesGranted, now_s: float) -> Decision:
    """Note VMs that boot; fewer than asked for count as a refusal of the rest."""
    request = state.requests.get(event.request)
    if request is None or not request.count:
        return said(state, ReasonCode.IGNORED, f"{event.request} is not open")
    new = {node: now_s for node in event.nodes if node not in state.workers and node not in request.granted}
    short = len(new) < request.count
    notices = [notice for node in new if (notice := notice_of(state, node, now_s)) is not None]
    state = with_request(
        state, event.request, request.model_copy(update={"count": 0, "granted": request.granted | new})
    )
    state = wake_by(state, now_s + state.config.policy.rules.requests.boot_s)
    granted = said(state, ReasonCode.NODES_GRANTED, f"{', '.join(event.nodes)} boot")
    if short:
        refused = _refused(state, f"{event.request} is granted in part", now_s)
        granted = followed(granted, refused, granted.reason.code)
    else:
        granted = granted.model_copy(update={"state": changed(state, num_refused=0, ask_at_s=None)})
    for notice in notices:
        given_back = noticed_booting(granted.state, notice)
        if given_back is not None:
            granted = followed(granted, given_back, granted.reason.code)
    return granted.model_copy(update={"state": without_kept(granted.state, *event.nodes)})


def request_refused(state: ControllerState, event: RequestRefused, now_s: float) -> Decision:
    """Forget what was asked for, and ask again after a while: longer with each refusal in a row."""
    request = state.requests.get(event.request)
    if request is None or not request.count:
        return said(state, ReasonCode.IGNORED, f"{event.request} is not open")
    state = without_kept(with_request(state, event.request, request.model_copy(update={"count": 0})))
    why = f"{event.request} is refused: {event.cause}" + (f", {event.detail}" if event.detail else "")
    return _refused(state, why, now_s)


def with_appeared(state: ControllerState, event: NodeAppeared) -> ControllerState:
    """Take a node that is up out of what is awaited, whether its grant was heard of or not."""
    state = changed(state, num_absent=0) if state.num_absent else state
    for name, request in state.requests.items():
        if event.node in request.granted:
            return with_request(state, name, without_granted(request, event.node))
    named = state.requests.get(event.request) if event.request is not None else None
    if event.request is None or named is None or not named.count:
        return state
    return with_request(state, event.request, named.model_copy(update={"count": named.count - 1}))


def lost_booting(state: ControllerState, event: WorkerLost, now_s: float) -> Decision:
    """Await a VM no longer that went before it appeared, and ask for another; anybody else is not known.

    At once, unless a VM that was granted since the last such loss went as well: then after a pause that grows. One that
    is not fit for a worker counts as one that never appeared.
    """
    state = without_kept(state, *event.workers)
    for name, request in state.requests.items():
        if event.worker in request.granted:
            since_s = request.granted[event.worker]
            state = with_request(state, name, without_granted(request, event.worker))
            sentence = f"{event.worker} never appeared: {event.cause}"
            gone = said(state, ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
            return with_pause(gone, since_s, now_s, num_absent=int(event.unfit))
    return said(state, ReasonCode.IGNORED, f"{event.worker} is not known, or was lost before")


def asks_no_more(state: ControllerState) -> bool:
    """Whether VMs were granted and never appeared so often that further ones would only cost money."""
    return state.num_absent >= state.config.policy.rules.requests.max_absent


def why_no_more(state: ControllerState) -> str:
    """Say so, and what to look at."""
    return (
        f"{state.num_absent} times in a row VMs were granted and none of them joined: no further one is asked for; "
        "look at the log of such a VM's first boot, at what vms.environment installs, and at whether it reaches the "
        "manager's ports (docs/azure.md)"
    )


def nothing_comes(state: ControllerState) -> bool:
    """Whether there will be no more workers than are ready: none is asked for, awaited or being set up."""
    coming = state.requests or any(entry.node is NodeState.WARMING for entry in state.workers.values())
    return asks_no_more(state) and not coming


def with_pause(gone: Decision, since_s: float, now_s: float, num_absent: int = 0) -> Decision:
    """Put off the next request when attempt after attempt is lost before a worker is ready; each counts once.

    ``since_s``: when the one that was lost now was granted, or appeared; ``num_absent``: 1 where none appeared that
    is of use.
    """
    state, rules = gone.state, gone.state.config.policy.rules.requests
    if state.setup_lost_s is not None and since_s < state.setup_lost_s:
        return gone
    num_lost = state.num_setups_lost + 1
    state = changed(state, num_setups_lost=num_lost, setup_lost_s=now_s, num_absent=state.num_absent + num_absent)
    if num_lost > 1:
        wait_s = min(rules.backoff_s * float(2 ** min(num_lost - 2, 64)), rules.backoff_max_s)
        state = wake_by(changed(state, ask_at_s=max(state.ask_at_s or 0.0, now_s + wait_s)), now_s + wait_s)
    gone = gone.model_copy(update={"state": state})
    if num_absent and asks_no_more(state):
        gone = followed(gone, said(state, ReasonCode.NODE_ABSENT, why_no_more(state)))
    return gone


def noticed_booting(state: ControllerState, event: NoticeGiven) -> Decision | None:
    """Give a VM back that will be taken before it is of use; None: it is not one that boots."""
    for name, request in state.requests.items():
        if event.worker in request.granted:
            state = with_request(state, name, without_granted(request, event.worker))
            sentence = f"{event.worker} will be taken in {event.lead_s:g} s and is not up yet: it is given back"
            return said(state, ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=(event.worker,)))
    return None


def requests_due(state: ControllerState, now_s: float) -> Decision:
    """Send requests without an answer again, and give up VMs that do not appear."""
    rules = state.config.policy.rules.requests
    decision = said(state, ReasonCode.NOTHING_DUE, "nothing is due")
    for name, request in state.requests.items():
        late = tuple(node for node, since_s in request.granted.items() if now_s >= since_s + rules.boot_s)
        if late:
            left = with_request(decision.state, name, without_granted(request, *late))
            sentence = f"{', '.join(late)} did not appear within {rules.boot_s:g} s"
            released = said(left, ReasonCode.NODE_ABSENT, sentence, ReleaseNodes(nodes=late))
            released = with_pause(released, min(request.granted[node] for node in late), now_s, num_absent=1)
            decision = followed(decision, released)
        if request.count and now_s >= resend_at_s(state, request):
            decision = followed(decision, _unanswered(decision.state, name, now_s))
    return decision


def resend_at_s(state: ControllerState, request: NodeRequest) -> float:
    """Return when a request without an answer is sent again."""
    rules = state.config.policy.rules.requests
    return request.asked_s + min(rules.answer_s * float(2 ** (request.num_sent - 1)), rules.backoff_max_s)


def with_request(state: ControllerState, name: RequestId, request: NodeRequest) -> ControllerState:
    """Return the state with this request, or without it once nothing of it is awaited."""
    others = {other: entry for other, entry in state.requests.items() if other != name}
    return changed(state, requests={**others, name: request} if request.count or request.granted else others)


def without_granted(request: NodeRequest, *nodes: WorkerId) -> NodeRequest:
    """Return a request that waits for these nodes no longer."""
    granted = {node: since_s for node, since_s in request.granted.items() if node not in nodes}
    return request.model_copy(update={"granted": granted})


def _unanswered(state: ControllerState, name: RequestId, now_s: float) -> Decision:
    request = state.requests[name]
    if request.num_sent >= MAX_SENT:
        state = without_kept(with_request(state, name, request.model_copy(update={"count": 0})))
        return _refused(state, f"{name} was not answered, {MAX_SENT} times", now_s)
    again = request.model_copy(update={"num_sent": request.num_sent + 1, "asked_s": now_s})
    state = with_request(state, name, again)
    state = wake_by(state, resend_at_s(state, again))
    action: Action = RequestNodes(request=name, count=request.count)
    return said(state, ReasonCode.NODES_REQUESTED, f"{name} was not answered: asked again under its name", action)


def _refused(state: ControllerState, why: str, now_s: float) -> Decision:
    rules = state.config.policy.rules.requests
    wait_s = min(rules.backoff_s * float(2 ** min(state.num_refused, 64)), rules.backoff_max_s)
    state = changed(state, num_refused=state.num_refused + 1, ask_at_s=now_s + wait_s)
    return said(wake_by(state, now_s + wait_s), ReasonCode.REQUEST_REFUSED, f"{why}; the next request in {wait_s:g} s")
