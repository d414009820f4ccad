"""A Prefect automation that ends flow runs of which nothing is heard any more.

`mend` knows the processes of its own node only. Where a whole node is gone, or no worker comes back
to it, its runs would stay Running for ever, and so would whoever waits for them. Prefect's server
hears a heartbeat of every run; this automation shows a run as Crashed that has been silent for
long, and has the ``reconcile`` deployment run. The server takes an end over a crash and no crash
over an end: a run that lives after all ends as what it reports, and one that has ended stays so.
"""

from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

NAME = "trinity-sync: silent runs end as crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDED = tuple(f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Crashed", "Cancelled"))


def watch_for_silence(
    client: SyncPrefectClient, watched: list[UUID], reconcile: UUID, *, silent_s: float
) -> None:
    """Make the automation, or bring the one that is there up to date; paused, it stays paused.

    Args:
        client: client of the Prefect server.
        watched: ids of the deployments whose runs are listened for. That of ``reconcile`` is not
            to be among them: each of its own crashes would begin another.
        reconcile: id of the deployment that is run after a crash.
        silent_s: seconds without a heartbeat or an end after which a run counts as crashed.
    """
    found = client.read_automations_by_name(NAME)
    # types are spelled out because an update sends no defaults
    wanted = AutomationCore(
        name=NAME,
        description=f"Without a heartbeat for {silent_s:g} s; made by trinity-sync deploy.",
        enabled=all(each.enabled for each in found),
        trigger=EventTrigger(
            type="event",
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.role": "deployment",
                "prefect.resource.id": [f"prefect.deployment.{each}" for each in watched],
            },
            for_each={"prefect.resource.id"},
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDED},
            posture=Posture.Proactive,
            within=timedelta(seconds=silent_s),
        ),
        actions=[
            ChangeFlowRunState(
                type="change-flow-run-state",
                name=None,
                state=StateType.CRASHED,
                force=False,
                message=f"Nothing was heard of its process for {silent_s:g} s.",
            ),
            RunDeployment(
                type="run-deployment",
                source="selected",
                deployment_id=reconcile,
                parameters=None,
                job_variables=None,
            ),
        ],
    )
    if not found:
        client.create_automation(wanted)
        return
    client.update_automation(found[0].id, wanted)
    for twin in found[1:]:  # of two that deployed at once
        client.delete_automation(twin.id)
