"""What to do about an error, by its class: the part of the index of messages that no code has."""

WHAT_TO_DO = {
    "TrinitySyncError": "Base class: catch it to handle all errors of trinity_sync.",
    "ConfigError": "Correct the setting, path or argument that the message names.",
    "UnsupportedTorchError": (
        "Install a supported torch, see [Upgrade](../operations/upgrade.md#supported-versions)."
    ),
    "UnsupportedPrefectError": (
        "Install a supported Prefect in the stack's environment, see "
        "[Upgrade](../operations/upgrade.md#supported-versions)."
    ),
    "RootError": (
        "Put the root on a file system that has the operation, see "
        "[File systems](../concepts/file-systems.md); run `trinity-sync doctor ROOT` on each node."
    ),
    "MissingPackageError": "Install the extra that the message names, in this environment.",
    "FormatError": (
        "Upgrade trinity-sync in the environment that the message names, and restart it. Nothing "
        "is lost meanwhile: what it names is neither read nor removed."
    ),
    "SpoolError": "Check the folder that the message names: its owner, its mode 0700, its space.",
    "SpoolFullError": (
        "Free shared memory or enlarge it (`df -h /dev/shm`), or set `TRINITY_SYNC_SLOTS=1`, see "
        "[Size and tune](../operations/size.md#shared-memory)."
    ),
    "HiddenSpoolError": (
        "Start the stack where the training runs, or have both share the host's `/dev/shm`. Saves "
        "go on: the saver of the node commits them."
    ),
    "TicketError": (
        "Save the step again. If it repeats, another process changes files of the spool."
    ),
    "ImageError": (
        "Change the state that the message names: a tensor that changed during the copy, or an "
        "object that cannot be pickled."
    ),
    "SaveError": "See its subclasses.",
    "MissingShardsError": (
        "Read the log of the rank that the message names: it died or did not call `save`. All "
        "ranks and roles have to submit the step."
    ),
    "SupersededError": (
        "Nothing, if you resumed from an earlier step. Otherwise two trainings use this root: end "
        "one of them."
    ),
    "EvictedError": (
        "This step is lost; nothing else is. If it repeats, saves come faster than they are "
        "written: see [Reduce the stall](../how-to/stall.md#which-setting-for-which-symptom)."
    ),
    "RemovedStepError": "Nothing: the save was committed, and retention or a later run removed it.",
    "RootAwayError": (
        "Mount the root or move it back: the save waits, see "
        "[A root that is away](../concepts/save.md#a-root-that-is-away)."
    ),
    "SaveFailedError": (
        "Read the reasons in the message, correct the cause, then `trinity-sync retry ROOT STEP` "
        "while the images are still in memory, or save the next step."
    ),
    "SaveTimeoutError": (
        "Wait longer, or check the stack with `trinity-sync status`: the save may still commit."
    ),
    "CommitError": (
        "Load another step, or fetch this step from its remote: `trinity-sync ls ROOT` shows which "
        "steps are valid."
    ),
    "ManifestError": "As for CommitError: the step does not count.",
    "ExportError": "Correct what the message names and export the step again.",
    "RemoteError": (
        "Check the URL, the credentials and the network of the remote. Steps stay in the root and "
        "are sent with the next save, or by a retry."
    ),
    "CorruptedCopyError": "Copy the step again, or fetch another step.",
    "StepInUseError": (
        "Wait until its readers have finished, or remove the pin or tag that the message names."
    ),
    "RootInUseError": (
        "End the process that the message names, or use another root. Read steps next to it with "
        "`Checkpoints`; supersede it with `take_over=True`."
    ),
    "LockTimeoutError": (
        "End the process that the message names; the kernel releases its locks. Then try again."
    ),
    "CatalogError": (
        "Check the catalog's database. The files are not affected; `trinity-sync reconcile` fills "
        "the catalog again."
    ),
    "WeightSyncError": (
        "Check that the trainer publishes weights and that the reader sees its root or memory."
    ),
    "DeltaError": "Read the newest version again, or publish the step again as a complete version.",
    "StackError": "Start the stack with `trinity-sync up`, and look at `trinity-sync logs`.",
    "PrefectApiError": (
        "Check the URL and password that the message names; `trinity-sync doctor` tries them."
    ),
    "RequestRefusedError": (
        "Install the same release in client and stack, then `trinity-sync deploy`."
    ),
}
