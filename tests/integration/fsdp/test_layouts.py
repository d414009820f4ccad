"""The images of a real FSDP2 state: laid out once, and filled again at each save."""

from pathlib import Path

from torch.distributed.tensor import DTensor

from tests.integration.fsdp.models import Trained
from tests.support.states import copied, differences
from tests.unit.snapshot.test_image import filled, loaded
from trinity_sync.snapshot.image import lay_out


def test_the_layout_of_a_trained_state_is_used_again(one_rank: None, tiny: Path) -> None:
    trained = Trained(tiny, 2)
    trained.step()

    def states() -> dict[str, object]:
        return {"model": dict(trained.model.state_dict()), "optim": trained.optimizer.state_dict()}

    layouts = {name: lay_out(state)[0] for name, state in states().items()}
    trained.optimizer.param_groups[0]["lr"] = 1e-3  # as a schedule that has come to its end
    for _ in range(2):
        layouts = {name: lay_out(state, layouts[name])[0] for name, state in states().items()}
        trained.optimizer.zero_grad()
    for name, state in states().items():
        again, storages = lay_out(state, layouts[name])
        assert again is layouts[name]
        found = loaded(filled(again, storages), weights_only=False)
        assert differences(copied(state), copied(found)) == []
        assert [like(mine) for mine in dtensors(found)] == [like(own) for own in dtensors(state)]


def test_a_dtensor_that_carries_an_attribute_is_laid_out_with_it(
    one_rank: None, tiny: Path
) -> None:
    state = dict(Trained(tiny, 2).model.state_dict())
    known, _ = lay_out(state)
    tagged = next(iter(state.values()))
    tagged.tag = "mine"
    layout, storages = lay_out(state, known)
    assert layout is not known
    found = loaded(filled(layout, storages), weights_only=False)
    assert [tensor.__dict__ for tensor in found.values()][:2] == [{"tag": "mine"}, {}]


def dtensors(state: object) -> list[DTensor]:
    """All that are in nested dicts."""
    if isinstance(state, dict):
        return [found for value in state.values() for found in dtensors(value)]
    return [state] if isinstance(state, DTensor) else []


def like(tensor: DTensor) -> tuple[object, ...]:
    """All of a DTensor but its data."""
    return tensor._spec, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
