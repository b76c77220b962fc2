"""What every command does before its own work."""

import pytest

from scu_trainer.cli.main import ALLOCATOR, _let_segments_grow, main


def test_the_allocator_of_a_card_lets_its_segments_grow():
    environment = {}
    _let_segments_grow(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_an_allocator_that_was_set_up_is_left_alone(name):
    environment = {name: "max_split_size_mb:128"}
    _let_segments_grow(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_an_option_is_known_with_hyphens_too(capsys):
    assert main(["push", "nowhere", "--repo-id", "me/model", "--dry-run", "--max-shard-size=1GB"]) == 2
    assert "nowhere is not a folder here" in capsys.readouterr().err
