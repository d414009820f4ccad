"""Prefect automations for heartbeat monitoring: crash flow runs that send no heartbeat.

`recovery.flow_runs` recovers the runs of its own node only. If a node is lost, its runs would stay
Running forever. The Prefect server receives a heartbeat from every run, and the first automation
sets a run to Crashed if it has sent none for too long. The server accepts a final state after a
crash, but no crash after a final state: a run that is still executed ends in the state that it
reports.

The second automation runs the ``reconcile`` deployment after a crash. It is separate, because the
last heartbeat of a short run can reach the server after its end, and the server then refuses the
crash: no repair must follow from it.

Three more automations watch the events of steps (`step_events`). They are created paused and do
nothing: a user adds an action, such as a notification, and switches them on.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from trinity_sync.orchestration.step_events import JOB_RESOURCE, PREFIX

HEARTBEAT_AUTOMATION = "trinity-sync: crash runs without heartbeats"
RECONCILE_AUTOMATION = "trinity-sync: reconcile after a crash"
HEARTBEAT = "prefect.flow-run.heartbeat"
CRASH = "prefect.flow-run.Crashed"
ENDS = {CRASH, *(f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled"))}
SAVE_FAILED_AUTOMATION = "trinity-sync: a save failed"
NO_COMMIT_AUTOMATION = "trinity-sync: a job has committed nothing for 30 minutes"
CORRUPTED_AUTOMATION = "trinity-sync: a step is corrupted"
NO_COMMIT_WITHIN = timedelta(minutes=30)
CRASH_WINDOW = timedelta(seconds=10)
"""Crashes within this window, such as those of one node, run ``reconcile`` once."""


def register_heartbeat_monitoring(
    client: SyncPrefectClient, watched: list[UUID], reconcile: UUID, *, silent_s: float
) -> None:
    """Create the automations, or update those that exist; paused ones stay paused.

    A run is crashed after ``silent_s`` without a heartbeat or a final state. ``reconcile`` runs
    after a crash and must not be in ``watched``: each of its crashes would run it again.
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


def create_alerts(client: SyncPrefectClient) -> None:
    """Create the automations that watch steps, paused; existing ones stay as users changed them."""
    jobs: dict[str, Any] = {
        "match": {"prefect.resource.id": f"{JOB_RESOURCE}*"},
        "for_each": {"prefect.resource.id"},
    }
    committed = f"{PREFIX}committed"
    failed = EventTrigger(
        **jobs, expect={f"{PREFIX}failed", f"{PREFIX}evicted"}, posture=Posture.Reactive
    )
    silent = EventTrigger(
        **jobs,
        after={committed},
        expect={committed},
        posture=Posture.Proactive,
        within=NO_COMMIT_WITHIN,
    )
    corrupted = EventTrigger(**jobs, expect={f"{PREFIX}corrupted"}, posture=Posture.Reactive)
    triggers = {
        SAVE_FAILED_AUTOMATION: failed,
        NO_COMMIT_AUTOMATION: silent,
        CORRUPTED_AUTOMATION: corrupted,
    }
    for name, trigger in triggers.items():
        if not client.read_automations_by_name(name):
            alert = AutomationCore(
                name=name,
                description="Paused: add an action, such as a notification, and switch it on. "
                "Created by trinity-sync deploy.",
                enabled=False,
                trigger=trigger,
                actions=[DoNothing()],
            )
            client.create_automation(alert)


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
