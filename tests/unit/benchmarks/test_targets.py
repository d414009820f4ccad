"""What the bench says of the figures that are promised."""

from benchmarks.targets import MEMORY, OURS, TRAINED, Medians, Result, results

OVERLAPPED = "trinity_sync, overlapped"


def of(figure: str, medians: Medians) -> Result:
    return next(each for each in results(medians) if each.target.figure == figure)


def loss(ours: float, **peers: float) -> Result:
    names = {"torch": "torch.save", "process": "DCP async, process", "beside": "DCP async, thread"}
    medians = {(TRAINED, names[peer], "loss a save"): value for peer, value in peers.items()}
    if "beside" in peers:
        medians[TRAINED, "DCP async, thread, overlapped", "loss a save"] = peers["beside"] / 2
    medians[TRAINED, OVERLAPPED, "loss a save"] = ours
    found = [each for each in results(medians) if each.target.above[1] == OVERLAPPED]
    return next(each for each in found if "loss" in each.target.figure)


def test_the_best_peer_is_the_lowest_of_all_their_variants() -> None:
    assert loss(0.1, torch=2.0, process=0.5).value == 0.2
    assert loss(0.1, torch=2.0, process=0.5, beside=0.5).value == 0.4


def test_what_was_not_measured_or_is_lost_in_the_noise_is_not_met() -> None:
    assert loss(0.1).value is None
    assert not loss(0.1, torch=-0.01).met
    assert loss(-0.01, torch=0.2).met


def test_a_figure_may_be_bounded_by_itself() -> None:
    figure = "extra memory a byte of state, two slots"
    assert of(figure, {(MEMORY, OURS, "memory a byte"): 2.0}).met
    assert not of(figure, {(MEMORY, OURS, "memory a byte"): 2.2}).met
    assert not of(figure, {}).met
