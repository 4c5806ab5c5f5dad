# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules that read a host document is what their logic returns."""

from __future__ import annotations

import importlib

import pytest
import yaml

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, gpu_info, p2p_probe, preflight
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System


def documented(module, *path):
    """Keys that a module's RETURN names, at its top or below a key."""
    place = yaml.safe_load(importlib.import_module(f"ansible_collections.blackwell.dsv4.plugins.modules.{module}").RETURN)
    for key in path:
        place = place[key]["contains"]
    return set(place)


@pytest.fixture
def system(tmp_path):
    """A host with one GPU and nothing else."""
    device = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    for name, value in {"vendor": "0x10de", "device": "0x2bb5", "class": "0x030200"}.items():
        (device / name).write_text(value, encoding="utf-8")
    return System(str(tmp_path / "proc"), str(tmp_path / "sys"), str(tmp_path), search_path=str(tmp_path / "bin"))


def test_gpu_info_documents_what_it_returns(system):
    facts = gpu_info.gather(system, None)
    assert set(facts) == documented("gpu_info") and set(facts["gpus"][0]) == documented("gpu_info", "gpus")
    assert set(facts["driver"]) == documented("gpu_info", "driver") and set(facts["pci"][0]) == documented("gpu_info", "pci")
    assert set(facts["counts"]) == documented("gpu_info", "counts") and set(facts["sources"][0]) == documented("gpu_info", "sources")
    xids = gpu_info.parse_xids("NVRM: Xid (PCI:0000:53:00): 79, GPU has fallen off the bus.")
    assert set(xids[0]) == documented("gpu_info", "xids")


def test_driver_state_documents_what_it_returns(system):
    state = driver.state(system, driver.Question([]))
    assert set(state) == documented("driver_state", "state") and set(state["iommu"]) == documented("driver_state", "state", "iommu")
    dkms = driver.parse_dkms("nvidia/580.95.05, 6.8.0-90-generic, x86_64: installed\n")
    assert set(dkms[0]) == documented("driver_state", "state", "dkms")


def test_preflight_documents_what_it_returns(system):
    facts = gpu_info.gather(system, None)
    result = preflight.host(system, facts, {"machine": "x86_64"})
    returned = preflight.answer(result["findings"], [])
    assert {*returned, "facts"} == documented("preflight_host") and set(returned) == documented("preflight_inventory")
    assert {*returned, "p2p", "counts"} == documented("preflight_gpus")
    assert set(result["facts"]) == documented("preflight_host", "facts")
    assert set(result["facts"]["toolkit"]) == documented("preflight_host", "facts", "toolkit")
    assert documented("preflight_host", "facts", "driver") <= set(result["facts"]["driver"])
    for module in ("preflight_host", "preflight_inventory", "preflight_gpus"):
        assert set(returned["findings"][0]) == documented(module, "findings")
    peers = preflight.copy_between_peers(facts, {}, True, 1)
    assert set(peers) == documented("preflight_gpus", "p2p")
    row = p2p_probe.copy_pair(NoPeers(), "a", "b")
    assert set(row) == documented("preflight_gpus", "p2p", "pairs")


class NoPeers:
    """A CUDA library that offers no peer access."""

    def device(self, bus_id):
        return bus_id

    def can_access(self, _one, _other):
        return False
