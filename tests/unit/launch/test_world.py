"""Which ranks share a host, and which are drivers."""

import pytest

from strategies.launch.ranks import World


@pytest.mark.parametrize(("rank", "driver", "is_here"), [(0, 0, True), (1, 0, True), (2, 0, False), (3, 3, True)])
def test_ranks_of_two_pipelines_of_three_stages_on_hosts_of_two_ranks(rank: int, driver: int, is_here: bool) -> None:
    world = World(address="127.0.0.1", port=1, rank=rank, size=6, num_stages=3, num_local=2)
    assert world.driver == driver and world.is_driver == (rank == driver)
    assert world.is_on_host_of_driver == is_here


def test_ranks_of_a_stage_that_divide_its_layers_follow_each_other() -> None:
    worlds = [World("127.0.0.1", 1, rank, 12, num_stages=3, num_local=6, num_parts=2) for rank in range(12)]
    assert [world.pipeline_of(world.rank) for world in worlds] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert [world.place_of(world.rank) for world in worlds] == [0, 0, 1, 1, 2, 2] * 2
    assert [world.rank for world in worlds if world.is_driver] == [0, 1, 6, 7]
    assert worlds[9].driver == 7 and worlds[9].workers == [9, 11]
