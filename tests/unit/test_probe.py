"""Memory limits: fake trees of both cgroup versions, and a real group where we may make one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from p2pshard_node.probe import cgroup_limits, peak_bytes, probe_memory

MB = 10**6
V1_NONE = 9223372036854771712


class Tree:
    """A root folder with /proc and /sys as we say."""

    def __init__(self, root: Path, available: int = 8000 * MB) -> None:
        self.root = root
        self.mounts: list[str] = ["23 1 0:1 / / rw - ext4 /dev/vda rw"]
        self.write(
            "proc/meminfo",
            f"MemTotal: {16000 * MB // 1024} kB\nMemAvailable: {available // 1024} kB\nHugePages: x\n",
        )

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def member(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))

    def mount(self, kind: str, at: str, top: str = "/", options: str = "rw") -> None:
        self.mounts.append(
            f"35 23 0:{len(self.mounts) + 5} {top} {at} rw,relatime shared:4 - {kind} {kind} {options}"
        )
        self.write("proc/self/mountinfo", "\n".join(self.mounts))
        (self.root / at.lstrip("/").replace("\\040", " ")).mkdir(parents=True, exist_ok=True)

    def v1(self, group: str, limit: int, used: int, inactive: int = 0) -> None:
        self.write(f"{group}/memory.limit_in_bytes", limit)
        self.write(f"{group}/memory.usage_in_bytes", used)
        self.write(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}")

    def v2(self, group: str, limit: object, used: int, inactive: int = 0, high: object = "max") -> None:
        self.write(f"{group}/memory.max", limit)
        self.write(f"{group}/memory.high", high)
        self.write(f"{group}/memory.current", used)
        self.write(f"{group}/memory.stat", f"anon 5\ninactive_file {inactive}")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def near(a: int, b: int) -> bool:
    return abs(a - b) < 4096


def test_without_limits_it_is_what_is_free_and_never_the_total(tree: Tree) -> None:
    memory = probe_memory(root=tree.root)
    assert near(memory.free_bytes, 8000 * MB) and memory.budget_bytes == memory.free_bytes
    assert near(memory.total_bytes, 16000 * MB) and memory.bound_by == "free memory"


def test_the_users_budget_bounds_and_never_raises(tree: Tree) -> None:
    assert probe_memory(600 * MB, root=tree.root).budget_bytes == 600 * MB
    assert probe_memory(600 * MB, root=tree.root).bound_by == "--memory"
    assert near(probe_memory(64_000 * MB, root=tree.root).budget_bytes, 8000 * MB)


def test_what_our_workers_hold_is_part_of_the_budget(tree: Tree) -> None:
    assert near(probe_memory(root=tree.root, held_bytes=500 * MB).budget_bytes, 8500 * MB)
    assert probe_memory(600 * MB, root=tree.root, held_bytes=500 * MB).budget_bytes == 600 * MB


def test_cgroup_v1_and_its_ancestors(tree: Tree) -> None:
    tree.member("4:memory:/a/b", "0::/")
    tree.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    tree.v1("sys/fs/cgroup/memory", V1_NONE, 9 * MB)
    tree.v1("sys/fs/cgroup/memory/a", 700 * MB, 500 * MB, inactive=100 * MB)
    tree.v1("sys/fs/cgroup/memory/a/b", 900 * MB, 100 * MB)
    assert [limit.left_bytes for limit in cgroup_limits(tree.root)] == [800 * MB, 300 * MB]
    memory = probe_memory(root=tree.root)
    assert memory.free_bytes == 300 * MB and memory.bound_by == "cgroup /sys/fs/cgroup/memory/a"
    assert memory.total_bytes == 700 * MB


def test_cgroup_v2_and_its_ancestors(tree: Tree) -> None:
    tree.member("0::/user.slice/app")
    tree.mount("cgroup2", "/sys/fs/cgroup")
    tree.v2("sys/fs/cgroup/user.slice", 2000 * MB, 1500 * MB, inactive=200 * MB)
    tree.v2("sys/fs/cgroup/user.slice/app", "max", 900 * MB)
    assert [limit.left_bytes for limit in cgroup_limits(tree.root)] == [700 * MB]
    tree.v2("sys/fs/cgroup/user.slice/app", "max", 900 * MB, high=1000 * MB)
    assert probe_memory(root=tree.root).free_bytes == 100 * MB


def test_both_versions_at_once(tree: Tree) -> None:
    tree.member("4:cpu,memory:/x", "0::/y")
    tree.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,cpu,memory")
    tree.mount("cgroup2", "/sys/fs/cgroup/unified")
    tree.v1("sys/fs/cgroup/memory/x", 400 * MB, 0)
    tree.v2("sys/fs/cgroup/unified/y", 300 * MB, 0)
    assert probe_memory(root=tree.root).free_bytes == 300 * MB


def test_a_group_over_its_limit_leaves_nothing(tree: Tree) -> None:
    tree.member("0::/a")
    tree.mount("cgroup2", "/sys/fs/cgroup")
    tree.v2("sys/fs/cgroup/a", 100 * MB, 120 * MB)
    assert probe_memory(root=tree.root).budget_bytes == 0


def test_a_hierarchy_mounted_elsewhere(tree: Tree) -> None:
    tree.member("7:memory:/jobs/1")
    tree.mount("cgroup", "/mnt/my\\040groups", options="rw,memory")
    tree.v1("mnt/my groups/jobs/1", 250 * MB, 50 * MB)
    assert probe_memory(root=tree.root).free_bytes == 200 * MB


def test_a_container_that_sees_a_part_of_the_hierarchy(tree: Tree) -> None:
    tree.member("4:memory:/docker/abc/inner")
    tree.mount("cgroup", "/sys/fs/cgroup/memory", top="/docker/abc", options="rw,memory")
    tree.v1("sys/fs/cgroup/memory", 512 * MB, 12 * MB)
    tree.v1("sys/fs/cgroup/memory/inner", 800 * MB, 0)
    assert probe_memory(root=tree.root).free_bytes == 500 * MB


@pytest.mark.parametrize("group", ["/../../elsewhere", "/gone/away"])
def test_a_group_that_cannot_be_seen_is_bounded_by_the_top(tree: Tree, group: str) -> None:
    tree.member(f"0::{group}")
    tree.mount("cgroup2", "/sys/fs/cgroup")
    tree.v2("sys/fs/cgroup", 640 * MB, 40 * MB)
    assert probe_memory(root=tree.root).free_bytes == 600 * MB


def test_a_process_in_no_group_or_a_system_that_is_unknown(tree: Tree) -> None:
    assert cgroup_limits(tree.root) == ()
    tree.write("proc/self/cgroup", "\x00\x01 nonsense\n::::\n")
    tree.write("proc/self/mountinfo", "nothing - \n - - -\n1 2 3 - cgroup2")
    assert cgroup_limits(tree.root) == ()
    tree.member("0::/a")
    tree.mount("cgroup2", "/sys/fs/cgroup")
    tree.write("sys/fs/cgroup/a/memory.max", "lots")
    assert near(probe_memory(root=tree.root).free_bytes, 8000 * MB)


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    memory = probe_memory(root=tmp_path)
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_of_this_machine() -> None:
    memory = probe_memory()
    assert 0 < memory.budget_bytes <= memory.free_bytes <= memory.total_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")
def test_peak_is_the_high_water_mark() -> None:
    code = (
        "x = bytearray(80_000_000); x[::4096] = b'x' * len(x[::4096]); del x; "
        "print('ok', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ok\n"
        assert 80 * MB < (peak_bytes(child.pid) or 0) < 160 * MB
        child.communicate(b"\n", timeout=10)
    assert peak_bytes(child.pid) is None


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[tuple[Path, str]]:
    """A control group below our own, of whichever version accounts memory here: (folder, version)."""
    own = next(iter(_own_groups()), None)
    if own is None:
        pytest.skip("no memory control group is mounted here")
    folder, file = own[0] / f"p2pshard-test-{os.getpid()}", own[1]
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"a memory control group cannot be made here: {error}")
    try:
        yield folder, file
    finally:
        folder.rmdir()


def _own_groups() -> Iterator[tuple[Path, str]]:
    for line in (
        Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else ()
    ):
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / group.lstrip("/"), "memory.limit_in_bytes"
        elif not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            yield Path("/sys/fs/cgroup") / group.lstrip("/"), "memory.max"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
def test_a_real_control_group_bounds_the_budget() -> None:
    limit = 300 * 1024 * 1024
    code = (
        "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from p2pshard_node.probe import probe_memory\n"
        "held = bytearray(100 * 1024 * 1024); held[::4096] = b'x' * len(held[::4096])\n"
        "m = probe_memory(); print(m.budget_bytes, m.total_bytes, m.bound_by)"
    )
    with real_group(limit) as (folder, _):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    budget, total, bound_by = done.stdout.split(maxsplit=2)
    assert 100 * MB < int(budget) < limit - 100 * 1024 * 1024
    assert int(total) <= limit
    assert folder.name in bound_by
