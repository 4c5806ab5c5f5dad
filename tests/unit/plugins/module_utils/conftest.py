# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host made of recorded files and answers, for the host modules' tests."""

from __future__ import annotations

import os

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import Result, System


class RecordedHost(System):
    """Files lie below a temporary folder; a command answers what was recorded for it, and each call is kept."""

    def __init__(self, folder):
        super().__init__(str(folder / "proc"), str(folder / "sys"), str(folder))
        self.folder = folder
        self.answers = {}
        self.calls = []

    def write(self, path, text):
        target = self.folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return self

    def answer(self, command, out="", code=0, err=""):
        """Record the answer of a command line; the longest recorded beginning of a call wins."""
        self.answers[command] = Result(code, out, err)
        return self

    def which(self, name):
        return name if any(command.split()[0] == name for command in self.answers) else None

    def run(self, argv, timeout=None):
        line = " ".join(argv)
        self.calls.append(line)
        fitting = [command for command in self.answers if line == command or line.startswith(command + " ")]
        return self.answers[max(fitting, key=len)] if fitting else Result(127, "", f"{argv[0]}: not recorded")

    def gpu(self, bus_id, driver="nvidia", device="0x2bb5", numa=0, bridges=(), width=16, width_max=16, bar_mib=131072):
        """A GPU on the PCI bus, below its bridges, as sysfs shows it."""
        path = self.folder / "sys/devices/pci0000:00"
        for bridge in bridges:
            path = path / bridge
        path = path / bus_id
        path.mkdir(parents=True, exist_ok=True)
        size = bar_mib * 1024 * 1024
        values = {
            "vendor": "0x10de",
            "device": device,
            "class": "0x030200",
            "numa_node": str(numa),
            "current_link_width": str(width),
            "max_link_width": str(width_max),
            "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "resource": f"0x0 0x3ffffff 0x40200\n0x{2**44:x} 0x{2**44 + size - 1:x} 0x14220c",
        }
        for name, value in values.items():
            (path / name).write_text(value + "\n", encoding="utf-8")
        bus = self.folder / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        if (bus / bus_id).is_symlink():
            return self
        (bus / bus_id).symlink_to(os.path.relpath(path, bus))
        if driver:
            home = self.folder / "sys/bus/pci/drivers" / driver
            home.mkdir(parents=True, exist_ok=True)
            (path / "driver").symlink_to(os.path.relpath(home, path))
        return self

    def eight_gpus(self, **options):
        for bus in ("03", "04", "53", "54", "83", "84", "d3", "d4"):
            self.gpu(f"0000:{bus}:00.0", **options)
        return self

    def loaded(self, version="580.95.05", flavour="open"):
        spelling = "UNIX Open Kernel Module for x86_64  " if flavour == "open" else "UNIX x86_64 Kernel Module  "
        self.write("proc/driver/nvidia/version", f"NVRM version: NVIDIA {spelling}{version}  Release Build\n")
        return self.write("proc/modules", "nvidia 14381056 1 - Live 0x0 (OE)\n").write("proc/sys/kernel/osrelease", "6.8.0-90-generic\n")

    def modinfo(self, version="580.95.05", licence="Dual MIT/GPL"):
        return self.answer(
            "modinfo", f"filename:       /lib/modules/x/updates/dkms/nvidia.ko.zst\nversion:        {version}\nlicense:        {licence}\n"
        )


@pytest.fixture
def host(tmp_path):
    return RecordedHost(tmp_path)


@pytest.fixture
def umask_077():
    """root's umask on a hardened host."""
    before = os.umask(0o077)
    yield
    os.umask(before)
