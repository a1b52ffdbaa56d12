"""machine: what a process may use is read right on hosts, in version 1 and in version 2 containers."""

from __future__ import annotations

from pathlib import Path

from tokenmill.node.machine import oom_kills, read_machine

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f avx512_vnni\n\nprocessor\t: 1\n"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_plain_host_has_no_limits(tmp_path):
    machine = read_machine(lay(tmp_path, {}))
    assert machine.memory_available == machine.usable_memory == 20_000_000 * 1024
    assert machine.cgroup_headroom is None and machine.cpu_quota is None
    assert machine.usable_cores == machine.num_cpus
    assert (machine.cpu_model, machine.cpu_features) == ("Some CPU", ("avx2", "fma", "avx512f", "avx512_vnni"))


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    machine = read_machine(
        lay(
            tmp_path,
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "600000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 100000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "500000\n",
                "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "max 100000\n",
            },
        )
    )
    assert machine.cgroup_headroom == machine.usable_memory == 500_000
    assert machine.cpu_quota == 1.5
    assert machine.usable_cores == 1


def test_version_1_reads_its_own_files_and_ignores_no_limit(tmp_path):
    files = {
        "proc/self/cgroup": "7:memory:/job\n3:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    machine = read_machine(lay(tmp_path, files))
    assert machine.cgroup_headroom == 2_000_000
    assert machine.cpu_quota is None


def test_kills_for_want_of_memory_are_those_of_the_own_group_else_of_the_system(tmp_path):
    assert oom_kills(tmp_path) == 0, "nothing tells"
    lay(tmp_path, {"proc/vmstat": "pgfault 7\noom_kill 3\n"})
    assert oom_kills(tmp_path) == 3
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            "sys/fs/cgroup/a/b/memory.events": "low 0\noom 9\noom_kill 2\noom_group_kill 0\n",
        },
    )
    assert oom_kills(tmp_path) == 2
    lay(
        tmp_path / "old",
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        },
    )
    assert oom_kills(tmp_path / "old") == 5
