"""The stack side: worker, deployments, automations and recovery; and `report`, without Prefect."""
