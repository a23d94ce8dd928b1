"""The command: ``python -m flava_tnt.recipes.run RECIPE [KEY=VALUE ...]``.

Started plainly, it checks the recipe and launches the local ranks. Started under torchrun or srun, it takes
its place among the ranks that are there. Exit codes: 0 finished or stopped on request, 1 failed, 2 wrong
input.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flava_tnt.errors import UserError
from flava_tnt.processes import signal_when_parent_ends
from flava_tnt.recipes.resolve import check_setup, resolve
from flava_tnt.training.devices import find_devices
from flava_tnt.training.launch import LAUNCHER, MADE_FOLDER, after_signal, launch_ranks
from flava_tnt.training.process import World, find_world
from flava_tnt.training.run_folder import create_run_folder, record_failure
from flava_tnt.training.stop import StopRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_intermixed_args(arguments)
    try:
        world = find_world(os.environ)
        if world is None or options.dry_run:
            return _launch(arguments, options)
        return _take_place(options, world)
    except UserError as error:
        _print_error(error)
        return 2
    except KeyboardInterrupt:
        print("stopped before anything was started", file=sys.stderr)
        return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flava_tnt.recipes.run",
        description="Pretrain FLAVA from a recipe.",
        epilog="Under torchrun or srun the command joins the ranks that are there.",
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="name of a recipe (flava-tnt recipes list) or a path"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="e.g. train.max_steps=100")
    parser.add_argument("--nproc", type=_positive, metavar="N", help="ranks to start on this machine")
    parser.add_argument("--run-dir", metavar="DIR", help="run folder (default: runs/RECIPE-DATE-TIME)")
    parser.add_argument(
        "--dry-run", action="store_true", help="resolve, check and print the recipe; start nothing"
    )
    return parser


def _print_error(error: UserError) -> None:
    """A line for each thing that is wrong."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return value


def _launch(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Check everything that can be checked without torch, make the run folder, start the ranks."""
    if options.run_dir == "":
        raise UserError("--run-dir is empty: name a folder, or leave it out")
    resolved = resolve(options.recipe, options.overrides)
    devices = find_devices()
    nproc = options.nproc or resolved.recipe.launch.nproc or devices.count
    if devices.device_type == "cuda" and nproc > devices.count:
        raise UserError(f"--nproc {nproc}: this machine has {devices.count} GPUs")
    setup = check_setup(
        resolved,
        world_size=nproc,
        local_world_size=nproc,
        device_type=devices.device_type,
        device_memory_bytes=devices.memory_of(nproc),
    )
    from flava_tnt.data.inputs import check_inputs  # not for --help, which should take a moment

    check_inputs(setup)
    if options.dry_run:
        print(resolved.to_yaml(), end="")
        return 0
    folder = create_run_folder(resolved, options.run_dir)
    try:
        return launch_ranks(arguments, nproc=nproc, folder=folder)
    except KeyboardInterrupt:
        return after_signal(folder)


def _take_place(options: argparse.Namespace, world: World) -> int:
    """Be one of the ranks. The environment says which, and whether our launcher started us."""
    made_folder = os.environ.get(MADE_FOLDER)
    stop = StopRequest()
    stop.install()
    try:
        _train(options, world, made_folder, stop)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        exit_code = 2 if isinstance(error, UserError) else 1
        if made_folder is not None:
            record_failure(Path(made_folder), world.rank, error, exit_code)  # the launcher prints the first
        elif isinstance(error, UserError):
            _print_error(error)
        else:
            print(f"error: rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        _leave(exit_code)
    return 0


def _leave(exit_code: int) -> NoReturn:
    """End this rank at once: a communicator that waits for ranks that are gone cannot be tidied up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _train(options: argparse.Namespace, world: World, made_folder: str | None, stop: StopRequest) -> None:
    if made_folder is not None:
        signal_when_parent_ends(signal.SIGTERM, parent=int(os.environ[LAUNCHER]))
    resolved = resolve(options.recipe, options.overrides)
    devices = find_devices()
    if devices.device_type == "cuda" and 1 < devices.count < world.local_world_size:
        raise UserError(f"{world.local_world_size} ranks on a machine with {devices.count} GPUs")
    setup = check_setup(
        resolved,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        device_type=devices.device_type,
        device_memory_bytes=devices.memory_of(world.local_world_size),
        # Our launcher has looked already, when the other ranks held nothing yet.
        look_at_memory=made_folder is None,
    )
    # torchtnt says at every import that pkg_resources will go; our pins keep it.
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    from flava_tnt.training.trainer import run_rank

    run_rank(resolved, setup, world, run_dir=options.run_dir, made_folder=made_folder, stop=stop)


if __name__ == "__main__":
    sys.exit(main())
