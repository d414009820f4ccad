"""Prefect automations for heartbeat monitoring: crash flow runs that send no heartbeat.

`recovery.flow_runs` recovers the runs of its own node only. If a node is lost, its runs would stay
Running forever. The Prefect server receives a heartbeat from every run, and the first automation
sets a run to Crashed if it has sent none for too long. The server accepts a final state after a
crash, but no crash after a final state: a run that is still executed ends in the state that it
reports.

The second automation runs the ``reconcile`` deployment after a crash. It is separate, because the
last heartbeat of a short run can reach the server after its end, and the server then refuses the
crash: no repair must follow from it.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

HEARTBEAT_AUTOMATION = "trinity-sync: crash runs without heartbeats"
RECONCILE_AUTOMATION = "trinity-sync: reconcile after a crash"
HEARTBEAT = "prefect.flow-run.heartbeat"
CRASH = "prefect.flow-run.Crashed"
ENDS = {CRASH, *(f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled"))}
CRASH_WINDOW = timedelta(seconds=10)
"""Crashes within this window, such as those of one node, run ``reconcile`` once."""


def register_heartbeat_monitoring(
    client: SyncPrefectClient, watched: list[UUID], reconcile: UUID, *, silent_s: float
) -> None:
    """Create the automations, or update those that exist; paused ones stay paused.

    Args:
        client: Client of the Prefect server.
        watched: Ids of the deployments whose runs are monitored. ``reconcile`` must not be among
            them, because each of its crashes would run it again.
        reconcile: Id of the deployment to run after a crash.
        silent_s: Seconds without a heartbeat or a final state after which a run is crashed.
    """
    # an update sends only fields that were set, so types and other defaults are set explicitly
    monitored: dict[str, Any] = {
        "type": "event",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {
            "prefect.resource.role": "deployment",
            "prefect.resource.id": [f"prefect.deployment.{each}" for each in watched],
        },
    }
    missing_heartbeat = EventTrigger(
        **monitored,
        for_each={"prefect.resource.id"},
        after={HEARTBEAT},
        expect={HEARTBEAT, *ENDS},
        posture=Posture.Proactive,
        within=timedelta(seconds=silent_s),
    )
    crash = ChangeFlowRunState(
        type="change-flow-run-state",
        name=None,
        state=StateType.CRASHED,
        message=f"No heartbeat for {silent_s:g} s.",
        force=False,
    )
    _register(
        client,
        HEARTBEAT_AUTOMATION,
        f"Crashes runs that send no heartbeat for {silent_s:g} s.",
        missing_heartbeat,
        crash,
    )
    crashes = EventTrigger(
        **monitored, expect={CRASH}, posture=Posture.Reactive, within=CRASH_WINDOW
    )
    run = RunDeployment(
        type="run-deployment",
        source="selected",
        deployment_id=reconcile,
        parameters=None,
        job_variables=None,
    )
    _register(client, RECONCILE_AUTOMATION, "Repairs what a crash left.", crashes, run)


def _register(
    client: SyncPrefectClient,
    name: str,
    description: str,
    trigger: EventTrigger,
    action: ChangeFlowRunState | RunDeployment,
) -> None:
    found = client.read_automations_by_name(name)
    wanted = AutomationCore(
        name=name,
        description=f"{description} Created by trinity-sync deploy.",
        enabled=all(each.enabled for each in found),
        trigger=trigger,
        actions=[action],
    )
    if not found:
        client.create_automation(wanted)
        return
    client.update_automation(found[0].id, wanted)
    for duplicate in found[1:]:  # created by two concurrent deploys
        client.delete_automation(duplicate.id)
