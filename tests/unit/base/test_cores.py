"""Which cores a rank's optimizer steps on: drawn hosts, and every reason to leave the threads to torch."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2x.base.cores import Host, choose, read_cores, read_quota

LAUNCHED = {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"LOCAL_RANK": "", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2"}
EIGHT = Host(frozenset(range(8)), frozenset(range(8)), tuple(range(8)), 1)


@given(st.sets(st.integers(0, 40), min_size=1), st.permutations(range(41)), st.integers(2, 12))
def test_ranks_share_the_cores(allowed, cores, num_ranks):
    """Each core of the process has one rank, in the order of nodes, and no rank has one core more than another."""
    host = Host(frozenset(allowed), frozenset(allowed), tuple(cores), 1)
    chosen = [
        choose({**LAUNCHED, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}, host)
        for rank in range(num_ranks)
    ]
    assert [core for share in chosen for core in share.cores] == (
        [core for core in cores if core in allowed] if len(allowed) >= 2 * num_ranks else []
    )
    sizes = [len(share.cores) for share in chosen]
    assert max(sizes) - min(sizes) <= 1
    assert [share.num_threads for share in chosen] == [size or 1 for size in sizes]


@pytest.mark.parametrize(
    ("environment", "host", "cores", "num_threads", "reason"),
    [
        ({}, {}, [4, 5, 6, 7], 4, "4 thread(s) on cores 4, 5, 6, 7: rank 1 of 2 on this host"),
        ({"LOCAL_WORLD_SIZE": "3"}, {}, [2, 3, 4], 3, "rank 1 of 3"),
        ({}, {"num_threads": 3}, [4, 5, 6, 7], 3, "3 thread(s) on"),
        ({}, {"num_threads": 64}, [4, 5, 6, 7], 4, "4 thread(s) on"),
        ({"OMP_PROC_BIND": "FALSE"}, {}, [4, 5, 6, 7], 4, "rank 1"),
        (SLURM | {"SLURM_STEP_ID": "0"}, {}, [0, 1, 2, 3], 4, "rank 0 of 2"),
        (SLURM, {}, [], 1, "no other rank is known"),  # a batch script
        ({"FSDP2X_STEP_CORES": "off"}, {}, [], 1, "1 thread(s) of torch: FSDP2X_STEP_CORES=off"),
        ({"OMP_PLACES": "cores"}, {}, [], 1, "OMP_PLACES binds them"),
        ({}, {"allowed": frozenset({2, 3, 4, 5})}, [], 1, "bound to 4 of 8 cores"),
        (
            {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            {"num_threads": 8},
            [],
            8,
            "8 thread(s) of torch: no other rank",
        ),
        ({"LOCAL_RANK": ""}, {}, [], 1, "no other rank is known"),
        ({}, {"quota": 6}, [4, 5, 6, 7], 3, "3 thread(s) on"),
        ({}, {"quota": 3}, [], 1, "3 cores are fewer than two for each of 2 ranks"),
        ({"LOCAL_WORLD_SIZE": "5"}, {}, [], 1, "8 cores are fewer than two for each of 5 ranks"),
    ],
)
def test_reasons(environment, host, cores, num_threads, reason):
    found = choose({**LAUNCHED, **environment}, EIGHT._replace(**host))
    assert (list(found.cores), found.num_threads) == (cores, num_threads)
    assert reason in found.reason


def test_threads_that_somebody_chose_are_kept():
    environment = {name: value for name, value in LAUNCHED.items() if name != "TORCHELASTIC_RUN_ID"}
    assert choose(environment, EIGHT)[:2] == ((4, 5, 6, 7), 1)
    with pytest.raises(ValueError, match="FSDP2X_STEP_CORES: got 'on', expected auto or off"):
        choose({"FSDP2X_STEP_CORES": "on"}, EIGHT)


@pytest.mark.parametrize("has_nodes", [True, False])
def test_the_kernels_files_are_read(tmp_path, has_nodes):
    """Two hardware threads a core: the first one stands for it. A node without cores, as memory has, is empty."""
    texts = {"cpu/online": "0-7\n"}
    if has_nodes:
        texts |= {"node/node2/cpulist": "0-1,4-5\n", "node/node1/cpulist": "\n", "node/node10/cpulist": "2-3,6,7\n"}
    texts |= {f"cpu/cpu{core}/topology/thread_siblings_list": f"{core % 4},{core % 4 + 4}\n" for core in range(2, 8)}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_cores(tmp_path) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("own", "texts", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),  # a container of version 2
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, sys.maxsize),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ("0::/job/step\n", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "800000 100000"}, 3),
        ("0::/elsewhere\n", {"cpu.max": "200000 100000"}, 2),  # the host's path inside a container
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "600000", "cpu/a/cpu.cfs_period_us": "100000", "memory/a/cpu.max": "1 1"},
            6,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, sys.maxsize),
        (None, {"cpu.max": "200000 100000"}, sys.maxsize),
    ],
)
def test_quotas_of_control_groups_are_read(tmp_path, own, texts, quota):
    if own is not None:
        texts = {**texts, "own": own}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_quota(tmp_path, tmp_path / "own") == quota
