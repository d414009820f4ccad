"""Prefect automations for heartbeat monitoring: they end flow runs that send no heartbeat.

`recovery.flow_runs` knows the processes of its own node only. Where a whole node is gone, or no
worker comes back to it, its runs would stay Running for ever, and all that wait for them would wait
for ever. Prefect's server receives a heartbeat of every run; the first automation shows a run as
Crashed that has sent none for long. The server accepts a final state after a crash and no crash
after a final state: a run that is executed after all ends as what it reports, and one that has
ended stays so.

The second runs the ``reconcile`` deployment after a crash. It is a separate automation because a
heartbeat that reaches the server later than the end of a short run looks like a missing one: its
crash is refused, and nothing else must follow from it.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

SILENT = "trinity-sync: crash runs without heartbeats"
CRASHED = "trinity-sync: reconcile after a crash"
HEARTBEAT = "prefect.flow-run.heartbeat"
CRASH = "prefect.flow-run.Crashed"
ENDS = {CRASH, *(f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled"))}
TOGETHER = timedelta(seconds=10)
"""Crashes that follow each other within it, such as those of one node, are reconciled once."""


def register_heartbeat_monitoring(
    client: SyncPrefectClient, watched: list[UUID], reconcile: UUID, *, silent_s: float
) -> None:
    """Create the automations, or update those that exist; paused ones stay paused.

    Args:
        client: client of the Prefect server.
        watched: ids of the deployments whose runs are monitored. That of ``reconcile`` must not be
            among them: each of its own crashes would begin another.
        reconcile: id of the deployment that is run after a crash.
        silent_s: seconds without a heartbeat or an end after which a run counts as crashed.
    """
    # types and other defaults are spelled out because an update sends none that were not set
    ours: dict[str, Any] = {
        "type": "event",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {
            "prefect.resource.role": "deployment",
            "prefect.resource.id": [f"prefect.deployment.{each}" for each in watched],
        },
    }
    silence = EventTrigger(
        **ours,
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
        message=f"No heartbeat of its process for {silent_s:g} s.",
        force=False,
    )
    _register(client, SILENT, f"Without a heartbeat for {silent_s:g} s.", silence, crash)
    crashes = EventTrigger(**ours, expect={CRASH}, posture=Posture.Reactive, within=TOGETHER)
    run = RunDeployment(
        type="run-deployment",
        source="selected",
        deployment_id=reconcile,
        parameters=None,
        job_variables=None,
    )
    _register(client, CRASHED, "Repairs what the crash left.", crashes, run)


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
        description=f"{description} Made by trinity-sync deploy.",
        enabled=all(each.enabled for each in found),
        trigger=trigger,
        actions=[action],
    )
    if not found:
        client.create_automation(wanted)
        return
    client.update_automation(found[0].id, wanted)
    for twin in found[1:]:  # of two that deployed at once
        client.delete_automation(twin.id)
