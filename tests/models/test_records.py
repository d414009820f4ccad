"""Whatever is written in a record, its reader gives a typed record or the error that it documents.

Records of every kind are made as the product makes them; then values are exchanged, removed and
added at random places, and the digest is made right again: as a person would, or another release
that forgot to raise the format.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    FormatError,
    SpoolError,
    SupersededError,
    TicketError,
)
from trinity_sync.fs.records import (
    Count,
    Record,
    add_digest,
    decode_body,
    decode_record,
    encode_record,
)
from trinity_sync.layout import ITERATION_FILES, step_folder
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.ticket import read_cached_file, read_ticket
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    mark_corrupted,
    read_corruption,
    read_latest_pointer,
)
from trinity_sync.storage.job_settings import (
    is_replicated,
    read_job_settings,
    record_replicated,
    write_job_settings,
)
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import MetricsLog, read_metrics, write_metrics
from trinity_sync.storage.placement import read_placement
from trinity_sync.storage.runs import list_runs, open_run, refuse_superseded
from trinity_sync.storage.save_functions import FunctionStatus, read_statuses, write_status
from trinity_sync.storage.steps_in_use import list_leases, list_pins, list_steps_in_use, pin, tag


@dataclass(frozen=True)
class Kind:
    """One kind of record."""

    path: Path
    read: Callable[[], Any]
    """As the product reads it."""
    errors: tuple[type[Exception], ...] = ()
    """What the reader documents."""


@pytest.fixture
def records(job: Job) -> Iterator[dict[str, Kind]]:
    root, private = job.root, job.root / ".trinity_sync"
    open_run(root, "first", 0)
    for number in (1, 2):
        job.stage(number, {"model": {"w": torch.zeros(3)}})
    manifest = job.commit(1)
    (note,) = job.spool.folder.glob("*.kept")
    (ticket,) = job.spool.folder.glob("*.ticket")
    status = FunctionStatus("f", 1, 2, "checkpoint", 0, "1/1", "finished", files=("a",))
    write_status(job.spool, replace(status, run_key=job.key_of(1)))
    pin(root, 1, "the best")
    tag(root, 1, "good")
    write_metrics(root, 1, 1, {"reward": 0.5})
    write_job_settings(root, {"remote": "file:///copies", "remote_required": True})
    record_replicated(root, "file:///copies", manifest)
    step = step_folder(root, 1)
    slots = {path: path.with_name(path.name.rpartition(".")[0]) for path in (note, ticket)}
    with acquire_lease(root, 1, "reader") as lease:
        mark = step / "corrupted.json"
        mark_corrupted(root, 1, Corruption({"actor/a.pt": "is missing"}, 1.7e9))
        yield {
            "manifest": Kind(
                step / "manifest.json",
                lambda: (read_manifest(root, 1), find_newest(root))[0],
                (CommitError,),
            ),
            "run": Kind(
                private / "runs/1.json",
                lambda: (list_runs(root), refuse_superseded(root, 1, "first", 4))[0],
                (CommitError, SupersededError),
            ),
            "pin": Kind(private / "pins/1.json", lambda: list_pins(root)),
            "tag": Kind(private / "pins/good.json", lambda: list_pins(root), (CommitError,)),
            "lease": Kind(lease.path, lambda: (list_leases(root), list_steps_in_use(root))[0]),
            "ticket": Kind(ticket, lambda: read_ticket(slots[ticket]), (TicketError,)),
            "receipt": Kind(
                next(job.spool.receipts.iterdir()),
                lambda: list(read_statuses(job.spool, job.save(2))),
                (SpoolError,),
            ),
            "note": Kind(note, lambda: read_cached_file(slots[note])),
            "identity": Kind(
                private / "identity.json", lambda: read_identity(root), (CommitError,)
            ),
            "placement": Kind(
                private / "placements/1.actor.json",
                lambda: read_placement(root, 1, "first", "actor"),
                (CommitError,),
            ),
            "corruption": Kind(
                mark, lambda: (read_corruption(root, 1), str(read_corruption(root, 1)))[0]
            ),
            "metrics": Kind(private / "metrics/1.json", lambda: read_metrics(root, 1, 1)),
            "job": Kind(private / "job.json", lambda: read_job_settings(root), (CommitError,)),
            "stored": Kind(private / "stored/1.json", lambda: is_replicated(root, manifest)),
            "owner": Kind(job.spool.folder / "job.json", job.spool.read_root),
        }


NAMES = (
    *("manifest", "run", "pin", "tag", "lease", "ticket", "receipt", "note", "placement"),
    *("corruption", "metrics", "job", "stored", "owner"),
)
GARBAGE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 5),
        st.sampled_from(
            [2**31, 2**63, 2**70, 10**400, -(10**400), 1e308, 1e999, -1e999, 1e999 * 0]
        ),
        st.sampled_from(["", "0", "1", "actor", "checkpoint", "../../x", "/etc", "a\0b", "\ud800"]),
        st.sampled_from(["0-1", "1-0", "0-99999999999", "-1", "0-0", "\u0663", "0,0", "9" * 5000]),
        st.text(max_size=5),
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from places(value[key], (*at, key))


def changed(body: Any, data: st.DataObject) -> Any:
    """The body with something else at one place, without what is there, or with more."""
    made = deepcopy(body)
    *above, last = data.draw(st.sampled_from([at for at in places(body) if at]))
    holder = made
    for key in above:
        holder = holder[key]
    how = data.draw(st.sampled_from(["other", "other", "other", "none", "more"]))
    if how == "other":
        holder[last] = data.draw(GARBAGE)
    elif how == "none":
        del holder[last]
    elif isinstance(holder, dict):
        holder[data.draw(st.text(max_size=5))] = data.draw(GARBAGE)
    else:
        holder.append(data.draw(GARBAGE))
    return made


def require_typed(value: Any) -> None:
    """Every value that a record holds is one that files, databases and dates can have."""
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        for each in fields(value):
            require_typed(getattr(value, each.name))
            found = getattr(value, each.name)
            if hints[each.name] in (int, float, str, bool):
                assert type(found) is hints[each.name], (each.name, found)
            if each.name.endswith("_at"):
                datetime.fromtimestamp(found)
    elif isinstance(value, list | tuple):
        for each in value:
            require_typed(each)
    elif isinstance(value, dict):
        require_typed(list(value.values()))
    elif isinstance(value, int | float):
        assert 0 <= value < 2**63
        assert isfinite(value)
    else:
        assert value is None or isinstance(value, str | Path), value


@pytest.mark.parametrize("name", NAMES)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
@given(data=st.data())
def test_a_record_of_wrong_values_is_none_or_the_error_of_its_reader(
    records: dict[str, Kind], name: str, data: st.DataObject
) -> None:
    kind = records[name]
    good = kind.path.read_bytes()
    body = json.loads(good)
    body.pop("digest", None)
    for _ in range(data.draw(st.integers(1, 2))):
        if body:
            body = changed(body, data)
    try:
        kind.path.write_text(add_digest(json.dumps(body)))
        with suppress(FormatError, *kind.errors):
            found = kind.read()
            require_typed(found) if name != "metrics" else [float(each) for each in found.values()]
    finally:
        kind.path.write_bytes(good)


TEXTS = ["[" * 100_000, '{"step": ' + "9" * 5000 + "}", "null", "{}", '"a"', "\udcff\udcfe", "\0"]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_is_no_record_is_none_or_the_error_of_its_reader(
    records: dict[str, Kind], name: str
) -> None:
    kind = records[name]
    for text in TEXTS:
        kind.path.write_bytes(text.encode(errors="surrogateescape"))
        with suppress(*kind.errors):
            kind.read()


@pytest.mark.parametrize("name", ["ticket", "owner"])
def test_a_folder_in_a_jobs_part_of_the_spool_does_not_end_the_saver_of_all(
    records: dict[str, Kind], name: str
) -> None:
    kind = records[name]
    kind.path.unlink()
    kind.path.mkdir()
    with suppress(*kind.errors):
        assert kind.read() is None


@pytest.mark.parametrize("name", ["manifest", "run", "ticket"])
def test_a_text_of_any_depth_is_no_record(records: dict[str, Kind], name: str) -> None:
    kind = records[name]
    for depth in range(800, 1000):
        nested = "[" * depth + "]" * depth
        kind.path.write_text(add_digest(f'{{"format": 1, "step": {nested}}}'))
        with pytest.raises(kind.errors):
            kind.read()


@dataclass(frozen=True)
class Note(Record, format=1):
    step: Count
    values: dict[str, float]
    text: str = ""


NOTE = Note(4, {"loss": 0.5}, "caf\u00e9")
TEXT = encode_record(NOTE)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_text_that_differs_in_any_byte_is_no_record(indent: int | None) -> None:
    good = encode_record(NOTE, indent=indent).encode()
    assert decode_record(Note, good, "a") == NOTE
    others = {good[:at] for at in range(len(good))}
    for at in range(len(good)):
        others |= {good[:at] + more + good[at + skip :] for more in (b" ", b"e") for skip in (0, 1)}
    for other in others - {good}:
        with pytest.raises(ValueError, match="its digest differs"):
            decode_record(Note, other, "a")


@pytest.mark.parametrize(
    "text",
    [
        TEXT + "\n",
        TEXT + "\0",
        TEXT + TEXT,
        "\ufeff" + TEXT,
        TEXT.replace("}", ', "digest": ""}'),
        TEXT.removesuffix("}") + ', "step": 5}',
        json.dumps({**json.loads(TEXT), "text": TEXT}),
        json.dumps({**json.loads(TEXT), "text": TEXT}, indent=1),
        json.dumps(TEXT),
        json.dumps(json.loads(TEXT), sort_keys=True, indent=1),
    ],
)
def test_what_is_added_to_a_record_makes_it_none(text: str) -> None:
    for decode in (
        lambda: decode_record(Note, text.encode(), "a"),
        lambda: decode_body(text.encode()),
    ):
        with pytest.raises(ValueError, match="its digest differs"):
            decode()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"step": 4, "values": {}}',
        '{"format": true, "step": 4, "values": {}}',
        '{"format": 1.0, "step": 4, "values": {}}',
        '{"format": 1, "step": 4, "values": {"loss": "NaN"}}',
        '{"format": 1, "step": NaN, "values": {}}',
        '{"format": 1, "step": 4, "values": {}, "text": "a}',
        '{"format": 1, "step": 4, "values": {}, "more": NaN, "deep": ' + "[" * 10**5,
        '{"format": 1, "step": 4, "values": {}, "deep": ' + "[" * 10**5 + "]" * 10**5 + "}",
    ],
    ids=lambda text: text[:60],
)
def test_a_text_with_its_digest_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_record(Note, add_digest(text).encode(), "a")


@pytest.mark.parametrize("more", ["NaN", "Infinity", '"\\ud800"', "1e999", "9" * 400])
def test_a_value_that_few_readers_of_json_know_hides_no_other(more: str) -> None:
    text = (
        f'{{"digest": "", "step": 3, "step": 4, "values": {{"loss": 1}}, "more": {more}, "format": '
    )
    good = add_digest(text + "1}").encode()
    assert decode_record(Note, good, "a") == Note(4, {"loss": 1.0})
    assert decode_body(good).keys() == {"format", "step", "values", "more"}
    with pytest.raises(FormatError) as found:
        decode_record(Note, add_digest(text + "2}").encode(), "a")
    assert found.value.run is None


@pytest.mark.parametrize(
    "text", ["9" * 5000, "9" * 40, "007", "\u0663", "-1", "1e3", "", "nan", "4.0"]
)
def test_an_iteration_file_that_names_no_step_names_none(job: Job, text: str) -> None:
    (job.root / ITERATION_FILES["checkpoint"]).write_text(text)
    assert read_latest_pointer(job.root, "checkpoint") is None


def test_a_metric_that_no_float_holds_is_refused_and_nan_is_kept(job: Job) -> None:
    log = MetricsLog(job.root, lambda step: 1)
    with pytest.raises(ConfigError, match="is not a number"):
        log.record(4, {"reward": 10**400})
    log.record(4, {"loss": float("inf"), "reward": float("nan")})
    log.close()
    found = read_metrics(job.root, 1, 4)
    assert found["loss"] == float("inf")
    assert found["reward"] != found["reward"]
