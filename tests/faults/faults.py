"""Every fault that was tried: what happens, what the user sees, and the test that shows it.

The table of docs/reliability.md is made of this one. After a change of it:

    python tests/faults/faults.py --write
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- the table is made by tests/faults/faults.py -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    happens: str
    shows: str
    tests: tuple[str, ...]  # file::function, below tests/


def fault(name: str, happens: str, shows: str, *tests: str) -> Fault:
    return Fault(name, happens, shows, tests)


SAME = "the same command resumes, to the bit"
NOTHING = "nothing is changed"
ONE_LINE = "one line that names the file, exit status 1"

KILLS = (
    fault(
        "`kill -9` at random times, 50 times",
        "ends as the undisturbed run: weights, optimizer, random numbers, every loss",
        "`resumed from step-…`",
        "faults/test_kills.py::test_fifty_kills_change_nothing",
        "faults/test_kills.py::test_twelve_kills_change_nothing",
    ),
    fault(
        "kill inside the writing of a checkpoint",
        "the one before is used; the piece is removed",
        "`resumed from step-…`, no warning",
        "faults/test_kills.py::test_a_kill_inside_the_writing_of_a_checkpoint",
        "lab/test_checkpoint_faults.py::test_a_kill_at_any_moment_leaves_a_whole_checkpoint",
    ),
    fault(
        "kill between the rename and `best.json`",
        "the new checkpoint is used; the best one is noted again",
        "`resumed from step-…`",
        "faults/test_kills.py::test_a_kill_inside_the_writing_of_a_checkpoint",
        "lab/test_retention.py::test_a_lost_best_is_replaced",
    ),
    fault(
        "kill while an old checkpoint is deleted",
        "it is gone or whole, never half",
        "`resumed from step-…`",
        "faults/test_kills.py::test_a_kill_inside_the_writing_of_a_checkpoint",
    ),
    fault(
        "lock file left by a killed process",
        "the lock died with the process",
        "nothing",
        "faults/test_processes.py::test_a_second_process_is_refused_and_the_first_not_disturbed",
        "lab/test_rundir.py::test_a_killed_owner_holds_nothing",
        "lab/test_rundir.py::test_a_worker_of_a_killed_owner_holds_nothing",
    ),
    fault(
        "a worker of a race killed, as for memory, or lost to a crash of the driver",
        "its run resumes in a new process from its checkpoint, the others are not disturbed; lost "
        "twice, it has failed and the others go on",
        "`starting a run again: its process was ended by SIGKILL (memory?)`",
        "faults/test_workers_killed.py::test_a_worker_killed_for_memory",
        "lab/test_crew.py::test_a_task_whose_worker_dies_is_begun_again_and_no_other_is",
        "lab/test_crew.py::test_one_that_dies_twice_has_failed",
        "lab/test_crew.py::test_a_lost_gpu_is_the_process_s_not_the_crew_s",
    ),
    fault(
        "the main process of a race killed",
        "workers notice, save and end; " + SAME,
        "nothing",
        "faults/test_workers_killed.py::test_a_race_whose_main_process_is_killed",
    ),
    fault(
        "`mars data` interrupted or killed",
        "resumes where it was; the same bytes",
        "`not finished` if used before",
        "lab/test_data_resume.py::test_killed_runs_go_on_and_end_with_the_same_bytes",
        "lab/test_data_resume.py::test_a_kill_around_any_call_to_the_disk_changes_no_byte",
    ),
    fault(
        "`mars tune` interrupted",
        "the trial is saved; goes on with what it would have tried",
        "`stopping: runs in progress are saved`",
        "lab/test_tune.py::test_ctrl_c_saves_the_trial_and_the_same_command_ends_it",
        "lab/test_tune.py::test_a_search_that_goes_on_tries_what_it_would_have_tried",
    ),
)

SIGNALS = (
    fault(
        "SIGTERM, SIGINT (Ctrl-C)",
        "saves after the step, exit status 130; " + SAME,
        "`SIGTERM: will save after this step …`, then `the same command resumes from there`",
        "faults/test_processes.py::test_a_signal_saves_and_ends",
        "faults/test_processes.py::test_ctrl_c_is_answered_beside_the_bar",
        "faults/test_processes.py::test_ctrl_c_promises_no_save_where_there_is_none",
        "lab/test_loop.py::test_a_signal_saves_and_ends_cleanly",
        "lab/test_race.py::test_a_race_is_stopped_and_goes_on",
    ),
    fault(
        "SIGHUP: the terminal was closed",
        "as SIGTERM; with `nohup` it trains on",
        "`SIGHUP at step …` in the log",
        "faults/test_processes.py::test_a_signal_saves_and_ends",
        "lab/test_signals.py::test_what_the_parent_ignores_stays_ignored",
    ),
    fault(
        "Ctrl-C again, while it saves",
        "ends at once; the half checkpoint is removed, the one before used",
        "`mars: interrupted`, exit status 130",
        "faults/test_processes.py::test_a_second_ctrl_c_ends_at_once",
        "lab/test_checkpoint_faults.py::test_an_interrupted_save_leaves_nothing",
    ),
    fault(
        "the reader of its output is gone (`tee` killed, a terminal closed)",
        "trains on",
        "the log has it all",
        "faults/test_processes.py::test_training_goes_on_when_nobody_reads_its_output",
    ),
    fault(
        "two runs in one directory",
        "the second is refused, the first not disturbed",
        "`is in use by process … on host …`",
        "faults/test_processes.py::test_a_second_process_is_refused_and_the_first_not_disturbed",
        "lab/test_rundir.py::test_a_second_process_is_told_who_the_first_is",
    ),
)

DAMAGED = "faults/test_checkpoints.py::test_a_damaged_checkpoint_is_told_and_the_one_before_used"
REFUSED = "`checkpoint refused: step-…: FILE …`, on the terminal and in the log"
CHECKPOINTS = (
    fault("truncated checkpoint file", "the one before is used", REFUSED, DAMAGED),
    fault("empty checkpoint file", "the one before is used", REFUSED, DAMAGED),
    fault(
        "a flipped bit in the weights",
        "the one before is used",
        REFUSED,
        DAMAGED,
        "lab/test_checkpoint_faults.py::test_every_single_bit_counts",
    ),
    fault(
        "a flipped bit in the optimizer's state or the random numbers'",
        "the one before is used",
        REFUSED,
        DAMAGED,
    ),
    fault("missing file or manifest", "the one before is used", REFUSED, DAMAGED),
    fault(
        "torn or foreign manifest",
        "the one before is used",
        REFUSED,
        DAMAGED,
        "lab/test_checkpoint_faults.py::test_a_foreign_manifest_is_refused",
    ),
    fault(
        "no checkpoint is intact",
        "refused; nothing is deleted",
        "`no checkpoint in … is intact: remove it to begin again`, and why each was refused",
        "faults/test_checkpoints.py::test_no_intact_checkpoint_at_all",
    ),
    fault(
        "checkpoints come out broken (a file system that lies)",
        "retention deletes nothing: the last intact one stays",
        REFUSED,
        "faults/test_checkpoints.py::test_retention_never_deletes_the_last_intact_one",
        "lab/test_retention.py::test_broken_ones_do_not_count_as_kept",
        "lab/test_retention.py::test_the_one_just_saved_is_kept_whatever_lies_ahead",
    ),
    fault(
        "times of files lie, the clock goes backwards",
        "steps and checksums decide, no time does",
        "nothing",
        "faults/test_checkpoints.py::test_times_of_files_are_not_believed",
        "lab/test_retention.py::test_the_highest_step_is_the_newest_whatever_the_clock_says",
    ),
    fault(
        "a pickle bomb in `optimizer.pt` or `training.pt`, sealed",
        "not run, refused; " + NOTHING,
        "`is not loaded: it holds more than tensors and plain values`",
        "faults/test_checkpoints.py::test_a_pickle_bomb_is_refused",
        "lab/test_checkpoint_faults.py::test_code_in_a_checkpoint_is_never_run",
        "test_contract.py::test_state_dict_is_safe_to_load",
    ),
    fault(
        "a checkpoint of another model, optimizer or setting",
        "refused; " + NOTHING,
        "the first difference by name",
        "faults/test_checkpoints.py::test_a_checkpoint_of_another_run_is_refused",
        "lab/test_checkpoint.py::test_what_does_not_fit_is_named_and_changes_nothing",
    ),
    fault(
        "run directory moved and renamed",
        "goes on where it is",
        "`resumed from step-…`",
        "faults/test_checkpoints.py::test_a_run_moved_to_another_place",
    ),
)

DISKS = (
    fault(
        "disk full during a checkpoint",
        "clean end, earlier checkpoints untouched, no pieces left; " + SAME,
        "`cannot save checkpoint …: the disk is full; earlier ones are untouched`",
        "faults/test_disk.py::test_a_disk_that_fills_up_during_a_checkpoint",
        "faults/test_disk.py::test_a_limit_of_file_sizes",
        "lab/test_checkpoint_faults.py::test_a_full_disk_leaves_the_earlier_ones_and_nothing_else",
    ),
    fault(
        "disk full during a record of the log",
        "clean end, whole lines; " + SAME,
        "`cannot write …/log.jsonl: the disk is full`",
        "faults/test_disk.py::test_a_disk_that_fills_up_during_a_record",
        "lab/test_log.py::test_a_full_disk_is_said_and_leaves_whole_lines",
    ),
    fault(
        "disk full at the start",
        "refused before the first step",
        "`cannot write in run directory …: the disk is full; choose another one`",
        "faults/test_disk.py::test_a_disk_that_is_full_at_the_start",
    ),
    fault(
        "read-only file system or directory",
        "refused before the first step; a complete run is still told",
        "`the file system is read-only; choose another one`",
        "faults/test_disk.py::test_a_read_only_file_system",
        "lab/test_rundir.py::test_a_read_only_directory_is_refused",
        "lab/test_checkpoint_faults.py::test_a_directory_that_became_read_only_is_said",
    ),
    fault(
        "a file where the directory should be",
        "refused before the first step",
        "`a part of the path is a file, not a directory`",
        "faults/test_disk.py::test_a_file_in_the_way",
    ),
    fault(
        "a bad block: syncing fails",
        "clean end; " + SAME,
        "`Input/output error` and the file",
        "faults/test_disk.py::test_a_disk_with_a_bad_block",
    ),
)

FILES = (
    fault(
        "damaged or lost `config.json`",
        "refused, or with the command that began the run written again",
        "`is not the configuration of a run`, and what to do",
        "faults/test_files.py::test_a_damaged_configuration_is_named",
    ),
    fault(
        "torn, garbled or lost `log.jsonl`",
        "goes on; damaged lines are dropped, the header is written again",
        "`1 line of log.jsonl dropped: damaged`",
        "faults/test_files.py::test_a_damaged_log_does_not_stop_the_run",
        "faults/test_files.py::test_a_lost_log_begins_again",
        "lab/test_log.py::test_a_kill_tears_nothing_but_the_last_line",
    ),
    fault(
        "a report from torn logs",
        "made of what is whole",
        "how many lines were left out",
        "faults/test_files.py::test_a_report_from_torn_logs",
        "lab/test_report_runs.py::test_a_torn_line_that_a_resume_wrote_after_is_counted",
    ),
    fault(
        "corrupt data: flipped bit, short, missing, another tokenizer",
        "refused; " + NOTHING,
        ONE_LINE,
        "faults/test_files.py::test_a_spoiled_shard_is_named_and_nothing_is_changed",
        "lab/test_data_shards.py::test_a_flipped_bit_is_found",
        "lab/test_data_shards.py::test_a_truncated_shard_is_refused",
        "lab/test_data_shards.py::test_bad_sources_are_refused_by_name",
    ),
    fault(
        "data changed since the run began",
        "refused; " + NOTHING,
        "`has changed since the run in … began`",
        "faults/test_files.py::test_data_that_changed_since_the_run_began",
    ),
)

NUMBERS = (
    fault(
        "a NaN gradient, once",
        "stops; spoiled weights are never saved; " + SAME,
        "`the gradient is not finite at step …`",
        "faults/test_numbers.py::test_a_nan_gradient_stops_the_run_before_it_is_saved",
        "lab/test_loop.py::test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved",
        "test_faults.py::test_nan_is_not_spread_to_other_tensors",
    ),
    fault(
        "a NaN gradient with `loop.skip_nan`",
        "skipped: weights, moments and last gradient untouched",
        "`step … skipped: its gradient was not finite`",
        "faults/test_numbers.py::test_a_nan_gradient_is_skipped_if_one_asks_for_it",
        "faults/test_numbers.py::test_a_skipped_step_leaves_all_state_alone",
        "faults/test_numbers.py::test_exact_mode_cannot_skip",
    ),
    fault(
        "nothing but NaN",
        "given up after 25 skipped steps in a row",
        "`25 gradients in a row were not finite`",
        "faults/test_numbers.py::test_nothing_but_nan_is_given_up",
    ),
    fault(
        "Inf with GradScaler (fp16)",
        "skipped, state unchanged, the scale halved",
        "`step … skipped: its gradient was not finite`",
        "faults/test_numbers.py::test_inf_with_a_grad_scaler_is_skipped_and_the_scale_halved",
        "test_contract.py::test_grad_scaler_skips_a_step_with_inf",
    ),
    fault(
        "no gradients at all, or not for all",
        "no step for these, no state made up",
        "nothing",
        "faults/test_numbers.py::test_a_step_without_any_gradient",
        "test_faults.py::test_no_gradients_crash",
    ),
)

STATE = (
    fault(
        "state of the wrong shape, missing keys",
        "refused; the optimizer's state is what it was",
        "the parameter and the key by name",
        "test_state.py::test_a_wrong_state_dict_is_refused_and_changes_nothing",
        "test_state.py::test_the_error_names_the_parameter",
        "test_state.py::test_state_of_the_wrong_kind_is_refused",
        "lab/test_checkpoint.py::test_an_optimizer_that_refuses_half_way_is_put_back",
    ),
    fault(
        "an older state dict",
        "loads; what it lacks gets defaults",
        "nothing",
        "test_state.py::test_an_older_state_dict_gets_defaults",
    ),
    fault(
        "`add_param_group` after resume",
        "the new group begins, the others go on",
        "nothing",
        "faults/test_resumed_state.py::test_a_group_added_after_resume",
        "test_contract.py::test_add_param_group_while_training",
    ),
)

DISTRIBUTED = (
    fault(
        "one rank dies",
        "the others end; the same command, with any number of processes, resumes",
        "`rank 1: another process has ended or is lost: …`",
        "lab/test_parallel.py::test_one_that_dies_does_not_hang_the_others",
        "faults/test_shards.py::test_a_rank_that_dies_leaves_a_run_that_one_process_can_end",
    ),
    fault(
        "one rank dies under `torchrun --max-restarts`",
        "torchrun restarts all and the run resumes by itself, to the bit",
        "`resumed from step-…`",
        "lab/test_parallel.py::test_torchrun_restarts_a_run_of_which_a_process_died",
    ),
    fault(
        "`kill -9` of one rank at random times, 50 times",
        "ends as the undisturbed run, to the bit",
        "`resumed from step-…`",
        "faults/test_shards.py::test_one_rank_killed_fifty_times_changes_nothing",
        "faults/test_shards.py::test_one_rank_killed_three_times_changes_nothing",
    ),
    fault(
        "a rank killed while shards are written, or before they get their name",
        "the checkpoint before is used; the pieces are removed",
        "`resumed from step-…`, no warning",
        "faults/test_shards.py::test_a_rank_killed_while_shards_are_written",
    ),
    fault(
        "SIGTERM to one rank",
        "all stop at the same step and save",
        "`SIGTERM at step …`",
        "lab/test_parallel.py::test_a_signal_to_one_stops_all_at_one_step_and_the_run_goes_on",
    ),
    fault(
        "a loss that is not finite on one rank",
        "all ranks stop, or skip the step (`--loop.skip-nan`), alike",
        "one line, from rank 0",
        "lab/test_parallel.py::test_what_is_not_finite_on_one_stops_all",
        "lab/test_parallel.py::test_what_is_not_finite_on_one_is_skipped_by_all",
    ),
    fault(
        "parameters change while a save goes on behind them",
        "the checkpoint is of the moment it was asked for",
        "nothing",
        "lab/test_parallel.py::test_a_checkpoint_is_of_the_moment_it_was_asked_for",
    ),
    fault(
        "a save behind the training fails on one rank",
        "all end; nothing half written is left, earlier checkpoints are untouched",
        "`cannot save checkpoint …: …`, from one rank",
        "lab/test_parallel.py::test_a_save_that_fails_behind_the_training_ends_it_with_one_error",
    ),
    fault(
        "a shard, its index or the manifest missing, empty, truncated or torn",
        "the checkpoint before is used",
        "`checkpoint refused: step-…: …`",
        "faults/test_shards.py::test_a_damaged_shard_index_or_manifest",
        "faults/test_shards.py::test_two_ranks_go_on_from_the_one_before_when_a_shard_is_missing",
    ),
    fault(
        "machines whose run directory is not on a shared disk",
        "refused before the first step; a checkpoint that lacks shards never gets its name",
        "`… all machines must share the disk of --keep.out`",
        "faults/test_shards.py::test_a_run_on_machines_that_share_no_disk_is_refused",
        "faults/test_shards.py::test_a_checkpoint_that_lacks_the_shards_of_another_disk_is_none",
    ),
    fault(
        "one rank cannot begin: its GPU is full",
        "all end, none waits for the others",
        "`the model does not fit in memory: …`, from that rank",
        "lab/test_parallel.py::test_one_that_cannot_begin_does_not_hang_the_others",
    ),
    fault(
        "a rank runs out of GPU memory while a checkpoint is being written",
        "the checkpoint is finished, then all end",
        "`the GPU's memory is full: lower loop.micro_batch_size …`",
        "lab/test_parallel.py::test_a_rank_without_memory_ends_after_the_checkpoint_that_is_being_written",
    ),
    fault(
        "one rank cannot read a file of the checkpoint",
        "all end at once; nobody waits for that rank's shards",
        "one line, from that rank",
        "lab/test_parallel.py::test_what_one_rank_cannot_read_ends_all",
    ),
    fault(
        "a flipped bit in any file of a sharded checkpoint",
        "the checkpoint before is used",
        "`… does not match its checksum`",
        "lab/test_parallel.py::test_a_flipped_bit_in_a_shard_is_told_and_the_one_before_used",
    ),
    fault(
        "another number of ranks than saved it: 2→1, 1→2, 2→3, 4→2",
        "the same weights, state and losses (1e-6)",
        "`resumed from step-…`",
        "lab/test_parallel.py::test_saved_on_some_loaded_on_others",
        "lab/test_parallel.py::test_one_file_is_loaded_in_shards",
    ),
    fault(
        "a pickle bomb as the index of shards",
        "is not run",
        "`… is not allowed there`",
        "lab/test_parallel.py::test_an_index_that_would_run_code_is_refused",
    ),
)

SECTIONS = {
    "Processes that die": KILLS,
    "Signals": SIGNALS,
    "Checkpoints": CHECKPOINTS,
    "Disks": DISKS,
    "Files": FILES,
    "Numbers": NUMBERS,
    "State of the optimizer": STATE,
    "Several processes": DISTRIBUTED,
}
FAULTS = tuple(fault for section in SECTIONS.values() for fault in section)


def table() -> str:
    """The table of the page, with links to the tests."""
    lines, number = [], 0
    for title, faults in SECTIONS.items():
        if not faults:
            continue
        lines += ["", f"### {title}", "", "| | fault | what happens | what you see | test |"]
        lines += ["|---|---|---|---|---|"]
        for row in faults:
            number += 1
            file, _, name = row.tests[0].partition("::")
            test = f"[{name}](../tests/{file})"
            more = f" +{len(row.tests) - 1}" if len(row.tests) > 1 else ""
            lines.append(f"| {number} | {row.name} | {row.happens} | {row.shows} | {test}{more} |")
    return "\n".join([*lines, ""])


def with_table(page: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(with_table(PAGE.read_text()))
