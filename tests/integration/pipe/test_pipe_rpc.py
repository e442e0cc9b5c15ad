"""``Pipe`` over three processes against one, in float64; ``pipe_job.py`` and ``pipe_odds_job.py`` run there."""

import subprocess
import sys
from typing import Any

import pipe_job
import pipe_odds_job
import pytest
import torch
from harness import run
from torch import nn
from undisturbed import until_undisturbed

from strategies.pipeline import Pipe, WithDevice
from strategies.pipeline.pipe.rpc_partitions import placement_of
from strategies.pipeline.pipe.with_device import partitions_of
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run(pipe_job.everything, timeout_seconds=240)


def assert_same(one: Any, other: Any, tolerance: float) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair, tolerance)
    else:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_trains_as_one_process(found, mode):
    """Losses, norms, gradients of inputs, all parameters and optimizer states of a U-Net."""
    assert_same(found["parity"][mode], found["parity"]["plain"], 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_and_batch_norm_are_those_of_one_process(found, mode):
    assert_same(found["parity"][f"random, {mode}"], found["parity"]["random, here"], 1e-9)


def test_micro_batches_overlap(found):
    """Of 4 micro-batches in 3 places; one after the other they would take 12, at best 6."""
    assert found["overlap"]["forward"] < 9
    assert found["overlap"]["backward"] < 9


def test_partitions_on_one_worker_draw_the_numbers_of_one_process(found):
    """In their passes and recomputations; and a step of one is not refused for what the other has drawn meanwhile."""
    assert_same(found["one_worker"]["on one worker"], found["one_worker"]["here"], 1e-9)


def test_errors(found):
    got = found["errors"]
    for places in (("w1", "w2", None), (None, "w1", "w2"), ("w2", None, "w1")):
        own = got[str(places)]
        assert (own["type"], own["message"]) == ("LookupError", "row 1")
        assert own["grads"] == pytest.approx(own["expected"])  # it goes on, and nothing of the failed pass is left
        assert own["calls"] < 8  # of 8 micro-batches
        if places[1] is not None:
            assert own["cause"].startswith("stage 1 (layers 1 to 1: Fails), process")
    for failure in got["wrong state"]:  # raised again by the next pass
        assert failure["type"] == "RuntimeError" and "size mismatch for 1.weight" in failure["message"]
    for value, expected in got["pass before it"].values():
        torch.testing.assert_close(value, expected)
    for place in ("w1", None):
        back = got[f"back, {place}"]
        assert (back["type"], back["message"]) == ("ArithmeticError", "on the way back")
        assert got[f"back, {place}, again"]["type"] == "nothing"
    assert "this value cannot be read here" in got["not delivered"]["message"]
    assert got["not delivered"]["seconds"] < 20  # and not only after RPC's time limit


def test_skips_are_freed(found):
    """On the worker that stashes and on the one that pops; after the forward pass, and after the backward pass."""
    assert found["freed"]["never"] == [0, 0, 0, 0]
    assert found["freed"]["always"][0] == 0  # the one that pops needs them to compute again
    assert found["freed"]["always"][2:] == [0, 0]


def test_out_of_the_ordinary(found):
    odds = found["odds"]
    assert odds["eval"] == (pytest.approx(0), False)
    assert odds["empty"] == [0, 1]
    for name in ("two passes", "zero_grad of the Pipe", "frozen in mid-run"):
        assert odds[name] < 1e-9, name
    assert "has already run through the pipeline" in odds["second backward"]["message"]
    assert odds["kept"] == [0, 0]
    assert odds["loaded"] == [2.0] * 9
    assert odds["keys"]
    assert odds["double"]["message"].startswith("this would change layers on worker1/cpu")
    assert "cannot be copied or pickled as long as" in odds["deepcopy"]["message"]
    assert odds["followed twice"]["message"] == "the Pipe already follows this SGD"


def test_follows_optimizers_with_states_and_with_parameters_that_have_been_replaced(found):
    """Something that refers to a parameter keeps it from becoming a stand-in in place."""
    assert {way: far for way, far in found["optimizers"].items() if far > 1e-9} == {}
    assert len(found["optimizers"]) == 7


def test_values_of_all_kinds(found):
    assert [name for name, same in found["mixed"].items() if not same] == []
    assert len(found["mixed"]) == 11 * len(MODES)


def test_partitions_here_and_elsewhere(found):
    got = found["partitions"]
    assert got["loaded"] == [True, True]
    assert got["shapes"] == [(1, 2)] * (3 + 2)  # the last of three micro-batches is not recomputed
    assert got["phases"] == [2, 2]
    assert "has another layer, parameter, buffer or hook" in got["hook elsewhere"]["message"]


def test_refusals(found):
    messages = {name: got["message"] for name, got in found["refusals"].items()}
    for name in ("step of one that is not followed", "zero_grad of one that is not followed", "torch's clipping"):
        assert "optimizer = pipe.follow(optimizer)" in messages[name]
    assert messages["two"] == "this SGD has parameters of workers of another Pipe, too; make an optimizer for each Pipe"
    assert messages["unknown worker"] == "WithDevice names worker9, but the RPC workers are worker0, worker1, worker2"
    assert "parameter 2.weight is shared by layers on worker1/cpu and on cpu" in messages["shared"]
    assert "layer 0, a Linear, cannot be sent to another process" in messages["not picklable"]
    assert "partition 0 on worker1/cuda:7" in found["refusals"]["no device there"]["cause"]
    assert found["refusals"]["after all that"]["type"] == "nothing"


def test_two_processes_train_as_one():
    assert_same(*run(pipe_job.two_processes), 1e-9)


def test_a_killed_worker():
    def ended_soon(got):
        assert got["seconds"] < 10

    got = until_undisturbed(lambda: run(pipe_odds_job.killed), ended_soon)
    assert got["forward"]["type"] == got["next"]["type"] == "WorkerLost"
    assert (
        "partition 1 on worker2/cpu (layers 1 to 1: Naps), RPC worker worker2, did not answer"
        in got["forward"]["message"]
    )


def test_private_rpc():
    got = run(pipe_odds_job.private_rpc)
    assert got["while a Pipe lives"] == ["127.0.0.1"]
    assert got["value"] == [2, 1]
    assert got["afterwards"] == ([], False)
    assert "already initialized with worker_id: 0" in got["as another rank"]["message"]
    assert (got["sum"], got["local"]) == ([2, 2], [2, 1])
    assert "call init_rpc once, before the first Pipe of a process" in got["placed"]["message"]


def test_a_process_ends_while_a_pipe_lives():
    code = (
        "import torch\nfrom strategies.pipeline import Pipe\npipe = Pipe(torch.nn.Sequential(torch.nn.Linear(1, 1)))\n"
    )
    code += "output = pipe(torch.rand(2, 1))\nassert 'pytorch_lightning' not in __import__('sys').modules"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("places", "process_of"),
    [
        (("a/cpu", "b/cpu", None), (0, 1, 2)),
        ((None, "a/cpu", None), (1, 0, 1)),
        ((None, "a/cpu", "b/cpu"), (2, 0, 1, 2)),  # the outputs go to a chunk without layers
    ],
)
def test_the_process_of_the_pipe_has_the_last_chunk(places, process_of):
    layers = [nn.Linear(1, 1) if place is None else WithDevice(nn.Linear(1, 1), place) for place in places]
    assert placement_of(partitions_of(nn.Sequential(*layers), here="me")).process_of == process_of


def test_needs_rpc():
    with pytest.raises(RuntimeError, match=r"layers are placed on worker1, but RPC has not been initialised"):
        Pipe(nn.Sequential(WithDevice(nn.Linear(1, 1), "worker1/cpu")))
