"""Which node this is: from flags, from what the PyTorchJob operator sets, or from the machine."""

from __future__ import annotations

import pytest

from wandistill.errors import ConfigError
from wandistill.launch.command import parse_train
from wandistill.launch.node import Node, find_node

# As training-operator 1.9.4 sets them for the second of three replicas with four processes each.
OPERATOR = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "12",
    "RANK": "1",
}


def test_the_operators_environment_gives_the_node():
    node = find_node({}, OPERATOR)
    assert node == Node(4, 3, 1, "job-master-0", 23456)
    assert node.torchrun() == [
        "--nnodes=3",
        "--node_rank=1",
        "--nproc_per_node=4",
        "--master_addr=job-master-0",
        "--master_port=23456",
    ]


def test_without_the_pet_variables_the_world_size_of_all_nodes_counts():
    environment = {name: value for name, value in OPERATOR.items() if not name.startswith("PET_")}
    assert find_node({}, {**environment, "WANDISTILL_NPROC": "4"}) == Node(4, 3, 1, "job-master-0", 23456)


def test_flags_win_over_the_environment():
    flags = {"nproc": "2", "nnodes": "1", "node_rank": "0", "master_addr": None, "master_port": None}
    node = find_node(flags, OPERATOR)
    assert (node.ranks, node.nodes, node.number) == (2, 1, 0)
    assert node.torchrun() == ["--standalone", "--nproc_per_node=2"]


def test_without_anything_there_is_a_rank_for_each_gpu_and_one_without(tmp_path):
    assert find_node({}, {}, tmp_path) == Node(1)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_node({}, {}, tmp_path).ranks == 2
    # `auto` is the operator's default, and would be a process for each core on a CPU.
    assert find_node({}, {"PET_NPROC_PER_NODE": "auto"}, tmp_path).ranks == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nproc": "two"}, "--nproc two: must be a whole number"),
        ({"nnodes": "2"}, "--master_addr is missing"),
        ({"nnodes": "2", "node_rank": "2", "master_addr": "a"}, "--node_rank 2: must be below"),
    ],
)
def test_what_cannot_be_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        find_node(flags, {})


def test_a_wrong_flag_of_train_is_told_before_anything_starts():
    assert parse_train(["--output_dir", "x", "--on_oom", "replan"]).on_oom == "replan"
    with pytest.raises(ConfigError, match="--on_oom again: is not one of stop, replan"):
        parse_train(["--on_oom", "again"])
    with pytest.raises(ConfigError, match="--host_memory_stop"):
        parse_train(["--host_memory_stop", "1.5"])
