from torch import nn

from strategies.common.joined_lists import JoinedLists, layers_now, lengths_of, lists_of, parts_of, why_one_list


def model() -> nn.Module:
    whole = nn.Module()
    whole.down = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    whole.between = nn.Linear(3, 3)
    whole.up = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)])
    return whole


def test_layers_have_their_names_in_the_model() -> None:
    whole = model()
    joined = JoinedLists(whole, [["down", "between"], ["up"]])
    assert list(joined._modules) == ["down.0", "down.1", "between", "up.0", "up.1"]
    assert {name for name, _ in joined.named_parameters()} == set(whole.state_dict())
    assert joined.get_submodule("up.1") is whole.up[1]
    assert joined.get_parameter("between.weight") is whole.between.weight
    assert joined[-1] is whole.up[1] and len(joined) == 5
    assert lengths_of(joined) == [3, 2] and lists_of(joined) == [[*whole.down, whole.between], [*whole.up]]
    assert parts_of(joined) == [("down.", whole.down), ("between.", whole.between), ("up.", whole.up)]


def test_a_message_says_which_modules_are_one_list() -> None:
    joined = JoinedLists(model(), [["down", "between"], ["up"]])
    assert "'down' and 'between' are one list" in why_one_list(joined, "down.1")
    assert "'down' and 'between' are one list" in why_one_list(joined, "between")
    assert why_one_list(joined, "up.0") == why_one_list(nn.Sequential(nn.Tanh()), "0") == ""


def test_layers_are_taken_out_of_the_model() -> None:
    whole = model()
    joined = JoinedLists(whole, [["down", "between"], ["up"]])
    names = list(whole.state_dict())
    with joined.without(["down.1", "between", "up.0"]):
        assert list(whole.down._modules) == ["0"] and list(whole.up._modules) == ["1"]
        assert "between" not in whole._modules
    assert list(whole.state_dict()) == names


def test_a_replaced_layer_is_seen() -> None:
    whole = model()
    joined = JoinedLists(whole, [["down"], ["up"]])
    assert layers_now(joined)() == [*joined]
    whole.up[0] = nn.Linear(3, 2)
    assert layers_now(joined)() != [*joined]


def test_a_single_module_is_one_list() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert lengths_of(layers) == [2] and lists_of(layers) == [[*layers]] and parts_of(layers) == [("", layers)]
    assert layers_now(layers)() == [*layers]
