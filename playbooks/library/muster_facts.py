#!/usr/bin/python3
"""Everything Muster wants to know of a host, in one call: system, memory, disk, engine, NICs, GPUs, images, runs.

The reader is launch/deploy.py (through playbooks/prepare.yml); the schema is RETURN below. It only looks and changes
nothing: the work is done in module_utils/muster_survey.py, which `make check` runs without Ansible. Needs root for
Podman's images and containers. Not for the network between hosts: that is muster_reach.
"""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_survey import survey

DOCUMENTATION = r"""
module: muster_facts
short_description: Everything about a host in one call
options:
  root:
    description: Muster's folder on the host.
    type: path
    default: /var/lib/muster
  train_interface:
    description: The NIC that the user chose for this host. It is not refused, whatever its kind.
    type: str
  train_network:
    description: The network (CIDR) that the user chose. NICs with an address in it are not refused.
    type: str
  data_dir:
    description: The folder of the data set, to be fingerprinted in the full form.
    type: path
  full:
    description: >-
      Also what takes longer, how busy the processors are, the engine's runtime and storage driver and the data set's
      fingerprint.
    type: bool
    default: true
author: [Muster]
"""

RETURN = r"""
facts:
  description: >-
    began, ended, time (unix seconds; time is began), hostname, machine_id, kernel, arch, os {id, version}, python,
    cpus (usable), machine_cpus, cpu_model, cpu_flags [those that change numerics], load_average [1, 5, 15 minutes],
    busy (share of the machine's processor time in use when the survey began, 0.0 to 1.0; null unless full),
    limits {nofile, nofile_hard, memlock_bytes, nproc, core_bytes} (-1 is none), memory_bytes, memory_free_bytes,
    disk_free_bytes and disk_total_bytes (of Podman's storage), muster_disk_free_bytes, shm_bytes, shm_free_bytes,
    engine {name, version, runtime, storage_driver; the last two null unless full} or null,
    nics [{name, kind, up, carrier, mtu, mac, speed_mbits, master, parent (what a VLAN is on),
    addresses [{address, prefix, family, scope}], refused (why, or null)}],
    candidates [address] (what muster_reach shall try),
    rdma [{device, port, state, rate_gbits, link_layer, nics [name], soft}],
    gpus [{vendor, index, name, uuid, memory_mib, driver, compute_capability, pci_bus_id, ecc_uncorrected, mig,
    mig_instances [{name, uuid}], usable, unusable_reason}],
    gpu_problems [{vendor, gpu (PCI address, or "GPU 1"; null is all of them), fatal, what, mend}], gpu_problem (the
    fatal ones in words, or null), gpu_health [{index, pci_bus_id, uuid, temperature_c, throttle [words],
    ecc_uncorrected, repair_pending, repair_failed, processes [{pid, user, name, memory_mib}]}] (NVIDIA's),
    xid [{pci, xid, when, count, line}] or null with xid_problem (why the kernel's log cannot be read),
    images {ref, id} or null, runs [{run, container, state, owner, created, age_seconds}] or null (Podman fails),
    data {path, present} or null (no data_dir); if full also {complete, files, bytes, sha256, sampled, seconds}
  returned: always
  type: dict
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/muster"},
            "train_interface": {"type": "str"},
            "train_network": {"type": "str"},
            "data_dir": {"type": "path"},
            "full": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    try:
        facts = survey(module.params)
    except (RuntimeError, ValueError) as error:
        module.fail_json(msg=str(error))
    if facts["engine"] and facts["engine"]["storage_driver"] == "vfs":
        module.warn(
            "Podman stores images with vfs on this host: every layer is a full copy, slow and large. Mend: put "
            "/var/lib/containers on ext4, xfs or btrfs (not on another overlay), or install fuse-overlayfs"
        )
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
