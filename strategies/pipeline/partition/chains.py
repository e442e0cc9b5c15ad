"""Find several ``nn.Sequential`` that a model calls one after another, so that they can count as one list of layers.

x = self.layer1(x)       layer1 ─▶ layer2: one list            (ResNet)
x = self.layer2(x)
x = self.pool(x)         layer2 ─▶ pool ─▶ head: one list, with the layer in between
x = self.head(x)
x = x.flatten(1)         an operation of the model's own code ends the list
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx, nn

from strategies.common.patching import unchanged
from strategies.common.random_seeds import preserved_random_state


def chains_of(model: nn.Module, paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the modules at some paths in groups that the model calls one after another, in the order of ``paths``.

    The code of the modules that contain them is traced by ``torch.fx``, in training and in evaluation mode. A group is
    called in the same way in both modes, or in the one whose code can be traced. If neither can, such as code that
    depends on values, each module is a group.

    Args:
        model: The model.
        paths: The paths of the modules.

    Returns:
        For each group, the paths of its modules and of single layers between them, in the order of their calls.
    """
    apart: list[tuple[str, ...]] = [(path,) for path in paths]
    if len(paths) < 2:
        return apart
    around = _common(paths)
    outer, start = model.get_submodule(around), f"{around}." if around else ""
    own = {path[len(start) :]: path for path in paths}
    traced = {outer.get_submodule(".".join(name.split(".")[:n])) for name in own for n in range(name.count(".") + 1)}
    followers: list[dict[str, tuple[str, ...]]] = []
    for is_training in (True, False):
        try:
            with preserved_random_state(torch.device("cpu")), unchanged(model.modules()):
                for module in traced:
                    module.training = is_training
                graph = _Tracer(traced).trace(outer)
        except Exception:  # code of the user, which may not be made for tracing
            continue
        followers.append(_followers(graph, set(own)))
    if not followers:
        return apart
    following = {name: names for name, names in followers[0].items() if followers[-1].get(name) == names}
    joined = {name for names in following.values() for name in names}
    groups = []
    for name in own:
        if name not in joined:
            group = [name]
            while group[-1] in following:
                group += following[group[-1]]
            groups.append(tuple(start + part for part in group))
    return groups


def _common(paths: Sequence[str]) -> str:
    """Return the path of the innermost module that contains the modules at all paths."""
    parts = [path.split(".")[:-1] for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


class _Tracer(fx.Tracer):
    """Traces the code of some modules, and keeps calls of all other modules as nodes of the graph.

    Args:
        traced: The modules.
    """

    def __init__(self, traced: set[nn.Module]) -> None:
        super().__init__()
        self._traced = traced

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of a module becomes a node."""
        return m not in self._traced


def _followers(graph: fx.Graph, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Return for each module with a follower the names of the single layers called after it, and of the follower."""
    called = Counter(node.target for node in graph.nodes if node.op == "call_module")
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in names or called[node.target] > 1:
            continue
        after, last = list[str](), _next(node)
        while last is not None and called[last.target] == 1:
            after.append(str(last.target))
            if last.target in names:
                found[str(node.target)] = tuple(after)
                break
            last = _next(last)
    return found


def _next(node: fx.Node) -> fx.Node | None:
    """Return the call of a module that gets the result of ``node`` as its only argument, and alone."""
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_module" or users[0].kwargs or users[0].args != (node,):
        return None
    return users[0]
