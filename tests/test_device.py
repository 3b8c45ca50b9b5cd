"""The memory nodes of vLLM's CPU backend, read from the kernel's own layout."""

from supervisor_vllm.evidence.device import read_memory_nodes

MEMINFO = """\
Node {n} MemTotal:        8218828 kB
Node {n} MemFree:         7000000 kB
Node {n} MemUsed:          381496 kB
Node {n} Active(file):      10000 kB
Node {n} Inactive(file):    20000 kB
Node {n} SReclaimable:       5000 kB
Node {n} HugePages_Total:     0
"""


def test_nodes_count_as_vllm_counts_them(tmp_path):
    for number in (0, 1):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "meminfo").write_text(MEMINFO.format(n=number))
    first, second = read_memory_nodes(tmp_path)
    assert first.total_bytes == 8218828 * 1024
    assert first.free_bytes == (7000000 + 10000 + 20000 + 5000) * 1024
    assert (first.index, second.index, second.uuid) == (0, 1, "node1")


def test_a_machine_without_nodes(tmp_path):
    assert read_memory_nodes(tmp_path) == ()
