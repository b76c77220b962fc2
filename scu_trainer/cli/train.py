"""``scu-trainer train``: trains one run, as a YAML or JSON file and flags describe it. All launchers start it, too."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Optional

from scu_trainer.cli import configuration, fields
from scu_trainer.cli.machine.check import check_recipe
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser, add_switch
from scu_trainer.errors import SettingsError, Stopped
from scu_trainer.imports import without_collector
from scu_trainer.models.asking import torch_switches_restored
from scu_trainer.shipped import recipe
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.distributed.deepspeed_start import leave_process_group
from scu_trainer.train.step.distributed.launched import end_with_launcher

MODES = {
    "--print_config": "show the resolved configuration as YAML and stop",
    "--test_run": "run a few steps of everything in a scratch folder, then report what the full run would take",
    "--preflight_only": "load everything, check for mistakes, report them, and stop",
    "--check_requirements": "check versions, devices, memory and disk, and stop",
    "--help_all": "also list every field of transformers.TrainingArguments, and stop",
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    end_with_launcher()  # first, because a launcher may die while its ranks wait for each other
    return _main(argv)


@guarded
def _main(argv: list[str]) -> int:
    modes, flags = fields.parse_with_fields(mode_parser(), argv)
    if modes.help or modes.help_all:
        print(_help(with_stock_fields=modes.help_all))
        return 0
    configuration.check_early(modes.config, flags)
    if modes.check_requirements:
        return check_recipe(modes.config, flags)
    with run_log() as log, torch_switches_restored():
        with without_collector(freeze=True):  # reading the settings imports torch and transformers
            job = configuration.read_job(modes.config, flags)
        if modes.print_config:
            print(configuration.as_yaml(job), end="")
            return 0
        if job.task.seeds and not (modes.preflight_only or modes.test_run):
            return _train_seeds(modes.config, flags, job.task.seeds)
        with configuration.naming_file(modes.config, flags):
            return _train(job, log, modes, flags)


def _train_seeds(config: Optional[str], flags: Sequence[str], seeds: Sequence[int]) -> int:
    if "WORLD_SIZE" in os.environ:
        raise SettingsError("seeds start their own processes; drop the launcher, or give one seed: --seed 0")
    from scu_trainer.cli.comparison.seeds import train_seeds

    return train_seeds(config, flags, seeds)


def mode_parser() -> argparse.ArgumentParser:
    parser = Parser(add_help=False)
    parser.add_argument("--config", type=recipe)
    parser.add_argument("-h", "--help", action="store_true")
    for flag, text in MODES.items():
        add_switch(parser, flag, text)
    return parser


def _help(with_stock_fields: bool) -> str:
    kinds = []
    if with_stock_fields:
        from transformers import TrainingArguments

        kinds.append(TrainingArguments)
    width = max(map(len, MODES))
    modes = "\n".join(f"  {flag:<{width}}  {text}" for flag, text in MODES.items())
    note = (
        "\nEvery field of transformers.TrainingArguments is accepted too, in the file and as a flag (--help_all "
        "lists them).\n"
        "Defaults that differ from the stock ones: "
        + ", ".join(f"{name} {value}" for name, value in configuration.TRAINING_DEFAULTS.items())
        + "."
    )
    return f"{fields.settings_parser(*kinds).format_help()}\nmodes:\n{modes}\n{note}"


def _train(job, log, modes: argparse.Namespace, flags: Sequence[str]) -> int:
    with without_collector(freeze=True):
        from scu_trainer.cli.publishing.sharing import after_training, refuse_useless_push, require_open_hub
        from scu_trainer.train.run_directory.directory_lock import from_first_rank
        from scu_trainer.train.session.session import look_only, run
        from scu_trainer.train.session.test_run import try_out

    refuse_useless_push(job)
    if job.training.push_to_hub and not modes.test_run:  # a test run pushes nothing
        from_first_rank(lambda: require_open_hub(job.training), job.training)
    succeeded = False
    try:
        if modes.preflight_only:
            look_only(job)
        elif modes.test_run:
            try_out(job, log=log)
        elif job.model.tuning_path == "auto":
            from scu_trainer.cli.planning.paths import train_on_a_path

            job = train_on_a_path(modes.config, flags, job, lambda chosen: run(chosen, log=log))
        else:
            run(job, log=log)
        succeeded = True
    except Stopped:  # all ranks stop after the same step
        succeeded = True
        raise
    finally:
        leave_process_group(succeeded)
    if not (modes.preflight_only or modes.test_run):
        after_training(job)  # the other ranks do not wait for a push
    return 0
