"""A ticket seals an image; a torn, edited or forged ticket is refused."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trinity_sync.errors import TicketError
from trinity_sync.snapshot.ticket import Ticket, read_ticket, seal, ticket_path

TICKET = Ticket(
    image="ab" * 16,
    root="/ckpts",
    run=2,
    run_key="abc",
    step=40,
    kind="checkpoint",
    role="actor",
    component="model",
    rank=1,
    world_size=2,
    components=("model", "optim"),
    roles=("actor", "critic"),
    path="actor/model_world_size_2_rank_1.pt",
    form="file",
    nbytes=123,
    sealed_at=1.5,
    monotonic_s=2.5,
    stall_s=0.25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_ticket_with_any_byte_changed_or_cut_is_never_taken_for_a_good_one(
    tmp_path: Path, data: st.DataObject
) -> None:
    slot = tmp_path / "a.slot"
    seal(slot, TICKET)
    good = ticket_path(slot).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:at]
    else:
        bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    ticket_path(slot).write_bytes(bad)
    try:
        assert read_ticket(slot) == TICKET  # white space, or the same byte again
    except TicketError as error:
        assert str(ticket_path(slot)) in str(error)  # noqa: PT017
