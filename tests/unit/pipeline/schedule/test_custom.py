"""Tables of one's own: files that torch reads and writes too, functions, and what is refused."""

import csv
import re
from functools import partial

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime

from strategies.pipeline.schedule.custom import custom_table, read_csv, write_csv
from strategies.pipeline.schedule.tables import Action, gpipe, interleaved, one_f_one_b, v_half, zb_h1, zbv


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, interleaved, zb_h1, zbv, v_half], ids=lambda make: make.__name__)
def test_files_are_read_as_they_were_written(make, tmp_path):
    table = make(3, 5)
    write_csv(table, tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == table
    assert custom_table(str(tmp_path / "table.csv"), 3, 5) == table
    assert custom_table(tmp_path / "table.csv", 3, 4) == [[a for a in row if a.microbatch < 4] for row in table]


def test_torch_reads_what_is_written(tmp_path):
    write_csv(zbv(2, 3), tmp_path / "table.csv")
    schedule = object.__new__(PipelineScheduleMulti)
    schedule.pipeline_order, schedule.pp_group_size, schedule._num_stages, schedule._n_microbatches = {}, 2, 4, 3
    schedule._stages, schedule.rank, schedule.stage_index_to_group_rank = [], 0, {}
    schedule._load_csv(tmp_path / "table.csv")
    assert [list(map(repr, row)) for row in schedule.pipeline_order.values()] == [
        list(map(repr, row)) for row in zbv(2, 3)
    ]
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}


def test_what_torch_writes_is_read(tmp_path):
    """Idle steps are empty entries; the form with communication has more actions, which are skipped."""
    schedule = object.__new__(_PipelineScheduleRuntime)
    table = interleaved(2, 4)
    order = {r: [None, *(_Action.from_str(repr(a)) for a in row), None] for r, row in enumerate(table)}
    schedule.pipeline_order = order
    schedule._dump_csv(tmp_path / "compute.csv", "compute_only")
    assert read_csv(tmp_path / "compute.csv") == table

    def with_communication(row):
        extra = ["0UNSHARD", "1SEND_F0", "1RECV_F0", "2SEND_B1", "2RECV_B1", "0RESHARD", "0REDUCE_GRAD"]
        return [_Action.from_str(text) for text in extra] + row

    schedule.pipeline_order_with_comms = {r: with_communication(row) for r, row in order.items()}
    schedule._dump_csv(tmp_path / "all.csv")
    with open(tmp_path / "all.csv", newline="") as file:
        assert next(csv.reader(file))[1] == "1SEND_F0"
    assert read_csv(tmp_path / "all.csv") == table


def test_functions():
    def by_hand(processes, microbatches):
        assert (processes, microbatches) == (2, 1)
        return (["0F0", None, "", Action("B", 0, 0)], ["1F0", "1B0"])

    assert custom_table(by_hand, 2, 1) == one_f_one_b(2, 1)
    assert custom_table(partial(interleaved, chunks=3), 2, 4) == interleaved(2, 4, 3)


def test_refusals_name_the_table_and_the_place(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, row 1: '1X0' is not an action"):
        read_csv(path)
    path.write_text('0F0,0B0\n"(1F1;1B0)OVERLAP_F_B"\n')
    with pytest.raises(ValueError, match=r"row 1: '\(1F1;1B0\)OVERLAP_F_B' is not an action"):
        read_csv(path)
    path.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(
        ValueError,
        match=f"the table in {re.escape(str(path))} cannot run: deadlock: process 0 is at 0B0 and waits for 1B0 of",
    ):
        custom_table(path, 2, 1)
    with pytest.raises(ValueError, match="has 2 rows, but there are 3 processes; write one row for each"):
        custom_table(path, 3, 1)
    with pytest.raises(ValueError, match="has 1 micro-batches instead of 2"):
        custom_table(path, 2, 2)
    path.write_text("0F0,0I0\n1F0,1B0\n")
    with pytest.raises(ValueError, match="cannot run: process 0 lacks 0W0"):
        custom_table(path, 2, 1)
    with pytest.raises(OSError, match="nowhere"):
        custom_table(tmp_path / "nowhere.csv", 2, 1)


def test_functions_that_return_something_else():
    def too_many(processes, microbatches):
        return one_f_one_b(processes, microbatches + 1)

    with pytest.raises(ValueError, match=r"the table of .*too_many\(2, 3\) has 4 micro-batches instead of 3"):
        custom_table(too_many, 2, 3)
    for wrong in (None, "0F0", ["0F0"], 3):
        with pytest.raises(TypeError, match=r"must be a list of lists of actions, one per process, got"):
            custom_table(lambda processes, microbatches, wrong=wrong: wrong, 2, 3)
    with pytest.raises(TypeError, match=r"row 0: an action is an Action, text such as '2F0', or None; got 3"):
        custom_table(lambda processes, microbatches: [[3]], 1, 1)
    with pytest.raises(ValueError, match="has 0 micro-batches instead of 2"):
        custom_table(lambda processes, microbatches: [[], []], 2, 2)
