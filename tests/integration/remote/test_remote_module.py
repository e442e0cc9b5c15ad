"""RemoteModule: one process's losses, gradients and states from a module on another one, and what mistakes are told."""

import re
from typing import Any

import pytest
import remote_module_job
import torch
from harness import run
from torch.testing import assert_close

from strategies import RemoteModule


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run(remote_module_job.job, timeout_seconds=150)


@pytest.mark.parametrize("name", remote_module_job.OPTIMIZERS)
def test_trains_as_in_one_process(seen: dict[str, Any], name: str) -> None:
    cls, options = remote_module_job.OPTIMIZERS[name]
    expected, actual = remote_module_job.both_ways(remote_module_job.Net(), cls, **options), seen[name]
    assert expected.keys() == actual.keys()
    assert list(expected["state"]) == list(actual["state"])
    assert expected["losses"][-1] != expected["losses"][0]
    # The processes run the same operations in the same order.
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert seen["imports Lightning"] is False


def test_modes_futures_and_what_a_model_around_it_sees(seen: dict[str, Any]) -> None:
    assert (seen["modes"][True] == 0).any() and not (seen["modes"][False] == 0).any()
    assert seen["is_future"]
    assert seen["in words"] == "Sequential(\n  (0): RemoteModule(Embedding on owner/cpu)\n)"
    assert seen["counted"] == 2  # those of the local layer
    assert seen["dtypes"] == [torch.float32, torch.float64, torch.float64, torch.float16]
    assert [grad.tolist() for grad in seen["own process"]] == [[[1, 1]], [1]]


def test_sparse_gradients_and_freezing(seen: dict[str, Any]) -> None:
    is_sparse, grad = seen["sparse"]
    assert is_sparse and grad.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]
    assert seen["changed"] == [False, True, False, True, False]
    assert seen["zeroed"] == [None]
    assert seen["frozen"] is False


def test_optimizer_states_go_on_elsewhere(seen: dict[str, Any]) -> None:
    assert_close(seen["saved"]["one"], seen["saved"]["there"], rtol=0, atol=0)
    assert seen["saved"]["lr"] == 0.1


def test_layers_load_the_states_of_each_version_as_in_one_process(seen: dict[str, Any]) -> None:
    expected, actual = remote_module_job.migrated(remote_module_job.versioned()), seen["migrated"]
    assert torch.equal(actual.pop("weight"), expected.pop("weight"))
    assert actual == expected


def test_autocast_and_inference_mode_of_the_caller_apply(seen: dict[str, Any]) -> None:
    expected, actual = remote_module_job.in_contexts(remote_module_job.telling()), seen["in contexts"]
    assert actual.pop("told") == expected.pop("told") == [False, True, torch.bfloat16, True, False]
    assert_close(actual, expected, rtol=0, atol=0)


def test_two_callers_train_as_one_on_the_mean_of_their_losses(seen: dict[str, Any]) -> None:
    callers, model = seen["two callers"], torch.nn.Linear(2, 1)
    model.load_state_dict(callers["start"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = [torch.full((3, 2), value, requires_grad=True) for value in (1.0, 2.0)]
    for _ in range(2):
        optimizer.zero_grad()
        losses = [model(x).square().mean() for x in inputs]
        (sum(losses) / 2).backward()
        optimizer.step()
    assert_close(callers["end"], dict(model.state_dict()))
    # Each caller's inputs have the gradient of its own loss.
    assert_close(callers["input_grads"], [x.grad * 2 for x in inputs])


def test_apply_gives_the_values_and_random_numbers_of_one_process(seen: dict[str, Any]) -> None:
    expected = remote_module_job.applied(remote_module_job.Net())
    assert_close(seen["like torch's"]["applied"], expected, rtol=1e-12, atol=1e-12)


def test_references_to_the_module_and_its_parameters(seen: dict[str, Any]) -> None:
    like = seen["like torch's"]
    assert like["by reference"] == {"same": True, "training": [False, True], "type": "Linear"}
    assert like["parameters"] == [[(2, 3), (2,)], [(2, 3), (2,)], [(2, 1), (2,)], []]
    assert like["twin"] == {"grads": [True, True], "in words": "RemoteModule(Linear on owner/cpu)", "num_callers": 2}
    assert like["foreign"] == [2, 1]


def test_attributes_and_hooks_that_are_added_stay_in_their_process(seen: dict[str, Any]) -> None:
    sent = seen["like torch's"]["sent"]
    there, own = sent["attributes"]
    assert there == own and "module_rref" in own
    assert sent["training"] is False and sent["same"]
    (message,) = sent["told"]
    assert message.startswith("RemoteModule (Linear on owner/cpu) is sent without _forward_hooks, scale: attributes")


def test_a_distributed_optimizer_trains_as_in_one_process(seen: dict[str, Any]) -> None:
    start, losses = seen["like torch's"]["distributed optimizer"]
    linear = torch.nn.Linear(3, 2)
    linear.load_state_dict(start)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    expected = []
    for _ in losses:
        optimizer.zero_grad()
        loss = linear(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ("register_parameter", "ValueError", "Method ``register_parameter`` not supported for RemoteModule"),
        ("register_buffer", "ValueError", "Method ``register_buffer`` not supported for RemoteModule"),
        ("add_module", "ValueError", "Method ``add_module`` not supported for RemoteModule"),
        ("parameter", "ValueError", "Method ``register_parameter`` not supported"),
        ("module", "ValueError", "Method ``add_module`` not supported"),
        ("share_memory", "ValueError", "Method ``share_memory`` not supported"),
        ("changed", "RuntimeError", "lambda> has changed an object that it refers to.*the change is lost here"),
        ("method", "TypeError", "instead of Around.look, give a function .* that does not hold this model"),
        ("apply", "AttributeError", "'Linear' object has no attribute 'missing'"),
        ("not the owner", "ValueError", "names process caller, but process owner owns the module"),
        ("other device", "ValueError", "the module is on cpu, but remote_device says meta"),
        ("no module", "TypeError", "module_rref refers to a int, not to an nn.Module"),
    ],
)
def test_what_cannot_be_done_from_here_is_refused(seen, mistake, error, message) -> None:
    kind, told, _ = seen["like torch's"]["refused"][mistake]
    assert kind == error
    assert re.search(message, told)


def test_graphs_are_kept_no_longer_than_needed(seen: dict[str, Any]) -> None:
    assert seen["graphs"] == [0, 3, 2, 0]


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ("wrong name", "ValueError", "'ownr/cpu' names no process of RPC; did you mean 'owner'"),
        ("no name", "ValueError", "'cpu' names no process of RPC; valid names: caller, owner"),
        ("no device", "ValueError", "must be '<workername>/<device>', such as 'ps/cpu', got 'owner/gpu': Expected one"),
        ("no callers", "ValueError", "num_callers must be at least 1, got 0"),
        ("cannot be pickled", "TypeError", "Linear cannot be sent to owner/cpu.*'_thread.lock'.*pass a function that"),
        ("constructor", "KeyError", "no such table"),
        ("no module", "ValueError", r"Expect `module_cls\(\*args, .* <class nn.Module>.*of <class 'dict'>"),
        ("forward", "ZeroDivisionError", "in the layer"),
        ("forward_async", "ZeroDivisionError", "in the layer"),
        ("exit", "RuntimeError", "Exits, process .* in forward failed: SystemExit: a layer exits"),
        ("arguments", "TypeError", "takes 2 positional arguments but 3 were given"),
        ("hidden input", "TypeError", "in tuples, lists and dicts, got a SimpleNamespace that holds one"),
        ("hidden output", "TypeError", "in tuples, lists and dicts, got a SimpleNamespace that holds one"),
        ("second backward", "RuntimeError", "a second backward pass through one call of a remote module"),
        ("autograd.grad", "RuntimeError", "cannot go through a pipeline or a remote module"),
        ("local optimizer", "RuntimeError", r"this is a copy of a parameter.*use RemoteModule.optimizer\(cls, lr="),
        ("missing caller", "RuntimeError", r"on owner/cpu did not answer: .*timeout.*wait for all 2 callers\)"),
        ("clipping", "RuntimeError", "Inplace update to inference tensor"),
        ("optimizer", "ValueError", "Invalid learning rate: -1.0"),
        ("shape", "RuntimeError", "size mismatch for bias"),
        ("keys", "RuntimeError", r'(?s)Missing key\(s\) .*"0.bias".*Unexpected key\(s\) .*"0.wait"'),
    ],
)
def test_mistakes_are_told(seen: dict[str, Any], mistake: str, error: str, message: str) -> None:
    kind, told, cause = seen["mistakes"][mistake]
    assert kind == error
    assert re.search(message, told)
    if mistake in ("constructor", "forward", "forward_async"):
        assert re.search(r"(?s)process \d+ on .*Traceback.*remote_module_job.py.*" + error, cause)


def test_without_rpc(seen: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"needs torch.distributed.rpc, which is not initialised.*rpc.init_rpc"):
        RemoteModule("owner/cpu", torch.nn.Linear, args=(1, 1))
    assert seen["no RPC"][0] == "RuntimeError"
    assert "RPC has not been initialized" in seen["after RPC"][1]


def test_listens_on_the_loopback_interface_only(seen: dict[str, Any]) -> None:
    assert seen["listening on"] == ["127.0.0.1"]


@pytest.mark.slow
def test_an_owner_that_dies_is_told_at_once() -> None:
    for kind, message, _ in run(remote_module_job.owner_dies):
        assert kind == "RuntimeError"
        assert message.startswith("the remote module on owner/cpu did not answer: ")


@pytest.mark.gpu
def test_a_module_on_a_gpu_trains_as_one_on_the_cpu() -> None:
    cls, options = remote_module_job.OPTIMIZERS["AdamW"]
    expected = remote_module_job.both_ways(remote_module_job.Net(), cls, **options)
    actual = run(remote_module_job.gpu_job)
    assert actual.pop("devices") == ["cuda:0", "cuda:0"]
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
