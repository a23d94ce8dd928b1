"""One process, the whole model: nothing is wrapped and nothing is sharded."""

from __future__ import annotations

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import Parallelism, Setup


class Single(Parallelism):
    """One rank that holds the whole model; needs no process group."""

    api_version = 1

    def check(self, setup: Setup) -> None:
        """Refuse a second rank: without communication each would train a model of its own.

        Raises:
            RecipeError: the run has more than one rank.
        """
        if setup.world_size > 1:
            raise RecipeError(
                f"single trains on 1 rank, and this run has {setup.world_size}: take ddp (each rank holds the"
                " whole model) or fsdp (the ranks share it), or start 1 rank",
                key="plugins.parallelism",
            )
